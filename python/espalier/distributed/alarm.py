# SPDX-License-Identifier: Apache-2.0
"""How ranks that wait in a collective hear that another one has failed, and will never come."""

import contextlib
import os
import sys
import threading
from datetime import timedelta

from torch.distributed import PrefixStore, Store

SECONDS_BETWEEN = 0.5  # looks at the store
SECONDS_TO_LEAVE = 3.0  # for a rank that has heard of a failure, before its process is ended
SECONDS_TO_HEAR = 10.0  # for the others, before a rank that has failed goes on


class Alarm:
    """Of one step, from `start` to `stop`. A thread looks for failures of other ranks in a store. Where it finds one,
    `failure` is what is wrong, as text; if the step has not been left soon, this rank hangs in a collective, which nothing
    in Python can interrupt: its process prints the failure and ends with status 1."""

    def __init__(self, store: Store, rank: int, size: int, name: str) -> None:
        self.store = store
        self._store, self._rank, self._size = PrefixStore(name, store), rank, size
        self._is_over = threading.Event()
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._watch, name="espalier alarm", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def on_failure(self, failure: str) -> None:
        """Called in the thread that has heard of it."""

    def on_lost_store(self, error: Exception) -> None:
        """Called likewise, where nothing more can be heard."""
        self.failure = self.failure or f"the store of the process group is gone: {error}"

    def is_stuck(self) -> bool:
        """Whether this rank, which has heard of a failure, will not leave the step by itself."""
        return True

    def ring(self, error: BaseException) -> str:
        """Lets the others know of an error of this rank, and waits until they have heard of it. Gives the failure that
        came first, of any rank."""
        self._is_over.set()
        first = f"rank {self._rank}: {type(error).__name__}: {error}"
        with contextlib.suppress(Exception):  # it is the error that counts
            first = self._store.compare_set("failure", "", first).decode()
            self._store.set(f"heard {self._rank}", "")
            others = [f"heard {rank}" for rank in range(self._size) if rank != self._rank]
            self._store.wait(others, timedelta(seconds=SECONDS_TO_HEAR))
        return first

    def stop(self, seconds: float | None = None) -> None:
        """Waits for the thread, no longer than that."""
        self._is_over.set()
        self._thread.join(seconds)

    def _watch(self) -> None:
        while not self._is_over.wait(SECONDS_BETWEEN):
            try:
                if not self._store.check(["failure"]):
                    continue
                self.failure = self._store.get("failure").decode()
                self._store.set(f"heard {self._rank}", "")
            except Exception as error:
                self.on_lost_store(error)
                if self.failure is None:
                    return
            self.on_failure(self.failure)
            while not self._is_over.wait(SECONDS_TO_LEAVE):
                if self.is_stuck():
                    self._end_process()

    def _end_process(self) -> None:
        sys.stdout.flush()
        print(f"espalier.distributed: {self.failure}; rank {self._rank} waits for it in a collective, and ends",
              file=sys.stderr, flush=True)  # fmt: skip
        os._exit(1)
