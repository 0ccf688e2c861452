# SPDX-License-Identifier: Apache-2.0
"""Whether modules take one token at a time, which is what sharing needs: for a function f and an index that repeats and reorders
tokens, f(x[index]) = f(x)[index], forward and backward.

This is tested on the modules of the model itself, in its dtype and on its device, when they are called in a forward pass of a few
tokens. Adapters that average over a batch, or draw noise for each token, do not pass, whatever their names are.
"""

import contextlib
import copy
import functools
import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from ..errors import Unsupported, in_one_line
from . import deepspeed
from .changes import NUMBERS, Change, functions_of_classes, place_of, settings_of
from .dropout import switched_off
from .float64 import InFloat64
from .gpu_kernels import naming_layers, what_needs_a_gpu
from .plain_layers import by_torch_on_cpus
from .reference import whole_gradient, without_gradients, without_renorm

_NUM_TOKENS = 13  # a size that hidden states hardly have
# Tokens of batches that repeat and reorder them. No token is in both of the first two, so that one of them lacks the largest. The
# last has many tokens, for modules with a capacity.
_INDICES = (torch.tensor([[3, 0, 4, 4, 6, 2, 5], [0, 0, 1, 3, 5, 5, 6], [6, 1, 2, 0, 2, 4, 4]], device="cpu"),
            torch.tensor([[11, 10, 7, 7, 9, 8], [10, 10, 12, 8, 9, 7]], device="cpu"),
            torch.arange(210, device="cpu").square().remainder(_NUM_TOKENS).view(10, 21))  # fmt: skip
# Relative errors; rounding alone gives less, and what looks at a batch much more.
_MOST = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.04, torch.float16: 0.01}


@dataclass(frozen=True)
class _Call:
    """A call of a module with hidden states of _NUM_TOKENS tokens."""

    module: Any
    args: Any
    kwargs: Mapping[str, Any]


def check_tokenwise(backbone: Any, changes: Sequence[Change], device: torch.device, dropout: str | None,
                    passed: set[Any]) -> None:  # fmt: skip
    """Runs `backbone`, which computes as it would unpatched, on a few tokens, and tests the modules of `changes`. passed: the
    kinds of modules that have passed before, to which others are added.

    One module of each kind is tested: of one code, in one place of all layers. Raises Unsupported by name where a token's result
    depends on other tokens, or on noise that each token draws, unless `dropout` is "shared". Random numbers and gradients are as
    before afterwards."""
    thread = threading.get_ident()

    def test(change: Change, kind: Any) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            if kind not in passed and threading.get_ident() == thread:
                _check(change, _Call(deepspeed.whole(module), args, kwargs), dropout)
                passed.add(kind)

        return hook

    kinds = [(change, kind) for change in _outermost(changes) if (kind := (*_kind_of(change), dropout)) not in passed]
    if not kinds:
        return
    ids = torch.arange(1, 1 + _NUM_TOKENS, device=device).unsqueeze(0) % backbone.config.vocab_size
    with contextlib.ExitStack() as hooks:
        for change, kind in kinds:
            hooks.enter_context(change.module.register_forward_pre_hook(test(change, kind), with_kwargs=True))
        with _trying(backbone, device), _state_restored(changes):
            backbone(input_ids=ids, use_cache=False)


def _outermost(changes: Sequence[Change]) -> list[Change]:
    """Without modules inside of others: these are tested as they are called."""
    paths = {change.path for change in changes}
    found: dict[str, Change] = {}
    for change in changes:
        parts = change.path.split(".")
        if not any(".".join(parts[:count]) in paths for count in range(1, len(parts))):
            found.setdefault(change.path, change)
    return list(found.values())


def _kind_of(change: Change) -> tuple[Any, ...]:
    parts = list(change.module.modules())
    forwards = [getattr(part.forward, "__func__", part.forward) for part in parts]
    if not type(change.module).__module__.startswith("peft."):
        settings = [pair for pairs in settings_of(parts) for pair in pairs if pair[0] not in NUMBERS]
        forwards += [*settings, *[function for _, _, function in functions_of_classes(set(map(type, parts)))]]
    variants = getattr(change.module, "lora_variant", None)  # of PEFT, by adapter
    return (place_of(change.path), *map(type, parts), *forwards, *[part.training for part in parts],
            str(getattr(change.module, "active_adapters", None)), getattr(change.module, "disable_adapters", None),
            tuple(type(variant) for variant in variants.values()) if isinstance(variants, dict) else None)  # fmt: skip


