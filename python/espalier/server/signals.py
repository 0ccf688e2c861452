# SPDX-License-Identifier: Apache-2.0
"""Signals that end the server: the first one in order, the second one at once."""

import contextlib
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import uvicorn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class EndOnSignals:
    """A context in which a signal lets the server end what runs, and after which that signal is raised again. The process ends at
    once with a second signal, or `seconds` after the first. A signal that was ignored before, such as SIGHUP under nohup, still
    is."""

    def __init__(self, server: uvicorn.Server, seconds: float) -> None:
        self._server = server
        self._seconds = seconds
        self._first: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._first is not None and kind is None:
            signal.raise_signal(self._first)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._first is not None:
            _end(number, "a second signal came")
        self._first = number
        self._server.should_exit = True
        _say("ends after what has begun; a second signal ends it at once")
        last = threading.Timer(self._seconds, _end, (number, f"it has not ended within {self._seconds:g} s"))
        last.daemon = True
        last.start()


def _end(number: int, why: str) -> None:
    _say(f"ends at once: {why}")
    os._exit(128 + number)


def _say(text: str) -> None:
    """Not through sys.stderr, which a handler of signals may have interrupted."""
    with contextlib.suppress(OSError):
        os.write(2, f"espalier serve: {text}\n".encode())
