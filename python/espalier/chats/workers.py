# SPDX-License-Identifier: Apache-2.0
"""A function applied to many chunks in several processes, with results in the order of the chunks."""

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_all_start_methods, get_context
from typing import Any

from ..errors import InputError

# What workers apply. It is there before they are forked, so it need not be sent to them.
_functions: list[Callable[[Any], Any]] = []


def in_order(function, chunks, workers):
    """Yields function(chunk) for each of the chunks. Up to `workers` processes work at once, on a few chunks more than they are,
    so memory does not grow with the input. A single chunk is worked on here."""
    chunks = iter(chunks)
    ahead = [chunk for _, chunk in zip(range(2), chunks)]
    if workers == 1 or len(ahead) < 2 or "fork" not in get_all_start_methods():
        yield from map(function, ahead)
        yield from map(function, chunks)
        return
    _functions.append(function)
    pool = ProcessPoolExecutor(workers, get_context("fork"), _begin, (os.getpid(),))
    pending = deque(pool.submit(_apply, chunk) for chunk in ahead)
    try:
        for chunk in chunks:
            pending.append(pool.submit(_apply, chunk))
            if len(pending) > workers + 1:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise InputError(
            "a worker process ended before its work was done, perhaps for lack of memory; --workers 1 needs the least"
        ) from None
    finally:
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=not pending, cancel_futures=True)
        for process in processes if pending else ():
            process.kill()
        _functions.clear()


def _apply(chunk):
    return _functions[-1](chunk)


def _begin(parent):
    """Ctrl-C and SIGTERM are the parent's, which ends its workers. If it cannot, they end by themselves."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def watch():
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
