# SPDX-License-Identifier: Apache-2.0
"""Which commit a benchmark measured."""

import functools
import os
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


@functools.cache
def commit():
    """The value of ESPALIER_COMMIT, for sources that came without their history; else the short hash, "with changes" where files
    differ from it. A copy within another repository is not at that one's commit: its own is unknown."""
    given = os.environ.get("ESPALIER_COMMIT", "").strip()
    if given:
        return given
    git = lambda *words: subprocess.run(["git", "-C", REPOSITORY, *words], capture_output=True, text=True).stdout.strip()
    try:
        root = git("rev-parse", "--show-toplevel")
        if root and Path(root).resolve() == REPOSITORY:
            return git("describe", "--always", "--exclude=*", "--dirty= with changes") or "unknown commit"
    except OSError:
        pass  # no git
    return "unknown commit"
