# SPDX-License-Identifier: Apache-2.0
"""gated_delta_rule by chunk_gated_delta_rule of flash-linear-attention.

A forest is handed to it as waves of sequences (waves.py). Importing espalier.ops registers it for CUDA devices where it is
installed. What it does not serve, or what costs more in waves than in chunks (`Rates`), the composed form computes, as it does
everything without this.
"""

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import verdicts
from .waves import Wave, Waves, waves_of

VARIABLE = "ESPALIER_RECURRENCES"  # "library" or "composed": that form, whatever is proven and measured
_DTYPES = (torch.bfloat16, torch.float32)
_MOST_KEY_DIM = 256  # of the library's kernels


class Rates(NamedTuple):
    """Seconds of a forward and a backward pass of a layer with 32 heads of 128 x 128.

    wave, wave_token    the library's: of a wave by itself, and of a token
    level, level_token  the composed form's: of a level of chunks by itself, and of a token

    They are measured when the library is checked on a GPU (checks.py), and kept with its verdict."""

    wave: float
    wave_token: float
    level: float
    level_token: float

    def prefers_waves(self, waves: Waves, num_tokens: int, state_size: int) -> bool:
        """For states of `state_size` numbers, all heads together."""
        size = num_tokens * state_size / (32 * 128 * 128)
        in_waves = len(waves.waves) * self.wave + size * self.wave_token
        return in_waves <= waves.num_levels * self.level + size * self.level_token


@functools.cache
def _fla() -> Any:
    import fla.ops.gated_delta_rule as library

    return library


class _Given(NamedTuple):
    """The arguments of the operator."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    prev: Tensor
    states: Tensor | None
    ends: Tensor
    chunk_size: int = 64

    @property
    def rows(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.g, self.beta

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.v.shape[1], self.q.shape[2], self.v.shape[2]

    def fits(self) -> bool:
        """Whether the operator takes these arguments; the composed form says what is wrong with others."""
        q, k, v, g, beta, prev, states, ends, _ = self
        if q.dim() != 3 or k.shape != q.shape or v.dim() != 3 or 0 in (q.numel(), v.numel()) or v.shape[1] % q.shape[1]:
            return False
        sums = torch.promote_types(q.dtype, torch.float32)
        same = all(each.shape == v.shape[:2] and each.dtype == sums for each in (g, beta)) and len(v) == len(q)
        same &= k.dtype == v.dtype == q.dtype and {each.device for each in self.rows} == {q.device}
        if states is not None:
            same &= states.shape[1:] == self.state_shape and states.dtype == sums and states.device == q.device
        return same and are_paths(prev, ends, len(q), 0 if states is None else len(states))


def are_paths(prev: Tensor, ends: Tensor, num_tokens: int, num_states: int) -> bool:
    """Whether prev and ends are what the operators take, for so many tokens and initial states."""
    if prev.dtype != torch.int32 or ends.dtype != torch.int64 or not (prev.device == ends.device == torch.device("cpu")):
        return False
    if prev.shape != (num_tokens,) or ends.dim() != 1 or not (prev.is_contiguous() and ends.is_contiguous()):
        return False
    inside = bool((prev < torch.arange(num_tokens)).all()) and bool((prev >= -1 - num_states).all())
    return inside and bool(((ends >= 0) & (ends < num_tokens)).all())


def _served(given: _Given, device: str) -> Waves | None:
    """The waves, where the library computes this; None where it does not."""
    if not given.fits() or given.q.shape[2] > _MOST_KEY_DIM or torch.are_deterministic_algorithms_enabled():
        return None  # its kernels are tuned anew in each process, and bits change with that
    if device != "CPU" and given.q.dtype not in _DTYPES:
        return None
    rates = _rates(given.q)
    if rates is None:
        return None
    waves = waves_of(given.prev, given.ends, given.q.device)
    heads, key_dim, value_dim = given.state_shape
    return waves if rates.prefers_waves(waves, len(given.q), heads * key_dim * value_dim) else None


def _rates(query: Tensor) -> Rates | None:
    """Of the library on this device and in this dtype; None where it is not to be used. The first question about a GPU checks
    and measures it, which takes a minute or so."""
    if named := os.environ.get(VARIABLE):
        if named not in ("library", "composed"):
            raise ValueError(f"ESPALIER_RECURRENCES: expected library or composed, received {named}")
        return Rates(0, 0, 0, 0) if named == "library" else None
    if query.device.type != "cuda":
        return None
    found = verdicts.verdict_on(f"recurrences {str(query.dtype).removeprefix('torch.')}", query.device.index)
    return Rates(*found.rates) if found.is_right and found.rates else None


def _step(wave: Wave, rows: Sequence[Tensor], initial: Tensor | None) -> tuple[Tensor, Tensor | None]:
    q, k, v, g, beta = (each.unsqueeze(0) for each in rows)
    out, final = _fla().chunk_gated_delta_rule(
        q, k, v, g, beta, initial_state=initial, output_final_state=wave.is_continued, use_qk_l2norm_in_kernel=True,
        cu_seqlens=wave.cu_seqlens, cu_seqlens_cpu=wave.cu_seqlens_cpu)  # fmt: skip
    return out.squeeze(0), final


def _composed(name: str, *arguments: Any) -> Any:
    operator = getattr(torch.ops.espalier, name).default
    return operator._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *arguments)


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    """Autograd records inside, as it does not below an operator."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def _forward(device: str, *arguments: Any) -> tuple[Tensor, Tensor]:
    """espalier::gated_delta_rule."""
    given = _Given(*arguments)
    waves = _served(given, device)
    if waves is None:
        out, states = _composed("gated_delta_rule", *arguments)
        return out, states
    with torch.no_grad():
        out, states = waves.scan(given.rows, given.states, given.state_shape, _step)
        return out.contiguous(), states


