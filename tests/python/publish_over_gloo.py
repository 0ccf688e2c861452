# SPDX-License-Identifier: Apache-2.0
"""python -m espalier.publish with Gloo in place of NCCL: the program, and what both sides need for it."""

import datetime
import sys

import torch
import torch.distributed as dist

from espalier.publish import __main__ as publish, weight_transfer


class Rank:
    """A rank over Gloo; it finds the others by an id that has the port of rank 0."""

    device = torch.device("cpu")

    def __init__(self, identifier=None):
        self.port = identifier and int(identifier.rstrip(b"\xff"))
        self.group = None

    def unique_id(self):
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.port = self.store.port
        return str(self.port).encode().ljust(128, b"\xff")

    def join(self, ranks, rank=0):
        store = self.store if rank == 0 else dist.TCPStore("127.0.0.1", self.port, is_master=False)
        self.group = dist.ProcessGroupGloo(store, rank, ranks, datetime.timedelta(seconds=60))
        ones = torch.ones(1)
        self.group.allreduce([ones]).wait()
        assert ones.item() == ranks

    def broadcast(self, buffer):
        options = dist.BroadcastOptions()
        options.rootRank = 0
        size = torch.tensor([buffer.numel()])
        self.group.broadcast([size], options).wait()
        assert size.item() == buffer.numel()  # NCCL would wait, or write elsewhere
        self.group.broadcast([buffer], options).wait()

    def abort(self):
        if self.group is not None:
            self.group.abort()


if __name__ == "__main__":
    weight_transfer.NcclGroup = Rank
    if sys.argv[1] == "--buffer-bytes":
        weight_transfer.BUFFER_BYTES = int(sys.argv[2])
        del sys.argv[1:3]
    publish.main(sys.argv[1:])
