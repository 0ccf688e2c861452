# SPDX-License-Identifier: Apache-2.0
"""Progress on stderr: a bar on a terminal, a plain line from time to time in a pipe."""

import sys
import time

from .console import write

_WIDTH = 28  # of the bar


def duration(seconds: float) -> str:
    """"12s", "3m 05s", "1h 02m"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    return f"{whole // 60}m {whole % 60:02}s" if whole < 3600 else f"{whole // 3600}h {whole // 60 % 60:02}m"


class Progress:
    """Nothing is shown of work that ends within half a second.

    Attributes:
        label: The work.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self._terminal = bool(sys.stderr) and sys.stderr.isatty()
        self._is_drawn = False
        self._started = self._last = time.monotonic()

    def update(self, fraction: float, note: str) -> None:
        """Shows `fraction` (0 to 1) and a few words, at most ten times a second (in a pipe: every ten seconds)."""
        now = time.monotonic()
        passed = now - self._started
        if passed < 0.5 or now - self._last < (0.1 if self._terminal else 10):
            return
        self._last = now
        fraction = min(1.0, max(0.0, fraction))
        left = f", {duration(passed * (1 - fraction) / fraction)} left" if fraction > 0.01 else ""
        if not self._terminal:
            write(f"{self.label}: {100 * fraction:.0f}%{left}{'  ' if note else ''}{note}\n")
            return
        filled = int(_WIDTH * fraction)
        write(f"\r\x1b[K{self.label} [{'=' * filled}{' ' * (_WIDTH - filled)}] {100 * fraction:.0f}%{left}  {note}")
        self._is_drawn = True

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        self.erase()

    def erase(self) -> None:
        """Clears the bar, so that the next output begins on an empty line."""
        if self._is_drawn:
            write("\r\x1b[K")
        self._is_drawn = False
