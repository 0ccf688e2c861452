# SPDX-License-Identifier: Apache-2.0
"""The output layer of a model as it was in a forward pass, for logits that are computed later.

Before an optimizer of PyTorch changes the layer, a copy of it is kept for whoever reads the logits afterwards. Any other
change is found when they are read, and refused."""

import copy
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import Unsupported
from .deepspeed import COUNTERS

_NO_SETTINGS = {*nn.Module().__dict__, *COUNTERS}
_NUM_SAMPLES = 256  # values of each tensor that are compared, since `tensor.data` can change without a new version
_waiting: "weakref.WeakSet[HeadState]" = weakref.WeakSet()
_lock = threading.Lock()  # of _waiting


class HeadState:
    """The output layer of `model` at the moment."""

    def __init__(self, model: Any) -> None:
        self._model, self._head = model, model.get_output_embeddings()
        self._record = _record(self._head)
        self._samples = [_sample(tensor) for _, tensor in _tensors(self._head)]
        self._copy: Any = None
        self._change: str | None = None
        with _lock:
            _waiting.add(self)

    @property
    def is_copy(self) -> bool:
        """Whether an optimizer has changed the layer since, so that `model` gives one with a copy."""
        return self._copy is not None

    def model(self) -> Any:
        """A model with the layer as it was: the model itself or, after a step of an optimizer, one that shares all else with
        it. Raises Unsupported where that is not known any more."""
        change = None if self.is_copy else self._change or self._difference()
        if change is not None:
            raise Unsupported(f"output.logits: {change} has changed since the forward pass, and logits are computed when they "
                              "are first read; read them before weights or adapters of the output layer change")  # fmt: skip
        return self._copy or self._model

    def before_step(self, parameters: dict[int, Tensor], copies: dict[int, Any]) -> None:
        """Call before an optimizer changes `parameters`, by id. copies: those that this call has made, by id of the layer."""
        if self.is_copy or self._change is not None:
            return
        own = list(self._head.parameters())
        if any(id(parameter) in parameters for parameter in own):
            self._change = self._difference()
            if self._change is None:
                self._keep(own, copies)
        elif any(_is_shard_of(each, parameter) for parameter in own for each in parameters.values()):
            self._change = "the output layer"

    def _keep(self, own: list[nn.Parameter], copies: dict[int, Any]) -> None:
        names = [name for name, module in self._model._modules.items() if module is self._head]
        if not names or any(is_traceable_wrapper_subclass(parameter) for parameter in own):
            self._change = "the output layer"
            return
        try:
            if id(self._head) not in copies:
                with torch.no_grad():
                    copies[id(self._head)] = copy.deepcopy(self._head)
        except Exception:  # whatever a layer of others may do; too little memory
            self._change = "the output layer"
            return
        twin = object.__new__(type(self._model))
        twin.__dict__.update(self._model.__dict__)
        twin._modules = {**self._model._modules, **dict.fromkeys(names, copies[id(self._head)])}
        self._copy = twin

    def _difference(self) -> str | None:
        """What is no longer as it was; None where nothing is."""
        head = self._model.get_output_embeddings()
        now = _record(head)
        if now.keys() != self._record.keys():
            return "the output layer"
        for name, value in now.items():
            if value != self._record[name]:
                return name
        for (name, tensor), sample in zip(_tensors(head), self._samples):
            if sample is not None and not torch.equal(sample.view(torch.uint8), _sample(tensor).view(torch.uint8)):
                return name
        return None


def _record(head: Any) -> dict[str, Any]:
    """What can be compared of the modules and tensors of a layer, by names of both."""
    found: dict[str, Any] = {}
    for name, module in head.named_modules(prefix="the output layer"):
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        settings = {key: _frozen(value) for key, value in module.__dict__.items() if key not in _NO_SETTINGS}
        found[name] = type(module), module.__dict__.get("forward"), hooks, settings
    for name, tensor in _tensors(head):
        version = None if tensor.is_inference() else tensor._version
        found[name] = tensor.data_ptr(), version, tensor.shape, tensor.dtype, tensor.device
    return found


def _tensors(head: Any) -> Iterator[tuple[str, Tensor]]:
    """The plain tensors of parameters and buffers; of a DTensor, or of a parameter that ZeRO 3 has partitioned, its part on this
    rank too."""
    for module_name, module in head.named_modules(prefix="the output layer"):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield from ((f"{module_name}.{name}{inner}", part) for inner, part in _plain(tensor))
                if isinstance(part := getattr(tensor, "ds_tensor", None), Tensor):
                    yield f"{module_name}.{name} (partitioned)", part


def _plain(tensor: Tensor, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if not is_traceable_wrapper_subclass(tensor):
        yield name, tensor
        return
    for inner in tensor.__tensor_flatten__()[0]:
        if isinstance(part := getattr(tensor, inner), Tensor):  # since PyTorch 2.15 a DTensor names its mesh as well
            yield from _plain(part, f"{name}.{inner}")


def _frozen(value: Any) -> Any:
    """A copy of a setting to compare with; None of what is no setting."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_frozen(each) for each in value]
    if isinstance(value, dict) and all(isinstance(key, str | int) for key in value):
        return {key: _frozen(each) for key, each in value.items()}
    return None


def _sample(tensor: Tensor) -> Any:
    """Values that are spread over a tensor, copied; None of one without values."""
    if tensor.is_meta:
        return None
    flat = tensor.detach().flatten()
    return flat[:: len(flat) // _NUM_SAMPLES | 1].clone()


def _is_shard_of(parameter: Tensor, whole: Tensor) -> bool:
    """Whether `parameter` may be what FSDP2 has gathered `whole` from."""
    return is_traceable_wrapper_subclass(parameter) and hasattr(parameter, "placements") and parameter.shape == whole.shape


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    with _lock:
        states = list(_waiting)
    if not states:
        return
    parameters = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    copies: dict[int, Any] = {}
    for state in states:
        state.before_step(parameters, copies)


register_optimizer_step_pre_hook(_before_step)
