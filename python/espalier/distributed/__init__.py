# SPDX-License-Identifier: Apache-2.0
"""Training on several ranks, started by torchrun, with FSDP2 or DistributedDataParallel:

    ranks = espalier.distributed.Ranks(model)     # after fully_shard(model)
    share = ranks.share(rows)                     # the rows of a step, the same on every rank; share.rows are ours
    with ranks.step(share) as step:
        ...                                       # forwards and backwards of our rows, as many as we have
    optimizer.step()
    print(step.report)

Gradients are sums over the ranks, so a loss is divided by what it is divided by on one process: the count of the whole
step, not of a rank.
"""

from .meeting import RankError
from .ranks import Ranks
from .report import Report
from .share import Share

__all__ = ["RankError", "Ranks", "Report", "Share"]
