# SPDX-License-Identifier: Apache-2.0
"""Progress on stderr: a bar on a terminal, a plain line from time to time in a pipe."""

import sys
import time

from .console import write


class Progress:
    def __init__(self, label):
        self._label = label
        self._terminal = sys.stderr.isatty()
        self._started = time.monotonic()
        self._last = self._started

    def update(self, fraction, note):
        """Shows `fraction` (0 to 1) and a few words, at most ten times a second (in a pipe: every 5 seconds)."""
        now = time.monotonic()
        if now - self._last < (0.1 if self._terminal else 5.0):
            return
        self._last = now
        if self._terminal:
            filled = int(30 * min(1.0, fraction))
            write(f"\r{self._label} [{'#' * filled}{'.' * (30 - filled)}] {fraction:4.0%} {note}\x1b[K")
        else:
            write(f"{self._label} {fraction:4.0%} {note}, {now - self._started:.0f} s\n")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def close(self):
        """Clears the bar, so that the next output begins on an empty line."""
        if self._terminal:
            write("\r\x1b[K")
