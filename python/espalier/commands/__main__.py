# SPDX-License-Identifier: Apache-2.0
"""Runs `espalier completion` and `espalier man`: python3 -m espalier.commands completion SHELL | man.

The program has checked the arguments, and writes what its commands are to standard input.
"""

import signal
import sys

from .command import run_command
from .command_line import print_whole
from .command_texts import read_commands
from .completion import SCRIPTS
from .man import manual_page


def main(name, shell=None):
    """Runs a command and returns its exit code."""
    def work():
        version, (program, *commands) = read_commands()
        print_whole(SCRIPTS[shell](program, commands) if shell else manual_page(version, program, commands))

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a closed pipe ends it silently
    return run_command(name, work)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
