# SPDX-License-Identifier: Apache-2.0
"""One reduction of gradients for many backward passes."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def one_reduction(model: torch.nn.Module) -> Iterator[Callable[[], None]]:
    """Inside, parts of `model` that FSDP2 has sharded keep gradients and parameters whole on each rank, until the
    function that this yields is called, before the last backward pass: that one reduces the sums. Every rank has to
    call it once. A step of espalier.distributed does this by itself: inside of one nothing is done here."""
    parts = _sharded_parts(model)

    def set_last(is_last: bool) -> None:
        for part in parts:
            part.set_is_last_backward(is_last)
            part.set_requires_gradient_sync(is_last, recurse=False)
            part.set_reshard_after_backward(is_last, recurse=False)

    set_last(False)
    try:
        yield lambda: set_last(True)
    finally:
        set_last(True)


def _sharded_parts(model: torch.nn.Module) -> list[Any]:
    if not torch.distributed.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule

    from ..distributed.fsdp import IN_A_STEP

    return [module for module in model.modules() if isinstance(module, FSDPModule) and module not in IN_A_STEP]


def drop_whole_gradients(model: torch.nn.Module) -> None:
    """Drops what parts of `model` that FSDP2 has sharded have not reduced yet."""
    if _sharded_parts(model):
        from ..distributed.fsdp import drop_whole_gradients

        drop_whole_gradients(model)


def is_one_of_several_ranks() -> bool:
    """Whether this process is one of several that train together."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
