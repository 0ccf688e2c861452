# SPDX-License-Identifier: Apache-2.0
"""Models that DeepSpeed trains (ZeRO 0 to 3), and what cannot be done with them.

Its engine calls the model as others do, and its hooks gather parameters before each module runs, so that a patched model needs
nothing more. A backward pass has to be the engine's: it divides, scales and partitions gradients."""

import copy
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import Unsupported
from .origin import home_of

COUNTERS = ("ds_grads_remaining", "applied_pre_backward_ref_cnt")  # attributes of modules that change with each pass
_PARTITIONED = "ds_id"  # an attribute of parameters under ZeRO 3
_ENGINE = "deepspeed.runtime.engine"
_TAKEN_OVER = (_PARTITIONED, "_hp_mapping")  # the latter: of copies in float32, under other stages


def is_engine(model: Any) -> bool:
    """Whether a model is an engine of DeepSpeed, which answers for whatever attribute its module has."""
    return any(cls.__module__.startswith("deepspeed.") for cls in type(model).__mro__)


def is_linear(function: Any) -> bool:
    """Whether it is the linear map with which ZeRO 3 replaces that of torch.nn.functional, for the rest of the process."""
    return home_of(function) == "deepspeed.runtime.zero.linear"


def whole(module: Any) -> Any:
    """A copy of a module with all of its parameters, of which ZeRO 3 gives each rank a part, and without the hooks that gather
    them; a module that is not partitioned itself. All ranks have to call it."""
    partitioned = [parameter for parameter in module.parameters() if hasattr(parameter, _PARTITIONED)]
    if not partitioned:
        return module
    memo = {id(parameter): nn.Parameter(_gathered(parameter), parameter.requires_grad) for parameter in partitioned}
    twin = copy.deepcopy(module, memo)
    for part in twin.modules():
        part._parameters = dict(part._parameters)  # instead of DeepSpeed's, which gathers
        for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks):
            for key in [key for key, hook in hooks.items() if str(getattr(hook, "__module__", "")).startswith("deepspeed.")]:
                del hooks[key]
    return twin


def _gathered(parameter: Any) -> Tensor:
    shard = parameter.ds_tensor.detach().to(parameter.device)
    group = parameter.ds_process_group
    found = torch.empty(dist.get_world_size(group) * shard.numel(), dtype=shard.dtype, device=shard.device)
    dist.all_gather_into_tensor(found, shard.flatten().contiguous(), group=group)
    return found[: parameter.ds_numel].view(parameter.ds_shape)


def check_whole(model: Any, caller: str) -> None:
    """Raises Unsupported for models of which ZeRO 3 gives each rank a part of every parameter."""
    if any(hasattr(parameter, _PARTITIONED) for parameter in model.parameters()):
        raise Unsupported(f"{caller}: expected a model that one process has whole, received one whose parameters ZeRO 3 of "
                          "DeepSpeed has partitioned; verify it before deepspeed.initialize, or with stage 2")  # fmt: skip


def refuse_engine(model: Any, caller: str) -> None:
    """Raises Unsupported for models with gradients of DeepSpeed, which only the backward pass of its engine makes."""
    is_taken_over = any(hasattr(parameter, name) for parameter in model.parameters() for name in _TAKEN_OVER)
    if is_engine(model) or is_taken_over:
        received = f"a {type(model).__name__}" if is_engine(model) else "one that DeepSpeed has taken over"
        raise Unsupported(f"{caller}: expected a model whose gradients are those of PyTorch, received {received}, whose own "
                          "backward partitions and scales them; take FSDP2 (fully_shard), or espalier.hf.patch and the engine's "
                          "backward")  # fmt: skip


def refuse_deepcompile() -> None:
    """Raises Unsupported inside of a call of an engine that DeepCompile compiles.

    Its passes schedule what ZeRO gathers and reduces by the graph of the whole model, in which a patched one has breaks."""
    frame = sys._getframe(1) if _ENGINE in sys.modules else None  # a model that is patched before knows no engine
    while frame is not None:
        if frame.f_code.co_name == "forward" and frame.f_globals.get("__name__") == _ENGINE:
            is_active = getattr(frame.f_locals.get("self"), "is_deepcompile_active", None)
            if is_active is not None and is_active():
                raise Unsupported("DeepCompile of DeepSpeed: it is not known to be exact with patched models; set "
                                  '"deepcompile": false, with which engine.compile() is torch.compile')  # fmt: skip
        frame = frame.f_back