@contextlib.contextmanager
def _state_restored(changes: Sequence[Change]) -> Iterator[None]:
    """Inside, the modules of `changes` may count calls and change buffers; afterwards they are as before."""
    modules = {module: None for change in changes for module in change.module.modules()}
    attributes = [(module, dict(vars(module))) for module in modules]
    buffers = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers(recurse=False)]
    try:
        yield
    finally:
        for module, values in attributes:
            vars(module).update(values)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


@contextlib.contextmanager
def _trying(backbone: Any, device: torch.device) -> Iterator[None]:
    """Inside, forward passes draw the same numbers, drop nothing and leave weights as they are."""
    with (naming_layers("espalier.hf.patch"), by_torch_on_cpus(device), torch.no_grad(), _same_random_numbers(device),
          switched_off(backbone), without_renorm(backbone), without_gradients(backbone)):  # fmt: skip
        yield


@contextlib.contextmanager
def _same_random_numbers(device: torch.device) -> Iterator[None]:
    """Inside, random numbers begin at a constant; afterwards they are as before."""
    devices = [] if device.type in ("cpu", "meta") else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(0)
        yield


def _check(change: Change, call: _Call, dropout: str | None) -> None:
    if not any(_axis_of(value) is not None for value in _tensors((call.args, call.kwargs))):
        raise Unsupported(f"{change}: expected a module that is called with tokens, received one without an argument of their "
                          "number, so that it is not known whether rows can share them; train this model unpatched")  # fmt: skip
    try:
        error = _error(call)
        draws = error and _error_between(_outputs(call, 0)[0], _outputs(call, 1)[0], _most(call))
    except _LeftBehind as name:
        raise Unsupported(f"{change}: expected results in its output alone, received {name} beside it, which would be of "
                          "distinct tokens instead of rows; train this model unpatched") from None  # fmt: skip
    except Exception as failure:
        if what_needs_a_gpu(failure) is not None:
            raise
        raise Unsupported(f"{change}: expected a module that takes tokens in any number and order, received one that fails: "
                          f"{in_one_line(failure)}; train this model unpatched") from failure  # fmt: skip
    if not error:
        return
    if draws and dropout == "shared":
        return
    if draws:
        raise Unsupported(f"{change}: expected results of each token alone, received noise that each token draws: tokens that "
                          'rows share would share it; train without it, or patch with dropout="shared"')  # fmt: skip
    raise Unsupported(f"{change}: expected results of each token alone, received some that depend on the other tokens of the "
                      f"batch, by {error:.1g}: rows cannot share tokens; train this model unpatched")  # fmt: skip


def _most(call: _Call) -> float:
    """The relative error that rounding explains in the coarsest of the dtypes that the module computes in."""
    tensors = [*_tensors((call.args, call.kwargs)), *call.module.parameters()]
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    kind = tensors[0].device.type
    if torch.is_autocast_enabled(kind):
        dtypes.add(torch.get_autocast_dtype(kind))
    return max((_MOST.get(dtype, 0.1) for dtype in dtypes), default=0.0)


def _error(call: _Call) -> float:
    """The largest relative error of outputs and gradients; 0 where rounding explains all."""
    most = _most(call)
    if most > _MOST[torch.float64]:
        return _error_above(most, call)
    try:
        with InFloat64():
            return _error_above(most, call)
    except _LeftBehind:
        raise
    except Exception:  # some layers insist on float32 inside
        pass
    return _error_above(_MOST[torch.float32], call)


def _error_above(most: float, call: _Call) -> float:
    worst = 0.0
    for index in _INDICES:
        once, grads_once = _outputs(call, 0, after=index)
        repeated, grads_repeated = _outputs(call, 0, before=index)
        worst = max(worst, _error_between(once, repeated, most), _error_between(grads_once, grads_repeated, 4 * most))
    return worst


def _error_between(expected: Sequence[Tensor], received: Sequence[Tensor], most: float) -> float:
    worst = 0.0
    for theirs, ours in zip(expected, received, strict=True):
        if theirs.shape != ours.shape:
            return float("inf")
        theirs, ours = theirs.detach(), ours.detach()
        if not theirs.is_floating_point():
            error = float(not torch.equal(theirs, ours))
        else:
            size = theirs.double().norm().item()
            error = (ours.double() - theirs.double()).norm().item() / (size or 1.0)
            error = 0.0 if error <= most else error
        worst = error if error != error else max(worst, error)
    return worst if worst == worst else float("inf")


