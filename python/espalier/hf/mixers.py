# SPDX-License-Identifier: Apache-2.0
"""Recurrent mixers over a forest.

The mixers of Transformers call functions of their module, and hand them the keyword arguments of the model's forward.
These functions are replaced by ones that follow the forest where they are handed one, as `espalier_tree`, or where the layer
around has been told of one (told.py); without it they are the functions of Transformers, so that other models of the module
stay as they are, in backward as well.
"""

import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import softplus

from .. import ops
from ..errors import Unsupported
from . import told

if TYPE_CHECKING:
    from .run import TreeRun

Mixer: TypeAlias = Mapping[str, Callable[..., Any]]  # functions that follow a forest, by the names of those they replace

ACTIVATIONS = {None: False, "silu": True, "swish": True}  # whether causal_conv1d applies SiLU


@dataclass(frozen=True)
class Recurrence:
    """What a recurrent layer computes along the paths of a forest. Its states go on as S' = A S + B: a product of matrices, or of
    numbers where A has one for each head.

    call          (tokens, prev, states, ends) -> (out [N, ...], end states [E, ...] or None without ends), for some of the
                  tokens (None: for all), as the recurrences in espalier.ops
    factors       (tokens, prev, ends) -> [E, ...]: A from the beginnings of paths where prev is -2 to the ends; zero from
                  others
    like          [0, ...]: of the shape and dtype of states
    like_factors  [0, ...]: of those of A
    """

    call: Callable[[Tensor | None, Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor | None]]
    factors: Callable[[Tensor, Tensor, Tensor], Tensor]
    like: Tensor
    like_factors: Tensor

    def moved(self, factors: Tensor, states: Tensor) -> Tensor:
        """A S."""
        return factors * states if factors.shape[-1] == 1 else factors @ states


def _convolve(run: "TreeRun", hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None,
              activation: str | None = None, **_: Any) -> Tensor:  # fmt: skip
    """causal_conv1d_fn: hidden_states [1, C, T], weight [C, W], bias [C]; returns [1, C, T]."""
    if activation not in ACTIVATIONS:
        raise Unsupported(f"causal convolution: expected SiLU or no activation, received {activation!r}")
    x = hidden_states.squeeze(0).t()
    weight = weight if weight.dtype == x.dtype else weight.to(_dtype_of_sums(x))
    bias = bias if bias is None or bias.dtype == x.dtype else bias.to(_dtype_of_sums(x))

    def convolved(tokens: Tensor | None, prev: Tensor, tails: Tensor | None, ends: Tensor | None) -> tuple[Tensor, Tensor | None]:
        (rows,) = _at(tokens, x)
        out = ops.causal_conv1d(rows, weight, bias, prev, tails=tails, silu=ACTIVATIONS[activation])
        return out, None if ends is None else ops.causal_conv1d_tails(rows, prev, ends, weight.shape[1], tails=tails)

    size = weight.shape[1] - 1

    def shifts(tokens: Tensor, prev: Tensor, ends: Tensor) -> Tensor:
        nothing, identity = x.new_zeros(len(tokens), size), torch.eye(size, dtype=x.dtype, device=x.device).unsqueeze(0)
        return ops.causal_conv1d_tails(nothing, prev, ends, size + 1, tails=identity)

    recurrence = Recurrence(convolved, shifts, x.new_empty(0, size, x.shape[1]), x.new_empty(0, size, size))
    return run.along_paths("tails", recurrence).t().unsqueeze(0)


