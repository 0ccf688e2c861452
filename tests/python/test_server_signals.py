# SPDX-License-Identifier: Apache-2.0
"""Signals that end `espalier serve`. The server runs in a fork of the tests, without a model: a worker of theirs stands for what has
begun, and a request waits for it."""

import asyncio
import http.client
import json
import os
import signal
import sys
import time
import traceback
from contextlib import contextmanager

import httpx
import pytest

pytest.importorskip("uvicorn", reason="the HTTP server of `espalier serve`")

from espalier.commands.command import run_command
from espalier.server import run
from espalier.server.access import Access
from espalier.server.app import App
from espalier.server.listening import listen, url_of
from espalier.server.service import Service
from espalier.server.signals import EndOnSignals
from espalier.server.store import Store

LONG = 600  # seconds, in which what a test waits for happens by far
REQUEST = "s-1:train:0:1"


class Work:
    """Has begun a request, and ends with it, as samples do; or never."""

    def __init__(self, future, is_stuck):
        self.future, self.is_stuck, self.cancelled = future, is_stuck, asyncio.Event()

    def start(self):
        pass

    async def stop(self):
        if self.is_stuck:
            await asyncio.Event().wait()
        await self.cancelled.wait()

    def cancel(self, request_id):
        assert self.future.payload is not None
        self.cancelled.set()


def serve(listener, state, stop_seconds, is_stuck):
    service = Service({}, Store(state))
    work = Work(service.futures.create(REQUEST), is_stuck)
    service._samplers[work] = work
    server = run._Server(Access([App(service).door("")], ()), service, stop_seconds)
    with EndOnSignals(server, stop_seconds + run.LAST_SECONDS):
        server.run([listener])


class Process:
    def __init__(self, pid, url, log):
        self.pid, self.url, self.log, self.status = pid, url, log, None

    def signal(self, number):
        os.kill(self.pid, number)

    def has_ended(self):
        if self.status is None and (found := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.status = os.waitstatus_to_exitcode(found[1])
        return self.status is not None

    def wait(self):
        """The exit status."""
        until(self.has_ended)
        return self.status


def until(condition):
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@contextmanager
def process(tmp_path, stop_seconds=1000, is_stuck=False, ignores=()):
    log = tmp_path / "log"
    with listen("127.0.0.1", 0, has_key=False) as listener:
        url = url_of(listener)
        pid = os.fork()
        if pid == 0:
            status = 99
            try:
                os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
                sys.stderr = os.fdopen(2, "w")
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    signal.signal(number, signal.SIG_IGN if number in ignores else signal.SIG_DFL)
                status = run_command("serve", lambda: serve(listener, tmp_path / "state", stop_seconds, is_stuck))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
    found = Process(pid, url, log)
    try:
        until(lambda: " on http://" in (log.read_text() if log.exists() else ""))
        yield found
    finally:
        if not found.has_ended():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def waiting(found):
    """A connection that has asked for the result of the request. It has sent all when this returns."""
    assert "espalier_waiting_requests 1\n" in httpx.get(f"{found.url}/metrics").text
    connection = http.client.HTTPConnection(found.url.removeprefix("http://"), timeout=LONG)
    connection.request("POST", "/api/v1/retrieve_future", json.dumps({"request_id": REQUEST}), {"Content-Type": "application/json"})
    return connection


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_what_is_not_done_in_time_fails_and_its_client_is_told(tmp_path, number):
    with process(tmp_path, stop_seconds=1) as found:
        connection = waiting(found)
        found.signal(number)
        assert found.wait() == 128 + number
        assert json.load(connection.getresponse()) == {
            "error": "the server stops, and this request was not done within 1 s; send it again once the server is back",
            "category": "server"}  # fmt: skip
        lines = found.log.read_text().splitlines()
        assert len(lines) == 3 and " on http://" in lines[0] and "after what has begun" in lines[1]
        assert lines[2] == f"espalier: error: {'interrupted' if number == signal.SIGINT else f'stopped by {number.name}'}"


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_second_signal_ends_it_at_once(tmp_path, second):
    with process(tmp_path, is_stuck=True) as found:
        found.signal(signal.SIGTERM)
        until(lambda: "after what has begun" in found.log.read_text())
        assert httpx.get(f"{found.url}/api/v1/healthz").status_code == 200 and not found.has_ended()
        found.signal(second)
        assert found.wait() == 128 + second
        assert "a second signal came" in found.log.read_text() and "Traceback" not in found.log.read_text()


def test_what_never_ends_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "LAST_SECONDS", 1)
    with process(tmp_path, stop_seconds=1, is_stuck=True) as found:
        found.signal(signal.SIGTERM)
        assert found.wait() == 128 + signal.SIGTERM
        assert "it has not ended within 2 s" in found.log.read_text()


def test_a_hangup_that_is_ignored_changes_nothing(tmp_path):
    with process(tmp_path, ignores=[signal.SIGHUP]) as found:
        found.signal(signal.SIGHUP)
        assert httpx.post(f"{found.url}/api/v1/create_session", json={}).status_code == 200
        assert not found.has_ended()
