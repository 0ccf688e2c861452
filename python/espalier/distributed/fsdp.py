# SPDX-License-Identifier: Apache-2.0
"""Models that FSDP2 (torch.distributed.fsdp.fully_shard) has sharded, over one step.

What FSDP2 has no public name for is used in this file only. torch.distributed.pipelining uses the same: one reduction
after the last of many backwards.
"""

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from ..errors import Unsupported
from ..rank_group import TENSOR
from .earlier import EarlierGradients

if TYPE_CHECKING:
    from .step import Trace

EXPERTS = "ep"
DIVIDED = (TENSOR, EXPERTS)  # dimensions of meshes along which ranks have other heads, or other experts
SETTINGS = ("reduce_grads", "all_reduce_grads", "reshard_after_backward", "post_forward_mesh_info",
            "gradient_divide_factor", "force_sum_reduction_for_comms", "_all_gather_comm",
            "_reduce_scatter_comm")  # fmt: skip

IN_A_STEP: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # modules of fully_shard whose settings are those of a step


class Sharded:
    """A model of fully_shard. `units` are the groups of parameters that FSDP2 gathers together, by name."""

    def __init__(self, model: torch.nn.Module, world_size: int, tensor_size: int = 1) -> None:
        if not isinstance(model, FSDPModule):
            raise Unsupported("Ranks: expected a model of fully_shard or DistributedDataParallel, received "
                              f"{type(model).__name__}; call fully_shard on the model itself after its "
                              "layers")  # fmt: skip
        _check_parameters(model, world_size, tensor_size)
        self.model = model
        self._has_equal_parts = tensor_size == 1  # heads and vocabularies may not be divided evenly
        self._state: Any = _state_of(model)
        self.units: OrderedDict[str, Any] = OrderedDict()
        modules: Iterable[tuple[str, Any]] = model.named_modules()
        for name, module in modules:
            if isinstance(module, FSDPModule):
                for number, unit in enumerate(_units_of(module)):
                    if unit not in self.units.values():
                        self.units[f"{name or 'the root'}{f' ({number})' if number else ''}"] = unit
        self._settings: list[tuple[Any, dict[str, Any]]] = []
        self._earlier = EarlierGradients()

    def description(self) -> str:
        """What has to be the same on all ranks, as text."""
        digest = hashlib.blake2b(digest_size=8)
        for name, unit in self.units.items():
            digest.update(f"{name} {unit.post_forward_mesh_info is None}".encode())
            for each in unit.fsdp_params:
                parameter = each.sharded_param
                digest.update(f"{each.mp_policy} {parameter.shape} {parameter.dtype} {parameter.requires_grad}".encode())
        return digest.hexdigest()

    def begin(self, is_gathered: bool, trace: "Trace | None" = None) -> None:
        """Sets up a step: gradients are sums over ranks. Gathered: parameters are whole until the end, and gradients
        are reduced there. trace: told of every collective (`Watched`)."""
        self._state._lazy_init()  # the model is the root, even where its backbone is the first to run
        self._settings = [(unit, {name: getattr(unit, name) for name in SETTINGS}) for unit in self.units.values()]
        IN_A_STEP.update(self._modules())
        self._earlier = EarlierGradients(each.sharded_param for each in self._parameters())
        for name, unit in self.units.items():
            unit.gradient_divide_factor = 1.0
            unit.force_sum_reduction_for_comms = True  # Gloo can do no other
            if is_gathered:
                unit.reduce_grads = unit.all_reduce_grads = unit.reshard_after_backward = False
                unit.post_forward_mesh_info = None  # no resharding
            if trace is not None:
                unit._all_gather_comm = Watched(unit._all_gather_comm, f"gathers {name}", trace, self._has_equal_parts)
                unit._reduce_scatter_comm = Watched(unit._reduce_scatter_comm, f"reduces {name}", trace, self._has_equal_parts)
        if is_gathered:
            self._context.is_last_backward = False
            for unit in self.units.values():
                unit.unshard()
                unit.wait_for_unshard()

    def present(self) -> list[bool]:
        """For every parameter whether this rank has a gradient."""
        return [_gradient_of(each) is not None for each in self._parameters()]

    def reduce(self, wanted: Sequence[bool]) -> None:
        """Ends a gathered step: sums the gradients of the parameters that are `wanted`, by `present` of any rank."""
        for each, is_wanted in zip(self._parameters(), wanted):
            if is_wanted and _gradient_of(each) is None:
                whole = each.unsharded_param
                whole.grad = torch.zeros_like(whole, dtype=getattr(whole, "grad_dtype", None))
        for unit in self.units.values():
            unit.post_backward()  # brings new gradients to the dtype of the others
            unit.reduce_grads = unit.all_reduce_grads = unit.reshard_after_backward = True
        self._context.is_last_backward = True
        for unit in reversed(self.units.values()):
            unit.post_backward()
        self._context.manual_backward_finalization_active = False  # of PyTorch 2.15: unset where this rank ran nothing backward
        self._state._root_post_backward_final_callback()
        self.end()

    def end(self) -> None:
        """Ends a step whose gradients are reduced."""
        self._earlier.add_back()
        self._restore()

    def abandon(self) -> None:
        """After an error: drops the gradients of the step, and shards parameters again."""
        _drop_pass(self._state, self.units.values())
        self._earlier.put_back()
        self._restore()

    @property
    def _context(self) -> Any:
        return self._state._state_ctx

    def _modules(self) -> list[Any]:
        return [module for module in self.model.modules() if isinstance(module, FSDPModule)]

    def _parameters(self) -> list[Any]:
        return [each for unit in self.units.values() for each in unit.fsdp_params if each.sharded_param.requires_grad]

    def _restore(self) -> None:
        IN_A_STEP.difference_update(self._modules())
        self._context.is_last_backward = True
        for unit, settings in self._settings:
            for name, value in settings.items():
                setattr(unit, name, value)
        self._settings, self._earlier = [], EarlierGradients()


