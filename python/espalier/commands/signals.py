# SPDX-License-Identifier: Apache-2.0
"""Signals as exceptions: time limits, and a clean stop on SIGTERM and SIGHUP."""

import contextlib
import signal
import threading


class Stopped(BaseException):
    """SIGTERM or SIGHUP arrived. Like KeyboardInterrupt a BaseException, so that no `except Exception` catches it."""

    def __init__(self, number):
        super().__init__(signal.Signals(number).name)
        self.number = number


class _TimeUp(BaseException):
    """Not caught by `except Exception`, not even in templates."""


def _in_main_thread():
    return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def stops_raise():
    """A context in which SIGTERM and SIGHUP raise Stopped and SIGINT KeyboardInterrupt (unless ignored), so that temporary files
    are removed."""
    if not _in_main_thread():
        yield
        return

    def stop(number, frame):
        raise Stopped(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler == signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: it was not set by Python
                signal.signal(number, handler)


@contextlib.contextmanager
def time_limit(seconds, error):
    """Raises `error` if the block takes longer than `seconds` (0: no limit). Interrupts Python code, but not a single
    call into C, such as a power of huge integers. Works only in the main thread; elsewhere there is no limit."""
    if seconds <= 0 or not _in_main_thread():
        yield
        return
    running = True

    def time_up(number, frame):
        if running:
            raise _TimeUp

    before = signal.signal(signal.SIGALRM, time_up)
    # Again every second: Python drops exceptions that are raised inside destructors.
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        try:
            yield
        finally:
            running = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    except _TimeUp:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        raise error from None
