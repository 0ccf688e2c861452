# SPDX-License-Identifier: Apache-2.0
"""`espalier launch`."""

import json
import os
import signal
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from ..commands.console import say
from . import notes
from .arguments import launch_parser as parser
from .arguments import parse_launch

__all__ = ["main", "parser"]

SITE = Path(__file__).resolve().parent / "site"
FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def environment_of(arguments, folder):
    """What the command finds in its environment; its processes leave their notes in `folder`."""
    settings = {name: getattr(arguments, name) for name in ("patch_on", "backend", "check", "skip_logits", "keep_groups")}
    path = [str(SITE), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, notes.VARIABLE: json.dumps(settings | {"folder": folder}),
            "PYTHONPATH": os.pathsep.join(each for each in path if not is_installed_package(each))}  # fmt: skip


def is_installed_package(path):
    """Whether `path` is where pip has installed this package: the program `espalier` puts it before the standard library, where
    other packages would hide modules of that."""
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    return Path(path).resolve() in installed


def run(command, environment):
    """The exit code of a command that gets the signals of this process."""
    process = subprocess.Popen(command, env=environment)

    def forward(number, _frame):
        if number != signal.SIGINT or not has_terminal():
            process.send_signal(number)

    for number in (signal.SIGINT, *FORWARDED):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, forward)
    code = process.wait()
    return code if code >= 0 else 128 - code


def has_terminal():
    """Whether Ctrl-C of the terminal reaches the command, too."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def reason(folder, patch_on):
    """Why nothing was patched, by the notes of the command's processes."""
    if faults := notes.read_note(folder, "fault"):
        return faults
    if not notes.has_note(folder, "hook"):
        return ("no Python of the command has loaded Espalier's hook: it is no Python program, runs in isolated mode (python -I, "
                "-E or -S), runs on another machine, or has another sitecustomize that comes first")  # fmt: skip
    if not notes.has_note(folder, "library"):
        wanted = "Transformers' Trainer" if patch_on == "train" else "models of Transformers"
        return f"no process of the command has imported {wanted}" + (
            "; --patch-on load patches models of a loop without a Trainer" if patch_on == "train" else "")
    if patch_on == "train":
        return ("Transformers' Trainer was imported, but train() of no Trainer was called; --patch-on load patches models of a "
                "loop without a Trainer")  # fmt: skip
    return "from_pretrained has returned no causal language model"


def main(words):
    """Runs the command and returns its exit status."""
    arguments = parse_launch(words)
    with tempfile.TemporaryDirectory(prefix="espalier-launch-", ignore_cleanup_errors=True) as folder:
        try:
            code = run(arguments.command, environment_of(arguments, folder))
        except OSError as error:
            say(f"espalier: error: cannot start {arguments.command[0]}: {error.strerror or error}")
            return 1
        if code == 0 and not notes.has_note(folder, "patched"):
            say(f"espalier launch: warning: nothing was patched: {reason(folder, arguments.patch_on)}")
    return code
