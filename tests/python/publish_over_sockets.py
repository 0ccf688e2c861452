# SPDX-License-Identifier: Apache-2.0
"""python -m espalier.publish with sockets in place of NCCL: the program, and what both sides need for it."""

import contextlib
import socket
import struct
import sys

import torch

from espalier.publish import __main__ as publish, weight_transfer

SECONDS = 60


class Rank:
    """A rank that is connected to rank 0, which the others find by an id that has its port. (A process group of Gloo crashes
    when it is aborted while others still connect.)"""

    device = torch.device("cpu")

    def __init__(self, identifier=None):
        self.port = identifier and int(identifier.rstrip(b"\xff"))
        self.sockets = []

    def unique_id(self):
        self.sockets = [socket.create_server(("127.0.0.1", 0))]
        self.sockets[0].settimeout(SECONDS)
        return str(self.sockets[0].getsockname()[1]).encode().ljust(128, b"\xff")

    def join(self, ranks, rank=0):
        """The sum of a one from each rank is `ranks`."""
        if rank == 0:
            self.sockets += [self.sockets[0].accept()[0] for _ in range(ranks - 1)]
            total = 1 + sum(struct.unpack("f", receive(other, 4))[0] for other in self.sockets[1:])
            self.send(struct.pack("f", total))
        else:
            self.sockets = [socket.create_connection(("127.0.0.1", self.port), SECONDS)]
            self.sockets[0].sendall(struct.pack("f", 1))
            (total,) = struct.unpack("f", receive(self.sockets[0], 4))
        assert total == ranks

    def send(self, data):
        for other in self.sockets[1:]:
            other.sendall(data)

    def broadcast(self, buffer):
        """Each rank gives a buffer of the size that rank 0 sends: with another size NCCL would wait, or write elsewhere."""
        if self.port is None:
            self.send(struct.pack("q", buffer.numel()) + buffer.numpy().tobytes())
        else:
            (size,) = struct.unpack("q", receive(self.sockets[0], 8))
            assert size == buffer.numel()
            buffer.copy_(torch.frombuffer(receive(self.sockets[0], size), dtype=torch.uint8))

    def abort(self):
        for each in self.sockets:
            with contextlib.suppress(OSError):  # not connected any more
                each.shutdown(socket.SHUT_RDWR)  # ends calls that wait in other threads; close alone does not
            each.close()


def receive(source, size):
    data = bytearray()
    while len(data) < size:
        part = source.recv(size - len(data))
        if not part:
            raise OSError("the connection was closed")
        data += part
    return data


if __name__ == "__main__":
    weight_transfer.NcclGroup = Rank
    if sys.argv[1] == "--buffer-bytes":
        weight_transfer.BUFFER_BYTES = int(sys.argv[2])
        del sys.argv[1:3]
    publish.main(sys.argv[1:])