def _outputs(call: _Call, seed: int, *, before: Tensor | None = None,
             after: Tensor | None = None) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """(outputs, gradients of a random sum of them) of a call, with tokens repeated by an index before it, after it, or not."""
    with torch.enable_grad():
        args, kwargs = tree_map(_leaf, (call.args, dict(call.kwargs)))
        leaves = [value for value in _tensors((args, kwargs)) if value.requires_grad]
        parameters = {id(parameter): parameter for parameter in call.module.parameters() if not parameter.is_meta}
        leaves += [parameter for parameter in parameters.values() if parameter.requires_grad]
        module = copy.deepcopy(call.module, dict(parameters))  # whose buffers and counters may change
        if before is not None:
            args, kwargs = tree_map(functools.partial(_repeated, before), (args, kwargs))
        with _same_random_numbers(_tensors((call.args, call.kwargs))[0].device):
            torch.manual_seed(seed)
            kept = _tensors_beside(module)
            output = module.forward(*args, **kwargs)
            for name, (value, version) in _tensors_beside(module).items():
                if name not in kept or kept[name][0] is not value or kept[name][1] != version:
                    raise _LeftBehind(name)
        outputs = _tensors(output if after is None else tree_map(functools.partial(_repeated, after), output))
        total = sum((_probe(number, value) * value).sum() for number, value in enumerate(outputs) if value.requires_grad)
        if not leaves or not isinstance(total, Tensor):
            return outputs, []
        grads = torch.autograd.grad(total, leaves, allow_unused=True)
        return outputs, [whole_gradient(leaf, grad) for leaf, grad in zip(leaves, grads)]


class _LeftBehind(Exception):
    """A module keeps tensors of its call beside its output; the message names one."""


def _tensors_beside(module: Any) -> dict[str, tuple[Tensor, Any]]:
    """Attributes that are tensors, and buffers, with their versions; not those of PEFT, which knows what it keeps."""
    return {f"{path}.{name}".lstrip("."): (value, value._version) for path, part in module.named_modules()
            if not type(part).__module__.startswith("peft.") for name, value in (*vars(part).items(), *part._buffers.items())
            if isinstance(value, Tensor)}  # fmt: skip


def _probe(number: int, value: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(value.shape, generator=generator, device="cpu").to(value)


def _tensors(tree: Any) -> list[Tensor]:
    return [value for value in tree_flatten(tree)[0] if isinstance(value, Tensor)]


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.is_floating_point() and _axis_of(value) is not None)


def _axis_of(value: Tensor) -> int | None:
    """The dimension of the tokens, which may be that of tokens and heads."""
    found = next((axis for axis, size in enumerate(value.shape) if size == _NUM_TOKENS), None)
    is_flat = found is None and value.dim() > 0 and value.shape[0] > 0 and value.shape[0] % _NUM_TOKENS == 0
    return 0 if is_flat else found


def _repeated(index: Tensor, value: Any) -> Any:
    """[1, 13, ...] -> [R, L, ...], [1, C, 13] -> [R, C, L], [13 H, ...] -> [R L H, ...]: the tokens of an index [R, L]."""
    axis = _axis_of(value) if isinstance(value, Tensor) else None
    if axis is None:
        return value
    flat = index.flatten().to(value.device)
    if axis == 0:
        return value.unflatten(0, (_NUM_TOKENS, -1)).index_select(0, flat).flatten(0, 1)
    taken = value.index_select(axis, flat)
    return taken if value.shape[0] != 1 else taken.squeeze(0).unflatten(axis - 1, index.shape).movedim(axis - 1, 0)


def keeps_packed_rows_apart(backbone: Any, device: torch.device) -> bool:
    """Whether a backbone, which computes as it would unpatched, gives packed rows what it gives each alone."""
    if "position_ids" not in inspect.signature(type(backbone).forward).parameters:
        return False
    ids = torch.arange(1, 1 + 2 * _NUM_TOKENS, device=device).unsqueeze(0) % backbone.config.vocab_size
    positions = torch.arange(2 * _NUM_TOKENS, device=device).unsqueeze(0) % _NUM_TOKENS
    with _trying(backbone, device):
        packed = backbone(input_ids=ids, position_ids=positions, use_cache=False)[0][:, _NUM_TOKENS:]
        alone = backbone(input_ids=ids[:, _NUM_TOKENS:], use_cache=False)[0]
    most = max(5 * _MOST.get(packed.dtype, 0.1), 0.01)
    return bool((packed - alone).norm() <= most * alone.norm())
