# SPDX-License-Identifier: Apache-2.0
"""Signals as exceptions: a limit on the time of a piece of work, and an orderly end when asked to stop."""

import contextlib
import signal
import threading


class Stopped(BaseException):
    """SIGTERM or SIGHUP arrived. Like KeyboardInterrupt no Exception, so that nothing takes it for a failure."""

    def __init__(self, number):
        super().__init__(signal.Signals(number).name)
        self.number = number


class _TimeUp(BaseException):
    """Passes through every `except Exception`, those of templates included."""


def _in_main_thread():
    return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def stops_raise():
    """Within, SIGTERM and SIGHUP raise Stopped, so that scratch files are removed; unless they are ignored."""
    if not _in_main_thread():
        yield
        return

    def stop(number, frame):
        raise Stopped(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler == signal.SIG_DFL:
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def time_limit(seconds, error):
    """Raises `error` when what is within takes longer than `seconds` (0: no limit). Interrupts Python code; a single
    call into C, such as a power of huge integers, ends first. Works in the main thread; elsewhere there is no limit."""
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
