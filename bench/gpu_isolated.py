# SPDX-License-Identifier: Apache-2.0
"""Work on a GPU in a separate process, so that what breaks the device or hangs takes nothing else along.

A kernel that touches memory which is not its own ends every later call of its process, and one that waits for ever can only
be killed together with its process. The worker says what it is about to do, and how long that may take; where it does not
come back, the caller learns what it was doing, and can go on with another worker that leaves it out.
"""

import multiprocessing
import os
import time
from typing import NamedTuple

START_SECONDS = 120  # until the worker says what it does first: it has to import torch


class Lost(NamedTuple):
    """The last message of a worker that did not end by itself."""

    doing: object
    why: str


class Here:
    """What a worker is given that runs in this process: results go to a function, and nothing is watched."""

    def __init__(self, take):
        self.result = take

    def doing(self, what, seconds):
        pass


class There:
    """The same in a separate process."""

    def __init__(self, pipe):
        self.pipe = pipe

    def doing(self, what, seconds):
        """From now on it does `what` (anything that can be pickled) for so long at most."""
        self.pipe.send((False, what, seconds))

    def result(self, value):
        self.pipe.send((True, value, 0))


def begin(work, pipe, arguments):
    work(There(pipe), *arguments)
    # Not by the usual way: a device that is broken can hang or crash what tidies up.
    pipe.close()
    os._exit(0)


def results(work, *arguments, seconds, start_seconds=START_SECONDS):
    """Yields what work(tell, *arguments) hands to tell.result, from a separate process, which is killed after `seconds`
    altogether. Last comes a Lost where the process was killed or died."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=begin, args=(work, sender, arguments))
    process.start()
    sender.close()
    end = time.monotonic() + seconds
    what, allowed, since = "start", start_seconds, time.monotonic()
    try:
        while True:
            now = time.monotonic()
            if not receiver.poll(max(0, min(since + allowed, end) - now)):
                yield Lost(what, "no time was left" if time.monotonic() >= end else f"did not end in {allowed:.0f} s")
                return
            try:
                is_result, value, more = receiver.recv()
            except (EOFError, OSError):
                process.join(10)
                if process.exitcode != 0:
                    yield Lost(what, f"its process ended with status {process.exitcode}")
                return
            if is_result:
                yield value
            else:
                what, allowed = value, more
            since = time.monotonic()
    finally:
        process.kill()
        process.join(10)
