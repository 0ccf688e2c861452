# SPDX-License-Identifier: Apache-2.0
"""Connections to `espalier serve` that let it wait, in number and time. Its seconds are ticks here, which the tests give it."""

import asyncio
import logging
import resource
import socket
import threading
import time
from contextlib import contextmanager, suppress

import httpx
import pytest

pytest.importorskip("uvicorn", reason="the HTTP server of `espalier serve`")

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from espalier.server import connections
from espalier.server.connections import BYTES_PER_SECOND, IDLE_SECONDS, PATIENCE_SECONDS, BoundedServer, LogLimit, connection_limit

LARGE = 64 << 20
LONG = 600  # seconds, in which what a test waits for happens by far


class Small:
    """A server of a few routes, whose ticks come from the test alone."""

    def __init__(self, limit):
        self.go = asyncio.Event()
        self.waiting = 0
        routes = [Route("/hello", lambda request: PlainTextResponse("hello")), Route("/large", lambda request: Response(b"x" * LARGE)),
                  Route("/wait", self._wait), Route("/read", self._read, methods=["POST"]),
                  Route("/refuse", lambda request: PlainTextResponse("no", 401), methods=["POST"])]  # fmt: skip
        self.server = BoundedServer(Starlette(routes=routes), limit, port=0, log_config=None)
        tick, self.server.tick = self.server.tick, lambda: None
        self._tick = tick

    async def _wait(self, request):
        self.waiting += 1
        await self.go.wait()
        return PlainTextResponse("done")

    async def _read(self, request):
        try:
            return PlainTextResponse(str(len(await request.body())))
        except ClientDisconnect:
            return Response(status_code=400)

    def call(self, work):
        """work() on the thread of the event loop."""
        async def run():
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(LONG)

    def tick(self, count=1):
        for _ in range(count):
            self.call(self._tick)

    def open(self):
        """How many connections the server has."""
        return self.call(lambda: len(self.server.server_state.connections))

    def until(self, condition):
        until = time.monotonic() + LONG
        while not condition():
            assert time.monotonic() < until
            time.sleep(0.01)

    def connect(self, data=b"", **options):
        """A socket that has sent this, once the server has read it."""
        known = self.call(lambda: set(self.server.server_state.connections))
        client = socket.create_connection(("127.0.0.1", self.port), timeout=LONG)
        new = lambda: self.call(lambda: [each for each in self.server.server_state.connections if each not in known])
        self.until(new)
        if data:
            self.send(client, data, new()[0])
        return client

    def send(self, client, data, connection=None):
        connection = connection or self.call(lambda: next(iter(self.server.server_state.connections)))
        before = self.call(lambda: connection._received)
        client.sendall(data)
        self.until(lambda: self.call(lambda: connection._received) != before)


@contextmanager
def small(limit=100):
    made = Small(limit)
    thread = threading.Thread(target=made.server.run, daemon=True)
    thread.start()
    made.until(lambda: made.server.started or not thread.is_alive())
    made.port = made.server.servers[0].sockets[0].getsockname()[1]
    made.loop = made.server.servers[0].get_loop()
    try:
        yield made
    finally:
        made.loop.call_soon_threadsafe(made.go.set)
        made.server.should_exit = True
        thread.join()


def is_closed(client):
    """Whether the server has closed it: what it sent is read first."""
    with suppress(ConnectionError):
        while client.recv(1 << 16):
            pass
    return True


def reads(client, text):
    """Whether an answer with this text comes."""
    answer = b""
    while text not in answer and (part := client.recv(1 << 16)):
        answer += part
    return text in answer


def head(path, length):
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode()


@pytest.mark.parametrize("begin", [b"", b"GET /hello HTTP/1.1\r\nX-Slow: ", b"GET /hello HTTP/1.1\r\nHost: localhost\r\n\r\n"],
                         ids=["silent", "headers", "between requests"])  # fmt: skip
def test_a_connection_without_a_request_is_closed_after_a_time(begin):
    with small() as server:
        client = server.connect(begin)
        if b"\r\n\r\n" in begin:
            assert reads(client, b"hello")
        for _ in range(IDLE_SECONDS):
            server.tick()
            assert server.open() == 1
            if begin.endswith(b": "):
                server.send(client, b"a")
        server.tick(2)
        assert is_closed(client)
        server.until(lambda: server.open() == 0)


