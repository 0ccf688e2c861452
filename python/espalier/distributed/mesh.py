# SPDX-License-Identifier: Apache-2.0
"""What the dimensions of a device mesh are for: other rows, or other parts of the same."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import Unsupported
from ..rank_group import RankGroup

CONTEXT = "cp"
DATA = "dp"  # and names that begin with dp_


@dataclass(frozen=True)
class Dimensions:
    """Of one rank.

    data_rank, data_size  which of the shares of a step's rows it has, and how many there are
    context               the ranks with the same rows, where they are more than one
    peers                 their numbers among all ranks, this one's among them
    description           of the mesh, as text
    """

    data_rank: int
    data_size: int
    context: RankGroup | None
    peers: tuple[int, ...]
    description: str


def dimensions_of(mesh: Any) -> Dimensions:
    """Of this rank. mesh: a DeviceMesh over all ranks, or None, where every rank has rows of its own. Raises Unsupported for
    other dimensions than those of data and context."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if mesh is None:
        return Dimensions(rank, size, None, (rank,), "data")
    if not isinstance(mesh, DeviceMesh):
        raise Unsupported(f"mesh: expected a DeviceMesh, as torch.distributed.init_device_mesh makes it, received "
                          f"{type(mesh).__name__}")  # fmt: skip
    names = mesh.mesh_dim_names
    if names is None:
        raise Unsupported("mesh: expected names of its dimensions, dp and cp, received none; give mesh_dim_names to "
                          "init_device_mesh")  # fmt: skip
    for name in names:
        if name not in (CONTEXT, DATA) and not name.startswith(f"{DATA}_"):
            raise Unsupported("mesh: expected dimensions of data, named dp or dp_..., and of context, named cp, received "
                              f"{name}, which is not served")  # fmt: skip
    if mesh.size() != size:
        raise Unsupported(f"mesh: expected one of all {size} ranks, received {mesh.size()}")
    description = ", ".join(f"{name} {length}" for name, length in zip(names, mesh.shape))
    return _of_mesh(mesh, names, description)


def _of_mesh(mesh: DeviceMesh, names: tuple[str, ...], description: str) -> Dimensions:
    number = {name: int(place) for name, place in zip(names, mesh.get_coordinate() or ())}
    lengths = dict(zip(names, mesh.shape))
    data = [name for name in names if name != CONTEXT]
    data_size = int(np.prod([lengths[name] for name in data], dtype=np.int64))
    data_rank = int(np.ravel_multi_index([number[name] for name in data], [lengths[name] for name in data])) if data else 0
    if lengths.get(CONTEXT, 1) == 1:
        return Dimensions(data_rank, data_size, None, (dist.get_rank(),), description)
    group = mesh.get_group(CONTEXT)
    context = RankGroup(group, dist.get_rank(group), lengths[CONTEXT])
    return Dimensions(data_rank, data_size, context, tuple(dist.get_process_group_ranks(group)), description)