def _backward(device: str, grad_out: Tensor | None, grad_end_states: Tensor | None,
              *arguments: Any) -> tuple[Tensor | None, ...]:  # fmt: skip
    """espalier::gated_delta_rule_backward. The library computes forward again, which it keeps for autograd."""
    given = _Given(*arguments)
    waves = _served(given, device)
    if waves is None:
        gradients: tuple[Tensor | None, ...] = _composed("gated_delta_rule_backward", grad_out, grad_end_states, *arguments)
        return gradients
    with _recording():
        rows = [each.detach().requires_grad_() for each in given.rows]
        states = None if given.states is None else given.states.detach().requires_grad_()
        results = waves.scan(rows, states, given.state_shape, _step)
        wanted = [(result, grad) for result, grad in zip(results, (grad_out, grad_end_states))
                  if grad is not None and result.requires_grad]  # fmt: skip
        leaves = rows if states is None else [*rows, states]
        found = torch.autograd.grad([result for result, _ in wanted], leaves, [grad for _, grad in wanted], allow_unused=True)
    zeros = [torch.zeros_like(leaf) if grad is None else grad.contiguous() for leaf, grad in zip(leaves, found)]
    return (*zeros, None) if states is None else tuple(zeros)


def installed() -> str:
    """"fla VERSION" where a version with the interface used here is installed, else ""."""
    version = verdicts.version_of("flash-linear-attention")
    return f"fla {version}" if version.split(".")[:2] == ["0", "6"] else ""


def register(device: str = "CUDA") -> torch.library.Library:
    """Lets the operator gated_delta_rule find the functions above, on CUDA devices, or in tests on the "CPU", for as long as
    the result lives."""
    library = torch.library.Library("espalier", "IMPL")
    library.impl("gated_delta_rule", functools.partial(_forward, device), device)
    library.impl("gated_delta_rule_backward", functools.partial(_backward, device), device)
    return library
