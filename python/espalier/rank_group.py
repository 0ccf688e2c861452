# SPDX-License-Identifier: Apache-2.0
"""Ranks that compute the same micro-batches together, each a part of them."""

from dataclasses import dataclass
from typing import Any


@dataclass
class RankGroup:
    """Of one of these ranks.

    group       of torch.distributed
    rank, size  in it
    sent_bytes  how much this rank has sent to others in a step
    """

    group: Any
    rank: int
    size: int
    sent_bytes: int = 0