@pytest.mark.parametrize("path", ["/read", "/refuse"])
def test_a_body_that_never_ends(path):
    with small() as server:
        client = server.connect(head(path, 10_000))
        assert path == "/read" or reads(client, b"no")
        for _ in range(PATIENCE_SECONDS):
            server.tick()
            assert server.open() == 1
            server.send(client, b"a")
        server.tick(2)
        assert is_closed(client)
        server.until(lambda: server.open() == 0)


def test_a_body_that_comes_at_a_fair_rate_is_read_whole():
    seconds, part = PATIENCE_SECONDS + 20, b"a" * BYTES_PER_SECOND
    with small() as server:
        client = server.connect(head("/read", seconds * len(part)))
        connection = next(iter(server.server.server_state.connections))
        for number in range(seconds):
            client.sendall(part)
            server.until(lambda: connection._received >= (number + 1) * len(part))
            server.tick()
        assert reads(client, str(seconds * len(part)).encode())


def test_a_refused_request_whose_body_goes_on_at_any_rate_is_closed():
    with small() as server:
        client = server.connect(head("/refuse", 1 << 40))
        connection = next(iter(server.server.server_state.connections))
        with suppress(ConnectionError):
            for number in range(PATIENCE_SECONDS + 5):
                client.sendall(b"a" * BYTES_PER_SECOND)
                server.until(lambda: connection._received >= (number + 1) * BYTES_PER_SECOND or not server.open())
                server.tick()
        server.until(lambda: server.open() == 0)


def test_an_answer_that_is_not_read():
    with small() as server:
        silent = server.connect(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        connection = next(iter(server.server.server_state.connections))
        server.until(lambda: connection.flow.write_paused)
        server.tick(PATIENCE_SECONDS)
        assert server.open() == 1
        server.tick(2)
        server.until(lambda: server.open() == 0)
        silent.close()
        reading = server.connect(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        size = 0
        while size < LARGE:
            size += len(reading.recv(1 << 20))
        server.tick(IDLE_SECONDS)
        assert server.open() == 1


def test_a_request_that_waits_for_the_server_is_not_closed():
    with small() as server:
        client = server.connect(b"GET /wait HTTP/1.1\r\nHost: localhost\r\n\r\n")
        server.tick(20 * PATIENCE_SECONDS)
        server.loop.call_soon_threadsafe(server.go.set)
        assert reads(client, b"done")


def test_silent_connections_are_bounded_in_number_and_keep_nobody_out():
    with small(limit=3) as server:
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(50)]
        assert httpx.get(f"http://127.0.0.1:{server.port}/hello").text == "hello"
        server.until(lambda: server.open() <= 3)
        assert all(is_closed(client) for client in silent[:40])


def test_connections_whose_requests_are_answered_are_not_closed_for_new_ones():
    with small(limit=3) as server:
        url = f"http://127.0.0.1:{server.port}"
        busy = [server.connect(b"GET /wait HTTP/1.1\r\nHost: localhost\r\n\r\n") for _ in range(3)]
        server.until(lambda: server.waiting == 3)
        assert httpx.get(f"{url}/hello").status_code == 503
        server.loop.call_soon_threadsafe(server.go.set)
        assert all(reads(client, b"done") for client in busy)
        assert httpx.get(f"{url}/hello").text == "hello"  # in place of one that waits for its next request


@pytest.mark.parametrize(("limits", "raised", "count"), [
    ((1024, 1 << 20), (4480, 1 << 20), 4096), ((1024, 1024), (1024, 1024), 640), ((1 << 20, 1 << 20), None, 4096),
    ((100, 100), (100, 100), 25), ((1024, resource.RLIM_INFINITY), (4480, resource.RLIM_INFINITY), 4096),
])  # fmt: skip
def test_descriptors_are_left_for_files(monkeypatch, limits, raised, count):
    calls = []
    monkeypatch.setattr(connections.resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(connections.resource, "setrlimit", lambda kind, new: calls.append(new))
    assert connection_limit() == count and calls == ([raised] if raised else [])


def test_lines_of_the_log_are_bounded():
    now = [0.0]
    limit = LogLimit(lambda: now[0])
    record = lambda: logging.LogRecord("uvicorn.error", logging.WARNING, "", 0, "Invalid %s", ("request",), None)
    assert sum(limit.filter(record()) for _ in range(1000)) == connections.LOG_LINES
    now[0] = 60.0
    first = record()
    assert limit.filter(first) and first.getMessage() == f"Invalid request ({1000 - connections.LOG_LINES} lines before this one were left out)"
    assert limit.filter(second := record()) and second.getMessage() == "Invalid request"
