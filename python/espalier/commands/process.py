# SPDX-License-Identifier: Apache-2.0
"""The process of a command whose work is done by the compiled library: in a thread, while this one serves signals."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any, Protocol, TypeVar

from .console import write
from .progress import Progress

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
STOPPED = 3  # exit status of a run that a signal has stopped, unlike failure (1) and wrong usage (2)
_APART = 0.5  # seconds between two interrupts of which the second ends a run at once
_STACK = 64 << 20  # bytes

Result = TypeVar("Result")


class Stop(Protocol):
    """espalier._engine.StopRequest."""

    @property
    def step(self) -> int: ...

    def request(self) -> bool: ...


class Messages:
    """What a library says of long work, on stderr."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._lock = threading.Lock()

    def line(self, text: str) -> None:
        """One or several whole lines, safe to print."""
        with self._lock:
            if self._progress:
                self._progress.erase()
            write(text + "\n")

    def update(self, work: str, fraction: float, detail: str) -> None:
        """How far the current work is."""
        with self._lock:
            if self._progress is None or self._progress.label != work:
                if self._progress:
                    self._progress.erase()
                self._progress = Progress(work)
            self._progress.update(fraction, detail)

    def end(self) -> None:
        """The current work has ended."""
        with self._lock:
            if self._progress:
                self._progress.erase()
            self._progress = None


class Process:
    """Ends by signals, after what is half written has been removed; a run that has steps to save stops first.

    Attributes:
        stop: A request that the work may be given; None: it ends at once.
    """

    def __init__(self) -> None:
        self.stop: Stop | None = None
        self._libraries: list[ModuleType] = []
        self._first_interrupt: float | None = None

    def add(self, library: ModuleType, *, tells: bool = True) -> None:
        """Cleans up after a compiled module where a signal ends the process. `tells`: whether its messages are printed."""
        messages: Any = library
        messages.guard_files()
        to = Messages()
        messages.listen(*((to.line, to.update, to.end) if tells else (None, None, None)))
        self._libraries.append(library)

    def run(self, work: Callable[[], Result], *, handles_signals: bool = True) -> Result:
        """What work() returns or raises, in a thread: it may take hours in which this one has to handle signals.

        Args:
            work: What is done.
            handles_signals: Whether signals end the process. False: they raise as the caller has set it.
        """
        if threading.current_thread() is not threading.main_thread():
            return work()
        outcome: list[Result] = []
        fault: list[BaseException] = []

        def run() -> None:
            try:
                outcome.append(work())
            except BaseException as error:
                fault.append(error)

        before = {number: signal.getsignal(number) for number in ENDING}
        for number, handler in before.items():
            if handles_signals and handler is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        stack = threading.stack_size(_STACK)
        thread = threading.Thread(target=run, name="espalier", daemon=True)
        thread.start()
        threading.stack_size(stack)
        try:
            while thread.is_alive():
                thread.join(0.2)  # a signal that another thread receives is handled here soon
        except BaseException:
            self._clean_up()
            raise
        finally:
            for number, handler in before.items():
                if handler is not None:  # None: it was not set by Python
                    signal.signal(number, handler)
        if fault:
            raise fault[0]
        return outcome[0]

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        step = -1 if self.stop is None or number == signal.SIGQUIT else self.stop.step
        if self.stop is None or step < 0:
            self._die(number)
        elif step == 0:
            self._clean_up()
            write("espalier: stopped before the first step\n")
            os._exit(STOPPED)
        elif self.stop.request():
            above = "\n" if sys.stderr and sys.stderr.isatty() else ""  # below the progress bar and ^C
            write(f"{above}espalier: finishing step {step}, then saving; interrupt again to stop at once\n")
        # Schedulers and terminals send SIGTERM and SIGHUP both to a process group and to its processes.
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._first_interrupt is None:
                self._first_interrupt = now
            elif now >= self._first_interrupt + _APART:
                self._die(number)

    def _clean_up(self) -> None:
        for library in self._libraries:
            calls: Any = library
            calls.remove_temporaries()

    def _die(self, number: int) -> None:
        self._clean_up()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def die_of_closed_pipe() -> None:
    """Ends the process by SIGPIPE: status 141 in a shell."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGPIPE)


def open_standard_streams() -> None:
    """Opens those that are closed so that every access fails: a file that is opened later would get their descriptor."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free descriptor, which is this one. To read from one that is opened for writing fails, and vice versa.
            os.open(os.devnull, os.O_WRONLY if descriptor == 0 else os.O_RDONLY)
