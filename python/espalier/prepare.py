# SPDX-License-Identifier: Apache-2.0
"""Runs `espalier prepare`: python3 -m espalier.prepare ARGUMENTS."""

import _signal  # type: ignore[import-not-found]  # built in, unlike `signal`, for which files are read

# While modules are read, an interrupt ends the command without a traceback.
INTERRUPT_RAISES = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
if __name__ == "__main__" and INTERRUPT_RAISES:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

import sys

from .commands.prepare import main

if __name__ == "__main__":
    if INTERRUPT_RAISES:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    sys.exit(main())
