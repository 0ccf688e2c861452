# SPDX-License-Identifier: Apache-2.0
"""Results that clients fetch later, as often as they like until they expire."""

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from ..errors import InputError
from .errors import Refused

KEPT_SECONDS = 3600.0     # after a result is there, unless --result-seconds says another time
KEPT_BYTES = 1 << 30      # of all results; the oldest go first
PENDING_REQUESTS = 16384  # that wait for a result, of all clients
PENDING_BYTES = 4 << 30   # of their bodies
RESULT_BYTES = 1024       # that a result takes besides its content


@dataclass
class Failure:
    """Why a request has no result; category: "user" or "server"."""

    error: str
    category: str = "server"


def failure_of(error: Exception) -> Failure:
    """Of an error, which is due to the request where it is an InputError or Refused."""
    is_user = isinstance(error, InputError | Refused)
    return Failure(str(error) if is_user else f"{type(error).__name__}: {error}", "user" if is_user else "server")


@dataclass
class Future:
    """The result of one request: bytes of protobuf, an object of JSON, or a Failure."""

    request_id: str
    extra: dict[str, Any] = field(default_factory=dict)  # of the first answer, beside request_id
    sequences: int = 0   # that are sampled for it
    payload: bytes | dict[str, Any] | Failure | None = None
    done_at: float = 0.0
    body_bytes: int = 0  # of the request, while it waits
    news: asyncio.Event = field(default_factory=asyncio.Event)  # the result is there, or never will be: the server stops

    @property
    def client(self) -> str:
        """The session of the request."""
        return self.request_id.partition(":")[0]

    @property
    def answer(self) -> dict[str, Any]:
        """To the request, also to one that is repeated. Names of sequences, of which there may be
        thousands, are not kept."""
        names = [f"{self.request_id}:{number}" for number in range(self.sequences)]
        return {"request_id": self.request_id, **self.extra, **({"sample_sequence_ids": names} if names else {})}

    @property
    def size(self) -> int:
        return len(self.payload) if isinstance(self.payload, bytes) else 256


class Futures:
    """All of a server, whose results are kept for so many seconds. Used on the thread of the event loop alone."""

    def __init__(self, kept_seconds: float = KEPT_SECONDS) -> None:
        self.kept_seconds = kept_seconds
        self._pending: dict[str, Future] = {}
        self._done: OrderedDict[str, Future] = OrderedDict()
        self._bytes = 0
        self._pending_bytes = 0
        self._clients: Counter[str] = Counter()  # how many requests of each wait
        self.is_closed = False

    def get(self, request_id: str) -> Future | None:
        """The future of a request; None where there was none, or its result has expired."""
        self._expire()
        return self._pending.get(request_id) or self._done.get(request_id)

    def create(self, request_id: str, *, others_wait: bool = False, sequences: int = 0, **extra: Any) -> Future:
        """The future of a new request. Raises Refused where the server stops, or too many wait, unless others wait for it, or its
        client has less than its share."""
        if self.is_closed:
            raise Refused("the server stops", 429)
        future = Future(request_id, extra, sequences)
        if self.is_full and not others_wait and self._clients[future.client] >= self._share(len(self._clients) + 1):
            raise Refused(f"expected at most {PENDING_REQUESTS} waiting requests, received one more", 429)
        self._pending[request_id] = future
        self._clients[future.client] += 1
        return future

    @property
    def is_full(self) -> bool:
        """Whether as many requests wait as may."""
        return len(self._pending) >= PENDING_REQUESTS

    @staticmethod
    def _share(clients: int) -> int:
        return PENDING_REQUESTS // max(clients, 1)

    def queue_state(self, future: Future) -> tuple[str, str]:
        """What a client is told of a request that waits: the state, as the API names it, and why."""
        own, share = self._clients[future.client], self._share(len(self._clients))
        if len(self._clients) > 1 and own > share:
            return "paused_rate_limit", f"{own} requests of this client wait; its share is {share} of {PENDING_REQUESTS}"
        if self.is_full:
            return "paused_capacity", f"{self.pending} requests wait, as many as may; no more are taken"
        return "active", f"{self.pending} requests wait"

    @property
    def pending(self) -> int:
        return len(self._pending)

    def check_room(self, body_bytes: int) -> None:
        """Raises Refused where one more body of this size is too much, unless it is the only one."""
        if self._pending and self._pending_bytes + body_bytes > PENDING_BYTES:
            raise Refused(f"expected at most {PENDING_BYTES} bytes of waiting requests, received {body_bytes} more", 429)

    def add_body(self, future: Future, body_bytes: int) -> None:
        """Counts the body of a request while it waits, once."""
        if future.payload is None and future.body_bytes == 0:
            future.body_bytes = body_bytes
            self._pending_bytes += body_bytes

    def finish(self, future: Future, payload: bytes | dict[str, Any] | Failure) -> None:
        """Sets the result; the first one counts."""
        if future.payload is not None:
            return
        future.payload, future.done_at = payload, time.monotonic()
        if self._pending.pop(future.request_id, None) is not None:
            self._clients[future.client] -= 1
            if self._clients[future.client] == 0:
                del self._clients[future.client]
        self._pending_bytes -= future.body_bytes
        self._done[future.request_id] = future
        self._bytes += future.size
        future.news.set()
        self._expire()

    def forget(self, future: Future) -> None:
        """Drops a result that nobody fetches later."""
        if self._done.pop(future.request_id, None) is not None:
            self._bytes -= future.size

    def close(self) -> None:
        """Takes no more requests."""
        self.is_closed = True

    def fail_pending(self, failure: Failure, but: Collection[str] = ()) -> list[str]:
        """What has no result yet gets this one, besides some requests. Samples of it end with their next token. Returns the ids
        of what failed."""
        failed = [future for future in self._pending.values() if future.request_id not in but]
        for future in failed:
            self.finish(future, failure)
        return [future.request_id for future in failed]

    def pending_ids(self) -> list[str]:
        """The ids of requests without a result."""
        return list(self._pending)

    def newest(self, prefix: str, limit: int) -> list[Future]:
        """Requests with results whose ids begin with a text, the oldest first: as many of the newest ones as have at most so many
        bytes."""
        found: list[Future] = []
        for future in reversed(self._done.values()):
            if future.request_id.startswith(prefix):
                limit -= future.size + RESULT_BYTES
                if limit < 0:
                    break
                found.append(future)
        return found[::-1]

    def restore(self, future: Future) -> None:
        """A result from before the server was started."""
        self._done[future.request_id] = future
        self._bytes += future.size
        future.news.set()

    def release(self) -> None:
        """Ends the waiting for what still has no result."""
        for future in self._pending.values():
            future.news.set()

    def _expire(self) -> None:
        oldest_kept = time.monotonic() - self.kept_seconds
        while self._done:
            first = next(iter(self._done.values()))
            if first.done_at >= oldest_kept and (self._bytes <= KEPT_BYTES or len(self._done) == 1):
                return
            self._done.popitem(last=False)
            self._bytes -= first.size