def _gated_delta_rule(run: "TreeRun", query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
                      initial_state: Any = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
                      **_: Any) -> tuple[Tensor, None]:  # fmt: skip
    """torch_chunk_gated_delta_rule: query and key [1, T, K, Dk], value [1, T, H, Dv], g and beta [1, T, H]; returns
    ([1, T, H, Dv], None)."""
    if initial_state is not None or output_final_state or not use_qk_l2norm_in_kernel:
        raise Unsupported("gated delta rule: expected queries and keys to be normalised, and no cache of states")
    dtype = _dtype_of_sums(query)
    given = [query.squeeze(0), key.squeeze(0), value.squeeze(0), g.squeeze(0).to(dtype), beta.squeeze(0).to(dtype)]

    def recurred(tokens: Tensor | None, prev: Tensor, states: Tensor | None, ends: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, decay, strength = _at(tokens, *given)
        return ops.gated_delta_rule(q, k, v, decay, strength, prev, states=states, ends=ends)

    heads, width = value.shape[2], key.shape[3]

    def products(tokens: Tensor, prev: Tensor, ends: Tensor) -> Tensor:
        q, k, decay, strength = _at(tokens, given[0], given[1], given[3], given[4])
        identity = torch.eye(width, dtype=dtype, device=key.device).expand(1, heads, width, width)
        nothing = k.new_zeros(len(k), heads, width)
        return ops.gated_delta_rule(q, k, nothing, decay, strength, prev, states=identity.contiguous(), ends=ends)[1]

    like = query.new_empty(0, heads, width, value.shape[3], dtype=dtype)
    recurrence = Recurrence(recurred, products, like, query.new_empty(0, heads, width, width, dtype=dtype))
    return run.along_paths("states", recurrence).unsqueeze(0), None


def _ssm_scan(run: "TreeRun", hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
              chunk_size: int | None = None, D: Tensor | None = None, dt_bias: Tensor | None = None,
              dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, float("inf")), initial_states: Any = None,
              return_final_states: bool = False, z: Any = None, **_: Any) -> Tensor:  # fmt: skip
    """mamba2_chunk_scan: hidden_states [1, T, H, P], dt [1, T, H], A, D and dt_bias [H], B and C [1, T, G, N]; returns
    [1, T, H, P] in float32 (float64 for float64), as it does."""
    if initial_states is not None or return_final_states or z is not None:
        raise Unsupported("selective state space: expected no cache of states, and a gate outside of the scan")
    dtype = _dtype_of_sums(hidden_states)
    steps = dt.squeeze(0).to(dtype)
    if dt_bias is not None:
        steps = steps + dt_bias.to(dtype)
    if dt_softplus:
        steps = softplus(steps)
    steps = steps.clamp(*dt_limit)
    skip = None if D is None else D.to(dtype)
    return _scanned(run, hidden_states.squeeze(0), steps, A.to(dtype), B.squeeze(0), C.squeeze(0), skip).unsqueeze(0).to(dtype)


def _lightning_attention(run: "TreeRun", layer: Any, hidden_states: Tensor, *_args: Any, **_: Any) -> tuple[Tensor, None]:
    """Lightning attention of MiniMax, hidden_states [1, T, C]: its states decay by a constant of each head, which makes them
    those of Mamba-2 with steps of 1; returns ([1, T, C], None)."""
    mixed = layer.act_fn(layer.qkv_proj(hidden_states)).squeeze(0)
    query, key, value = mixed.view(len(mixed), layer.num_attention_heads, -1).chunk(3, -1)
    decay = -layer.slope_rate.flatten().to(_dtype_of_sums(mixed))
    out = _scanned(run, value, torch.ones_like(query[..., 0], dtype=decay.dtype), decay, key, query)
    out = layer.norm(out.flatten(1).unsqueeze(0))
    return layer.out_proj(torch.sigmoid(layer.output_gate(hidden_states)) * out), None


def _scanned(run: "TreeRun", x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, skip: Tensor | None = None) -> Tensor:
    """ops.ssm_scan along the paths of a forest: [T, H, P]."""

    def scanned(tokens: Tensor | None, prev: Tensor, states: Tensor | None, ends: Tensor | None) -> tuple[Tensor, Tensor]:
        own_x, own_dt, own_b, own_c = _at(tokens, x, dt, b, c)
        return ops.ssm_scan(own_x, own_dt, decay, own_b, own_c, prev, D=skip, states=states, ends=ends)

    def decays(tokens: Tensor, prev: Tensor, ends: Tensor) -> Tensor:
        (own_dt,), nothing = _at(tokens, dt), b.new_zeros(len(tokens), b.shape[1], 1)
        no_x, ones = x.new_zeros(len(tokens), x.shape[1], 1), dt.new_ones(1, x.shape[1], 1, 1)
        return ops.ssm_scan(no_x, own_dt, decay, nothing, nothing, prev, states=ones, ends=ends)[1]

    like = x.new_empty(0, x.shape[1], b.shape[2], x.shape[2], dtype=dt.dtype)
    return run.along_paths("states", Recurrence(scanned, decays, like, dt.new_empty(0, x.shape[1], 1, 1)))


