# SPDX-License-Identifier: Apache-2.0
"""A function applied to many chunks in several processes, with results in the order of the chunks.

A process that is killed while it writes must not make this one wait for the rest. So each process has a pipe to which nobody
else writes (concurrent.futures has one for all).
"""

import contextlib
import itertools
import os
import signal
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import get_all_start_methods, get_context
from queue import SimpleQueue
from typing import Any

from ..errors import InputError

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def in_order(function, chunks, workers):
    """Yields function(chunk) for each of the chunks. Up to `workers` processes work at once, on a few chunks more than they are,
    so memory does not grow with the input. A single chunk is worked on here. An InputError of `chunks` is raised behind the
    results of those that came before it."""
    chunks = _with_error(chunks)
    ahead = list(itertools.islice(chunks, 2))
    chunks = itertools.chain(ahead, chunks)
    if workers == 1 or len(ahead) < 2 or "fork" not in get_all_start_methods():
        yield from (_applied(function, chunk) for chunk in chunks)
        return
    with _pool(function, workers) as submit:
        pending: deque[Future[Any]] = deque()
        for chunk in chunks:
            pending.append(submit(chunk))
            if len(pending) > workers + 1:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _with_error(chunks):
    try:
        yield from chunks
    except InputError as error:
        yield error


def _applied(function, chunk):
    if isinstance(chunk, InputError):
        raise chunk
    return function(chunk)


@contextlib.contextmanager
def _pool(function, workers):
    """Yields submit(chunk), which returns a Future. At the end the processes are killed, whatever they do."""
    processes: list[_Process] = []
    idle: SimpleQueue[_Process] = SimpleQueue()
    threads = ThreadPoolExecutor(workers)

    def apply(chunk):
        process = idle.get()
        try:
            return _applied(process.apply, chunk)
        finally:
            idle.put(process)

    try:
        for _ in range(workers):  # before there are threads, which a fork does not copy
            processes.append(_Process(function))
            idle.put(processes[-1])
        yield lambda chunk: threads.submit(apply, chunk)
    finally:
        for process in processes:
            process.kill()
        threads.shutdown(cancel_futures=True)


class _Process:
    """A process that applies a function to one chunk after the other. It is forked, so the function need not be sent to it."""

    def __init__(self, function):
        self._pipe, pipe = get_context("fork").Pipe()
        self._process = get_context("fork").Process(target=_work, args=(function, pipe, os.getpid()), daemon=True)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # until the process has handlers
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        pipe.close()

    def apply(self, chunk):
        try:
            self._pipe.send(chunk)
            result, error = self._pipe.recv()
        except (EOFError, OSError):
            raise InputError(
                "a worker process ended before its work was done, perhaps for lack of memory; --workers 1 needs the least"
            ) from None
        if error is not None:
            raise error
        return result

    def kill(self):
        self._process.kill()
        self._process.join()


def _work(function, pipe, parent):
    _begin(parent)
    with contextlib.suppress(EOFError, OSError):  # this process's parent was killed
        while True:
            chunk = pipe.recv()
            try:
                pipe.send((function(chunk), None))
            except BaseException as error:
                pipe.send((None, error))


def _begin(parent):
    """Ctrl-C and SIGTERM are the parent's, which ends its workers. If it cannot, they end by themselves."""
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)

    def watch():
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
