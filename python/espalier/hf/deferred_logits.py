# SPDX-License-Identifier: Apache-2.0
"""Outputs of models whose logits are computed when they are read."""

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor


# ZeRO 3 (by keys) and FSDP2 since PyTorch 2.12 (by fields) go through outputs to hook tensors. Logits that are computed later
# have hooks at the head.
_HOOKING_MODULES = ("deepspeed.runtime.zero.utils", "torch.distributed.fsdp._common_utils")


class Deferred:
    """A tensor that is computed when it is needed: by whatever is asked of it but its shape, dtype and device."""

    def __init__(self, compute: Callable[[], Tensor], shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self._compute: Callable[[], Tensor] | None = compute
        self._tensor: Tensor | None = None
        self.shape, self.dtype, self.device = shape, dtype, device

    def tensor(self) -> Tensor:
        if self._compute is not None:
            self._tensor, self._compute = self._compute(), None
        assert self._tensor is not None
        return self._tensor

    def float(self) -> "Deferred":
        """As Accelerate asks of all that is in low precision."""
        return Deferred(lambda: self.tensor().float(), self.shape, torch.float32, self.device)

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], _types: Any, args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:  # fmt: skip
        return function(*map(_computed, args), **{name: _computed(value) for name, value in (kwargs or {}).items()})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    def __getitem__(self, key: Any) -> Tensor:
        return self.tensor()[key]

    def __len__(self) -> int:
        return self.shape[0]


def _computed(value: Any) -> Any:
    return value.tensor() if type(value) is Deferred else value


@torch.compiler.disable  # type: ignore[untyped-decorator]
def with_deferred(output: Any, **changed: Any) -> Any:
    """A ModelOutput as `output` with some fields changed. Logits that are a Deferred are computed when they are read; to those
    who go through items and values in training, as wrappers do, it is given as it is."""
    return _class_of(output.__class__)(**{field.name: changed.get(field.name, getattr(output, field.name))
                                      for field in fields(output)})  # fmt: skip


def _is_hooking() -> bool:
    """Whether the caller's caller goes through an output to hook its tensors."""
    return sys._getframe(2).f_globals.get("__name__") in _HOOKING_MODULES


@functools.cache
def _class_of(cls: Any) -> Any:
    """A subclass of a class of ModelOutput."""

    def settle(output: Any) -> None:
        """Where nobody trains, somebody who goes through an output wants tensors."""
        if not torch.is_grad_enabled():
            _ = output.logits

    def get_attribute(output: Any, name: str) -> Any:
        value = cls.__getattribute__(output, name)
        if name == "logits" and type(value) is Deferred and "_is_being_made" not in output.__dict__ and not _is_hooking():
            value = output["logits"] = value.tensor()
        return value

    def post_init(output: Any) -> None:
        """Some versions of Transformers look at all attributes here."""
        object.__setattr__(output, "_is_being_made", True)
        cls.__post_init__(output)
        object.__delattr__(output, "_is_being_made")

    def get_item(output: Any, key: Any) -> Any:
        if isinstance(key, int):
            key = list(output.keys())[key]
        if key == "logits" and key in output:
            return output.logits
        return OrderedDict.__getitem__(output, key) if isinstance(key, str) else cls.__getitem__(output, key)

    def keys(output: Any) -> Any:
        names = OrderedDict.keys(output)
        if not _is_hooking():
            return names
        return [name for name in names if type(OrderedDict.__getitem__(output, name)) is not Deferred]

    def get(output: Any, key: str, default: Any = None) -> Any:
        return get_item(output, key) if key in output else default

    def items(output: Any) -> Any:
        settle(output)
        return OrderedDict.items(output)

    def values(output: Any) -> Any:
        settle(output)
        return OrderedDict.values(output)

    members = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__,
               "__post_init__": post_init, "get": get, "keys": keys,
               "__getattribute__": get_attribute, "__getitem__": get_item, "items": items, "values": values,
               "__reduce__": lambda output: (cls, tuple(getattr(output, field.name) for field in fields(output)))}  # fmt: skip
    return type(cls.__name__, (cls,), members)