def _at(tokens: Tensor | None, *tensors: Tensor) -> list[Tensor]:
    """The rows of some tokens; all where that is None."""
    return list(tensors) if tokens is None else [tensor.index_select(0, tokens) for tensor in tensors]


def _no_shortcut(_run: "TreeRun", *_args: Any, **_kwargs: Any) -> None:
    """mamba2_split_conv1d_scan_combined: None, which makes the mixer go on to the functions above."""


def _dtype_of_sums(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


GATED_DELTA_NET: Mixer = {"causal_conv1d_fn": _convolve, "torch_chunk_gated_delta_rule": _gated_delta_rule}
MAMBA2: Mixer = {"causal_conv1d_fn": _convolve, "mamba2_chunk_scan": _ssm_scan,
          "mamba2_split_conv1d_scan_combined": _no_shortcut}  # fmt: skip

# All that we know, for families that a proof decides on; methods by class and name.
MIXERS: Mixer = {**GATED_DELTA_NET, **MAMBA2, "MiniMaxLightningAttention.forward": _lightning_attention}

COUNTED = ("causal_conv1d_fn", "torch_chunk_gated_delta_rule", "mamba2_chunk_scan")  # each mixer calls those of its kind once

_users: dict[ModuleType, weakref.WeakSet[Any]] = {}  # module -> the patched backbones whose layers call its functions


def known_of(module: ModuleType) -> Mixer:
    """Those of MIXERS that `module` has."""
    return {name: function for name, function in MIXERS.items() if callable(_found(module, name))}


def _found(module: ModuleType, name: str) -> Any:
    owner: Any = module
    for part in name.split("."):
        owner = getattr(owner, part, None)
    return owner


def _set(module: ModuleType, name: str, function: Any) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(_found(module, owner) if owner else module, attribute, function)


def install(module: ModuleType, mixer: Mixer, backbone: Any, is_told: bool = False) -> None:
    """Replaces the functions of `module` that `mixer` names, for as long as `backbone` lives and is not uninstalled. is_told:
    they may be handed no forest by layers that are told of it (told.py)."""
    for name in mixer:
        if _found(module, name) is None:
            raise Unsupported(f"{module.__name__}: expected the function {name}, received a version of Transformers "
                              "without it")  # fmt: skip
    users = _users.setdefault(module, weakref.WeakSet())
    if backbone not in users:
        weakref.finalize(backbone, _restore_unused, module, mixer)
        users.add(backbone)  # weak references tell of an end in reverse: this one before the one above
    for name, on_tree in mixer.items():
        stock = _found(module, name)
        if not _is_ours(stock):
            _set(module, name, _choosing(name, stock, on_tree, told.run_of_layer if is_told else lambda: None))


def uninstall(module: ModuleType, mixer: Mixer, backbone: Any) -> None:
    """Takes back `install`, once no other backbone needs it."""
    _users[module].discard(backbone)
    _restore_unused(module, mixer)


def _restore_unused(module: ModuleType, mixer: Mixer) -> None:
    if not _users[module]:
        for name in mixer:
            function = _found(module, name)
            _set(module, name, function.stock if _is_ours(function) else function)


def _is_ours(function: Any) -> bool:
    """Whether it is what `install` has set: a decorator of others copies its attributes."""
    return getattr(function, "__globals__", None) is globals() and hasattr(function, "stock")


def _choosing(name: str, stock: Callable[..., Any], on_tree: Callable[..., Any],
              run_around: "Callable[[], TreeRun | None]") -> Callable[..., Any]:  # fmt: skip
    @functools.wraps(stock)
    def mixed(*args: Any, espalier_tree: "TreeRun | None" = None, **kwargs: Any) -> Any:
        run = run_around() if espalier_tree is None else espalier_tree
        if run is None:
            return stock(*args, **kwargs)
        if name in COUNTED:
            run.calls[name].add_(1)
        return on_tree(run, *args, **kwargs)

    mixed.stock = stock  # type: ignore[attr-defined]
    return mixed
