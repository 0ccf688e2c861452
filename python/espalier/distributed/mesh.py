# SPDX-License-Identifier: Apache-2.0
"""What the dimensions of a device mesh are for: other rows, other parts of the same, or other heads of the model."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import Unsupported
from ..rank_group import TENSOR, RankGroup

CONTEXT = "cp"
DATA = ("dp", "fsdp")  # and names that begin with dp_


@dataclass(frozen=True)
class Dimensions:
    """Of one rank.

    data_rank, data_size  which of the shares of a step's rows it has, and how many there are
    context               the ranks that have parts of the same micro-batches, where they are more than one
    tensor_rank           which of the model's heads it has
    tensor_size           over how many ranks they are divided
    peers                 the numbers among all ranks of those with the same rows, this one's among them
    with_the_same_heads   [tensor_size][...] numbers of ranks
    description           of the mesh, as text
    """

    data_rank: int
    data_size: int
    context: RankGroup | None
    tensor_rank: int
    tensor_size: int
    peers: tuple[int, ...]
    with_the_same_heads: list[list[int]]
    description: str


def dimensions_of(mesh: Any) -> Dimensions:
    """Of this rank. mesh: a DeviceMesh over all ranks, or None, where every rank has its own rows. Raises Unsupported for
    other dimensions than those of data, context and tensor parallelism."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if mesh is None:
        return Dimensions(rank, size, None, 0, 1, (rank,), [list(range(size))], "data")
    if not isinstance(mesh, DeviceMesh):
        raise Unsupported(f"mesh: expected a DeviceMesh, as torch.distributed.init_device_mesh makes it, received "
                          f"{type(mesh).__name__}")  # fmt: skip
    names = mesh.mesh_dim_names
    if names is None:
        raise Unsupported("mesh: expected names of its dimensions, dp, cp and tp, received none; give mesh_dim_names to "
                          "init_device_mesh")  # fmt: skip
    for name, length in zip(names, mesh.shape):
        if length > 1 and name not in (CONTEXT, TENSOR) and not _is_data(name):
            raise Unsupported("mesh: expected dimensions of data, named dp, dp_... or fsdp, of context, named cp, and of tensor "
                              f"parallelism, named tp, received {name} of {length} ranks, which is not served")  # fmt: skip
    if mesh.size() != size:
        raise Unsupported(f"mesh: expected one of all {size} ranks, received {mesh.size()}")
    return _of_mesh(mesh, names)


def mesh_of(model: torch.nn.Module) -> DeviceMesh | None:
    """The mesh over which Transformers has divided a model, by `distributed_config`; None for other models."""
    for module in model.modules():
        meshes: Any = getattr(module, "_mesh_manager", None)
        if meshes is not None:
            found: DeviceMesh = meshes.get_mesh(("dp_replicate", "fsdp", "tp"))
            return found
    return None


def _is_data(name: str) -> bool:
    return name in DATA or name.startswith("dp_")


def _of_mesh(mesh: DeviceMesh, names: tuple[str, ...]) -> Dimensions:
    coordinate = dict(zip(names, mesh.get_coordinate() or ()))
    order = {name: 0 if _is_data(name) else 2 if name == TENSOR else 1 for name in names}
    axes = sorted(range(len(names)), key=lambda axis: order[names[axis]])
    lengths = dict(zip(names, mesh.shape))
    sizes = [1, 1, 1]  # of data, context and what has one rank, and tensor parallelism
    for name in names:
        sizes[order[name]] *= lengths[name]
    ranks = mesh.mesh.permute(axes).reshape(sizes)  # [data, context, tensor]
    data_rank, _, tensor_rank = (int(place) for place in (ranks == dist.get_rank()).nonzero()[0])
    context = None
    if lengths.get(CONTEXT, 1) > 1:
        group = mesh.get_group(CONTEXT)
        context = RankGroup(group, coordinate[CONTEXT], lengths[CONTEXT])
    description = ", ".join(f"{name} {length}" for name, length in lengths.items())
    return Dimensions(data_rank, sizes[0], context, tensor_rank, sizes[2], tuple(ranks[data_rank].flatten().tolist()),
                      [ranks[:, :, place].flatten().tolist() for place in range(sizes[2])], description)  # fmt: skip
