# SPDX-License-Identifier: Apache-2.0
"""Connections with bounds: how many there are, and how long each may let the server wait.

uvicorn bounds the number of requests (limit_concurrency) and of connections that wait to be accepted (backlog), the length of
headers, and the time between two requests. What it has no bounds for is here, in a protocol that it is configured with:
connections that never send a whole request, or do not read their answers.
"""

import asyncio
import functools
import logging
import resource
import time
from collections.abc import Callable
from typing import Any, cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

MAX_CONNECTIONS = 4096
BACKLOG = 128              # connections that one turn of the event loop accepts at most
RESERVED_FILES = 256       # descriptors for checkpoints and models
IDLE_SECONDS = 20          # until the headers of a request are whole, from the connection or the last answer on
PATIENCE_SECONDS = 30      # for a body, or for an answer to be read, and as long as its bytes take at BYTES_PER_SECOND
BYTES_PER_SECOND = 128 << 10
HEADER_BYTES = 64 << 10
LOG_LINES = 120            # a minute


class Connections:
    """Those of a server. limit: how many there may be. A tick is a second, or as long as the event loop was busy, so that a busy
    server does not cut clients off whose bytes it has not read."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.ticks = 0
        self.idle: dict[Connection, None] = {}  # without a request that is being answered; the one that waits longest first

    def make_room(self, connections: "set[Any]") -> None:
        """Closes the connection that has been without a request for the longest time where there are too many."""
        while len(connections) > self.limit and len(self.idle) > 1:
            longest = next(iter(self.idle))
            del self.idle[longest]
            connections.discard(longest)
            longest.transport.abort()


class Connection(H11Protocol):
    """One of them: HTTP/1.1 as uvicorn speaks it."""

    def __init__(self, bounds: Connections, config: uvicorn.Config, server_state: ServerState, app_state: dict[str, Any],
                 _loop: asyncio.AbstractEventLoop | None = None) -> None:  # fmt: skip
        super().__init__(config, server_state, app_state, _loop)
        self._bounds = bounds
        self._received = 0  # bytes of the request
        self._resumed = 0   # times that its client has read most of what was sent
        self._wait: object = None
        self._since = 0     # ticks, since it has been waiting for this
        self._seconds = 0   # how long it may

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._bounds.idle[self] = None
        self._bounds.make_room(self.connections)

    def connection_lost(self, exc: Exception | None) -> None:
        self._bounds.idle.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        self._received = len(data) if self.cycle is not before else self._received + len(data)
        self._count_idle()

    def on_response_complete(self) -> None:
        self._bounds.idle.pop(self, None)  # it waits anew
        super().on_response_complete()
        self._count_idle()

    def _count_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self._bounds.idle.setdefault(self)
        else:
            self._bounds.idle.pop(self, None)

    def resume_writing(self) -> None:
        self._resumed += 1
        super().resume_writing()

    def tick(self) -> None:
        """Closes the connection where its client has let the server wait for too long."""
        wait, seconds = self._waits_for()
        if wait != self._wait:
            self._wait, self._since = wait, self._bounds.ticks
        if wait is not None and self._bounds.ticks - self._since > seconds:
            self.transport.abort()

    def _waits_for(self) -> tuple[object, int]:
        """What the client has to do next, and for how many seconds it may take; None: nothing."""
        request = id(self.cycle)
        if self.transport.is_closing() or self.flow.write_paused:
            return ("read", request, self._resumed), PATIENCE_SECONDS
        if self.conn.their_state is h11.SEND_BODY:
            is_answered = self.conn.our_state is h11.DONE
            seconds = 0 if is_answered else self._received // BYTES_PER_SECOND
            return ("send", request, is_answered), PATIENCE_SECONDS + seconds
        if self.conn.their_state is h11.IDLE:
            return ("ask", request), IDLE_SECONDS
        return None, 0


class BoundedServer(uvicorn.Server):
    """A server of an application of ASGI whose connections are bounded. options: of uvicorn.Config."""

    def __init__(self, app: ASGIApp, limit: int, **options: Any) -> None:
        self.bounds = Connections(limit)
        protocol = cast("type[asyncio.Protocol]", functools.partial(Connection, self.bounds))
        super().__init__(uvicorn.Config(
            app, http=protocol, ws="none", lifespan="on", backlog=min(BACKLOG, limit), limit_concurrency=limit + 1,
            timeout_keep_alive=IDLE_SECONDS, h11_max_incomplete_event_size=HEADER_BYTES, timeout_graceful_shutdown=5,
            access_log=False, **options))  # fmt: skip

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # it is called every 0.1 s
            self.tick()
        return await super().on_tick(counter)

    def tick(self) -> None:
        """A second has passed."""
        self.bounds.ticks += 1
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection):
                connection.tick()


class LogLimit(logging.Filter):
    """Lets LOG_LINES a minute through, and says once how many more there were. clock: in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._begin = clock()
        self._lines = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if self._clock() - self._begin >= 60:
            left_out = self._lines - LOG_LINES
            self._begin, self._lines = self._clock(), 0
            if left_out > 0:
                record.msg, record.args = f"{record.getMessage()} ({left_out} lines before this one were left out)", None
        self._lines += 1
        return self._lines <= LOG_LINES


def connection_limit() -> int:
    """How many connections there may be, so that descriptors are left for files. Raises the limit of this process towards what
    the system lets it have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + BACKLOG + RESERVED_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MAX_CONNECTIONS
    files = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return max(files - BACKLOG - RESERVED_FILES, files // 4)
