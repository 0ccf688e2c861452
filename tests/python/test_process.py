# SPDX-License-Identifier: Apache-2.0
"""Signals of a command whose work is done in a thread, and what it says meanwhile."""

import os
import signal
import subprocess
import sys
import threading
from types import ModuleType

import pytest

from conftest import REPOSITORY
from espalier.commands.process import Messages, Process

# Sends itself a signal, so many times, well apart, while the work waits in a step, and ends with 0 where it is asked to stop.
RUN = """
import os, signal, sys, time
from types import ModuleType
from espalier.commands.process import Process

class Stop:
    step, requested = int(sys.argv[2]), False

    def request(self):
        first, self.requested = not self.requested, True
        return first

library = ModuleType("library")
library.guard_files = lambda: None
library.listen = lambda *functions: None
library.remove_temporaries = lambda: print("removed", flush=True)
process, stop = Process(), Stop()
process.add(library)
process.stop = stop

def work():
    for number in range(int(sys.argv[3])):
        time.sleep(0.7 * (number > 0))
        os.kill(os.getpid(), int(sys.argv[1]))
    time.sleep(0.5)
    return 0 if stop.requested else 1

sys.exit(process.run(work))
"""
SAID = "espalier: finishing step 12, then saving; interrupt again to stop at once\n"


def run(number, step, times=1):
    done = subprocess.run([sys.executable, "-c", RUN, str(int(number)), str(step), str(times)], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(REPOSITORY / "python")})  # fmt: skip
    return done.returncode, done.stderr, done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_finishes_its_step(number):
    assert run(number, 12) == (0, SAID, "")
    assert run(number, 0) == (3, "espalier: stopped before the first step\n", "removed\n")
    assert run(number, -1) == (-number, "", "removed\n")


def test_the_second_interrupt_ends_the_run_and_others_do_not():
    assert run(signal.SIGINT, 12, 2) == (-signal.SIGINT, SAID, "removed\n")
    assert run(signal.SIGTERM, 12, 2) == (0, SAID, "")
    assert run(signal.SIGHUP, 12, 3) == (0, SAID, "")
    assert run(signal.SIGQUIT, 12) == (-signal.SIGQUIT, "", "removed\n")


def test_what_work_raises_is_raised_and_handlers_come_back():
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyError, match="key"):
        Process().run(lambda: {}["key"])
    assert Process().run(lambda: threading.current_thread() is threading.main_thread()) is False
    assert signal.getsignal(signal.SIGTERM) is handler


def test_only_a_process_that_tells_listens():
    heard = []
    library = ModuleType("library")
    library.guard_files, library.listen = (lambda: heard.append("guards")), (lambda line, *_: heard.append(line is not None))
    Process().add(library, tells=False)
    Process().add(library)
    assert heard == ["guards", False, "guards", True]


def test_a_bar_is_erased_before_other_work_is_shown(monkeypatch, capfd):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    clock = [0.0]
    monkeypatch.setattr("espalier.commands.progress.time.monotonic", lambda: clock[0])
    messages = Messages()
    for clock[0] in (0.0, 60.0):
        messages.update("first", 0.5, "")
    messages.update("second", 0.1, "")
    first, rest = capfd.readouterr().err.split("first", 1)
    assert first == "\r\x1b[K" and rest.endswith("50%, 1m 00s left  \r\x1b[K")


def test_lines_are_printed_whole(capfd):
    messages = Messages()
    messages.update("work", 0.5, "detail")  # too early to be shown
    messages.line("a\nb")
    messages.end()
    assert capfd.readouterr().err == "a\nb\n"
