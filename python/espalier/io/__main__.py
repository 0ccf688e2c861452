# SPDX-License-Identifier: Apache-2.0
"""Runs `espalier import` and `espalier export`: python3 -m espalier.io import|export ARGUMENTS."""

import _signal  # type: ignore[import-not-found]  # built in; importing `signal` would read files

# During imports, an interrupt ends the command without a traceback.
INTERRUPT_RAISES = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
if __name__ == "__main__" and INTERRUPT_RAISES:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

import sys

from ..commands import prepare
from ..commands.command import run_command
from .arguments import parse_export
from .exporting import run_export


def main(argv):
    """Runs the command named by the first word and returns its exit code; wrong arguments raise SystemExit."""
    name, *words = argv
    if name == "import":
        return prepare.main(words, name)
    return run_command(name, lambda: run_export(parse_export(words)))


if __name__ == "__main__":
    if INTERRUPT_RAISES:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
