# SPDX-License-Identifier: Apache-2.0
"""Ranks that compute the same micro-batches together, each a part of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TENSOR = "tp"  # the dimension of meshes along which ranks have other heads of a model, as Transformers names it


@dataclass
class RankGroup:
    """Of one of these ranks.

    group       of torch.distributed
    rank, size  in it
    sent_bytes  how much this rank has sent to others in a step
    check       called before every exchange; raises where another rank has failed
    """

    group: Any
    rank: int
    size: int
    sent_bytes: int = 0
    check: Callable[[], None] = lambda: None
