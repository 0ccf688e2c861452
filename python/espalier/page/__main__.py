# SPDX-License-Identifier: Apache-2.0
"""For the program: standard input is the library's page_data, standard output the page. python3 -m espalier.page"""

import _signal  # type: ignore[import-not-found]  # built in, unlike `signal`, for which files are read

if __name__ == "__main__":  # the program that waits for the page reports both
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    _signal.signal(_signal.SIGPIPE, _signal.SIG_DFL)

import gc
import sys

from .render import page_of

if __name__ == "__main__":
    gc.disable()  # millions of lists, of which all stay
    sys.stdout.buffer.write(page_of(sys.stdin.buffer.read()).encode())
