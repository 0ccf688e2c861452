# SPDX-License-Identifier: Apache-2.0
"""Messages on stderr, one line each, with control characters escaped."""

import contextlib
import re
import sys

from ..page.text import visible


def printable(text):
    """`text` on one line. Characters that show nothing themselves, such as those that steer a terminal or turn the direction of
    writing, come out escaped."""
    return visible(re.sub(r"\s*\n\s*", " ", text)).replace("\t", "\\t")


def clipped(text, limit=300):
    return text if len(text) <= limit else text[:limit] + "..."


def count_of(count: int, singular: str, plural: str | None = None) -> str:
    """"1 turn", "2,000 turns"."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"


def write(text):
    """Writes to stderr. Failures (closed pipe, full disk) are ignored."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()


def say(text):
    """Prints one line."""
    write(printable(text) + "\n")
