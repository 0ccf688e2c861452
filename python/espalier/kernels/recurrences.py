# SPDX-License-Identifier: Apache-2.0
"""Recurrences by libraries that know sequences with initial and final states: gated_delta.py, ssm_scan.py.

A forest is handed to them as waves of sequences (waves.py). Importing espalier.ops registers for CUDA devices those that are
installed. What a library does not serve, or what costs more in waves than in chunks (`Rates`), the composed form computes, as
it does everything without libraries.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from . import verdicts
from .waves import Waves, waves_of

VARIABLE = "ESPALIER_RECURRENCES"  # "library" or "composed": that form, whatever is proven and measured


class Library(NamedTuple):
    """What computes an operator on GPUs.

    operator    its name
    title       of what it computes, for people
    package     the distribution
    versions    "MAJOR.MINOR" whose interface is the one used here
    dtypes      that it computes
    command     installs it"""

    operator: str
    title: str
    package: str
    versions: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    command: str

    def installed(self) -> str:
        """"PACKAGE VERSION" where it is installed in such a version, else ""."""
        version = verdicts.version_of(self.package)
        return f"{self.package} {version}" if ".".join(version.split(".")[:2]) in self.versions else ""

    def family(self, dtype: torch.dtype) -> str:
        """Of its verdicts in a dtype."""
        return f"{self.operator} {str(dtype).removeprefix('torch.')}"


EXTRA = "pip install 'espalier-train[cuda]'"


class Counts(NamedTuple):
    """What both forms go through: calls of the library with tokens in all, and levels of chunks with tokens in all."""

    calls: int
    call_tokens: int
    levels: int
    level_tokens: int


class Rates(NamedTuple):
    """Seconds of a forward and a backward pass of a layer with states of 32 * 128 * 128 numbers.

    wave, wave_token    the library's: of a call by itself, and of a token
    level, level_token  the composed form's: of a level of chunks by itself, and of a token

    They are measured when the library is checked on a GPU (checks.py), and kept with its verdict."""

    wave: float
    wave_token: float
    level: float
    level_token: float

    def prefers_waves(self, counts: Counts, state_size: int) -> bool:
        """For states of `state_size` numbers, all heads together."""
        part = state_size / (32 * 128 * 128)
        in_waves = counts.calls * self.wave + part * counts.call_tokens * self.wave_token
        return in_waves <= counts.levels * self.level + part * counts.level_tokens * self.level_token


class Recurrence:
    """The arguments of an operator, and how a library computes it; a dataclass of these arguments in their order."""

    library: ClassVar[Library]
    prev: Tensor
    states: Tensor | None
    ends: Tensor

    def inputs(self) -> list[Tensor | None]:
        """What the operator is differentiable in, in the order in which its backward gives gradients; the first is of the
        dtype and on the device of all."""
        raise NotImplementedError

    def state_shape(self) -> tuple[int, int, int]:
        raise NotImplementedError

    def fits(self) -> bool:
        """Whether the operator takes the arguments other than prev and ends; the composed form says what is wrong with others."""
        raise NotImplementedError

    def is_served(self, waves: Waves) -> bool:
        """Whether the library has kernels for such sizes."""
        raise NotImplementedError

    def counts(self, waves: Waves) -> Counts:
        raise NotImplementedError

    def scan(self, waves: Waves, inputs: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        """Both results of the operator for `inputs` in place of the recorded ones."""
        raise NotImplementedError


def are_paths(prev: Tensor, ends: Tensor, num_tokens: int, num_states: int) -> bool:
    """Whether prev and ends are what the operators take, for so many tokens and initial states."""
    if prev.dtype != torch.int32 or ends.dtype != torch.int64 or not (prev.device == ends.device == torch.device("cpu")):
        return False
    if prev.shape != (num_tokens,) or ends.dim() != 1 or not (prev.is_contiguous() and ends.is_contiguous()):
        return False
    inside = bool((prev < torch.arange(num_tokens, device="cpu")).all()) and bool((prev >= -1 - num_states).all())
    return inside and bool(((ends >= 0) & (ends < num_tokens)).all())


def _served(given: Recurrence, device: str) -> Waves | None:
    """The waves, where the library computes this; None where it does not."""
    if torch.are_deterministic_algorithms_enabled() or not given.fits():
        return None  # its kernels are tuned anew in each process, and bits change with that
    first = given.inputs()[0]
    assert first is not None
    if not are_paths(given.prev, given.ends, len(first), 0 if given.states is None else len(given.states)):
        return None
    if device != "CPU" and first.dtype not in given.library.dtypes:
        return None
    rates = _rates(given.library, first)
    if rates is None:
        return None
    waves = waves_of(given.prev, given.ends, first.device)
    heads, rows, columns = given.state_shape()
    is_taken = given.is_served(waves) and rates.prefers_waves(given.counts(waves), heads * rows * columns)
    return waves if is_taken else None


def named_form() -> str:
    """The form that the environment names, "" where it leaves the choice."""
    named = os.environ.get(VARIABLE, "")
    if named not in ("", "library", "composed"):
        raise ValueError(f"ESPALIER_RECURRENCES: expected library or composed, received {named}")
    return named


def finding_of(library: Library, like: Tensor) -> verdicts.Finding:
    """What is known about a library in the dtype of a tensor, on its CUDA device. The first question about a GPU checks and
    measures it, which takes a minute or so, and of Mamba-2 several."""
    return verdicts.verdict_on(library.family(like.dtype), like.device.index)


def _rates(library: Library, like: Tensor) -> Rates | None:
    """Of the library on the device of a tensor and in its dtype; None where it is not to be used."""
    if named := named_form():
        return Rates(0, 0, 0, 0) if named == "library" else None
    if like.device.type != "cuda":
        return None
    found = finding_of(library, like)
    return Rates(*found.rates) if found.is_right and found.rates else None


def composed(name: str, *arguments: Any) -> Any:
    """What the operator of this name computes without a library."""
    operator = getattr(torch.ops.espalier, name).default
    return operator._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *arguments)


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Autograd records inside, as it does not below an operator."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def _forward(kind: Callable[..., Recurrence], device: str, *arguments: Any) -> tuple[Tensor, Tensor]:
    """An operator."""
    given = kind(*arguments)
    waves = _served(given, device)
    if waves is None:
        return composed(given.library.operator, *arguments)
    with torch.no_grad():
        out, states = given.scan(waves, given.inputs())
        return out.contiguous(), states.contiguous()


def _backward(kind: Callable[..., Recurrence], device: str, grad_out: Tensor | None, grad_end_states: Tensor | None,
              *arguments: Any) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The backward of an operator. The library computes forward again, which it keeps for autograd."""
    given = kind(*arguments)
    waves = _served(given, device)
    if waves is None:
        return composed(f"{given.library.operator}_backward", grad_out, grad_end_states, *arguments)
    with recording():
        inputs = [None if each is None else each.detach().requires_grad_() for each in given.inputs()]
        results = given.scan(waves, inputs)
        wanted = [(result, grad) for result, grad in zip(results, (grad_out, grad_end_states))
                  if grad is not None and result.requires_grad]  # fmt: skip
        leaves = [each for each in inputs if each is not None]
        found = torch.autograd.grad([result for result, _ in wanted], leaves, [grad for _, grad in wanted], allow_unused=True)
    gradients_found = iter(zip(leaves, found))
    return tuple(None if each is None else _gradient(*next(gradients_found)) for each in inputs)


def _gradient(leaf: Tensor, grad: Tensor | None) -> Tensor:
    if grad is None:
        return torch.zeros_like(leaf)
    grad = grad.contiguous()
    return grad.clone() if grad.untyped_storage().nbytes() > grad.nbytes else grad  # operators' results share no storage


def register(kind: type[Recurrence], device: str = "CUDA") -> torch.library.Library:
    """Lets an operator find the functions above, on CUDA devices, or in tests on the "CPU", for as long as the result lives."""
    return implemented(kind.library.operator, functools.partial(_forward, kind, device),
                       functools.partial(_backward, kind, device), device)  # fmt: skip


def implemented(operator: str, forward: Callable[..., Any], backward: Callable[..., Any], device: str) -> torch.library.Library:
    library = torch.library.Library("espalier", "IMPL")
    library.impl(operator, forward, device)
    library.impl(f"{operator}_backward", backward, device)
    return library
