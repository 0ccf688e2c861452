# SPDX-License-Identifier: Apache-2.0
"""The command `espalier`."""

import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from . import errors
from .commands.command import run_command
from .commands.command_line import nearest_word, print_whole
from .commands.console import say
from .commands.process import open_standard_streams
from .commands.registry import COMMANDS, help_text


def _is_rank(arguments: Sequence[str]) -> bool:
    """Whether torchrun has started this process as one of several that divide the work of a command."""
    is_divided = bool({*arguments[:1]} & {"train", "rerun", "logprobs", "sample", "verify"})
    return (is_divided and not {"-h", "--help"} & set(arguments) and "LOCAL_RANK" in os.environ
            and int(os.environ.get("WORLD_SIZE", "1")) > 1)  # fmt: skip


def _print_version() -> None:
    from .commands.version import version_text

    print_whole(version_text() + "\n")


def run(arguments: Sequence[str]) -> int:
    """Runs the command that the first argument names, and returns its exit status. Wrong arguments raise SystemExit."""
    word = arguments[0] if arguments else ""
    if word in ("-h", "--help"):
        return run_command("", lambda: print_whole(help_text()))
    if word == "--version":
        return run_command("", _print_version)
    if word in COMMANDS:
        if _is_rank(arguments):
            from .distributed import command

            command.main(arguments)
        return COMMANDS[word].main(list(arguments[1:]))
    if word and not word.startswith("-"):
        near = nearest_word(word, COMMANDS)
        say(f"espalier: error: unknown command {word}; expected one of {', '.join(COMMANDS)}"
            f"{f'; did you mean {near}?' if near else ''} (see --help)")  # fmt: skip
    else:
        say("espalier: error: a command is required (see `espalier --help`)")
    return 2


def main() -> NoReturn:
    """Runs the command of this process, and ends it."""
    errors.IN_COMMAND = True
    open_standard_streams()
    # An interrupt while modules are read ends the process without a traceback; commands that clean up handle it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        status = run(sys.argv[1:])
    except SystemExit as exit:
        status = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    # All is written. LibTorch would take a tenth of a second to forget its operators one by one.
    os._exit(status)


if __name__ == "__main__":
    main()
