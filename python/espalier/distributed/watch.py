# SPDX-License-Identifier: Apache-2.0
"""What ends a user's loop on all ranks, where an exception ends it on one."""

import atexit
import contextlib
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch.distributed as dist

from .alarm import SECONDS_TO_HEAR, Alarm


class LoopAlarm(Alarm):
    """Of a process from its first Engine or Ranks to its end. A rank that hears of a failure goes on until it waits for other
    ranks: there it raises the failure, or its process ends."""

    def on_failure(self, failure: str) -> None:
        if engine := _engine():
            engine.fail_ranks(failure)

    def is_stuck(self) -> bool:
        engine = _engine()
        return bool(_waiting) or (engine is not None and engine.waits_for_ranks())

    def on_lost_store(self, error: Exception) -> None:
        """The process that keeps it has come to its end before this one."""


_alarms: list[LoopAlarm] = []  # of one default group after another; the last one counts
_waiting: list[object] = []  # one for each wait for other ranks in PyTorch


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Around such a wait."""
    _waiting.append(None)
    try:
        yield
    finally:
        _waiting.pop()


def heard_failure() -> str | None:
    """Of another rank's program, which has ended."""
    return _alarms[-1].failure if _alarms else None


def watch_ranks() -> None:
    """From now on an exception that ends the program of one rank is told to all others."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store = dist.distributed_c10d._get_default_store()  # which has no public name
    if _alarms and _alarms[-1].store is store:
        return
    if not _alarms:
        _tell_of_exceptions()
    _alarms.append(LoopAlarm(store, dist.get_rank(), dist.get_world_size(), "espalier loop"))
    _alarms[-1].start()
    # Python ends a thread that comes back from C++ once the interpreter is going, and with it the process.
    atexit.register(_alarms[-1].stop, SECONDS_TO_HEAR)


def _tell_of_exceptions() -> None:
    before = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if _alarms[-1].failure is None:  # else it comes of it
            _alarms[-1].ring(error)

    sys.excepthook = tell


def _engine() -> Any:
    """The compiled trainer, where it is in use."""
    module = sys.modules.get("espalier.native_engine")
    return None if module is None else module.native