def drop_whole_gradients(model: torch.nn.Module) -> None:
    """Drops the gradients that FSDP2 keeps whole on this rank until they are reduced, in parts of `model` that are not in
    a step of Ranks, and shards parameters again: after a loop that has ended without a reduction."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule) and module not in IN_A_STEP]
    units = {id(unit): unit for module in modules for unit in _units_of(module)}
    if units:
        _drop_pass(_state_of(modules[0]), units.values())


def _drop_pass(state: Any, units: Collection[Any]) -> None:
    """What forward and backward passes have left in the units of a model. state: of its root."""
    for unit in units:
        for each in unit.fsdp_params:
            if each.sharded_param.requires_grad and hasattr(each, "_unsharded_param"):
                if "unsharded_accumulated_grad" in vars(each):  # since PyTorch 2.15 it is the gradient below
                    each.unsharded_accumulated_grad = None
                each._unsharded_param.grad = None
    idle = type(state._training_state).IDLE
    for unit in units:
        unit._training_state = idle
        unit._all_gather_result = None
        unit._post_forward_indices.clear()
        unit.reshard()
    for each in state._state_ctx.all_states:
        each._training_state = idle
    state._comm_ctx.post_forward_order.clear()
    state._state_ctx.post_backward_final_callback_queued = False
    state._state_ctx.iter_forward_root = None


class Watched:
    """A collective of FSDP2 that says what it is about to do."""

    def __init__(self, inner: Any, name: str, trace: "Trace", has_equal_parts: bool) -> None:
        self._inner, self._name, self._trace, self._has_equal_parts = inner, name, trace, has_equal_parts

    def allocate(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner.allocate(*args, **kwargs)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        values = f", {max(output_tensor.numel(), input_tensor.numel()):,} values" if self._has_equal_parts else ""
        self._trace.add(f"{self._name}{values}")
        return self._inner(output_tensor, input_tensor, *args, **kwargs)


def ranks_along(model: torch.nn.Module, dimension: str) -> list[int]:
    """The numbers of the ranks that have other heads or experts of a model than this one, and its own: by a dimension of
    DIVIDED."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and dimension in (parameter.device_mesh.mesh_dim_names or ()):
            return dist.get_process_group_ranks(parameter.device_mesh.get_group(dimension))
    return [dist.get_rank()]


def _check_parameters(model: torch.nn.Module, world_size: int, tensor_size: int) -> None:
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            if parameter.requires_grad:
                raise Unsupported(f"{name}: expected a parameter that fully_shard has sharded, received one that is "
                                  "whole on every rank, whose gradients nobody would sum")  # fmt: skip
        elif not _is_sharded_over_all(parameter, world_size, tensor_size):
            shape = list(parameter.device_mesh.mesh.shape)
            raise Unsupported(f"{name}: expected a parameter that fully_shard has sharded over all {world_size} ranks, or over "
                              f"some with replicas on the others, received {list(parameter.placements)} on a mesh of shape "
                              f"{shape}: meshes of some ranks are not served")  # fmt: skip


def _is_sharded_over_all(parameter: DTensor, world_size: int, tensor_size: int) -> bool:
    """Whether every rank has a shard, and all dimensions of the mesh are replicas but the last two: of shards, and of experts or
    heads, if these are divided. What ranks along tp have alike has no such dimension."""
    mesh, places = parameter.device_mesh, list(parameter.placements)
    is_divided = (mesh.mesh_dim_names or ("",))[-1] in DIVIDED
    if is_divided:
        places.pop()
    *replicas, shards = places
    is_sharded = not (shards.is_replicate() or shards.is_partial()) and all(place.is_replicate() for place in replicas)
    return is_sharded and mesh.size() * (1 if is_divided else tensor_size) == world_size


def _state_of(module: Any) -> Any:
    return fully_shard.state(module)  # type: ignore[attr-defined]  # which no stub knows


def _units_of(module: Any) -> list[Any]:
    state = _state_of(module)
    if hasattr(state, "_state_ctx") and hasattr(state, "_fsdp_param_groups"):  # PyTorch 2.12 and later: one for each mesh
        return list(state._fsdp_param_groups)
    if hasattr(state, "_state_ctx") and hasattr(state, "_fsdp_param_group"):
        return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    raise Unsupported(f"Ranks: expected FSDP2 as PyTorch 2.9 to 2.15 have it, received that of PyTorch {torch.__version__}")


def _gradient_of(each: Any) -> torch.Tensor | None:
    if not hasattr(each, "_unsharded_param"):
        return None
    given: torch.Tensor | None = each.unsharded_accumulated_grad
    own: torch.Tensor | None = each._unsharded_param.grad
    return given if given is not None else own
