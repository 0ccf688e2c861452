# SPDX-License-Identifier: Apache-2.0
"""What is kept on disk so that later processes need not find it again: JSON in folders of the user's cache."""

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def folder(name: str) -> Path:
    """$XDG_CACHE_HOME/espalier/NAME or ~/.cache/espalier/NAME."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "espalier" / name


def read(path: Path) -> Any:
    """What a file holds; None where there is none that can be read."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def write(path: Path, values: Any) -> bool:
    """Keeps the values, and says whether the disk let it. Who reads meanwhile finds the earlier ones."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
            json.dump(values, file)
        os.replace(file.name, path)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def turn(path: Path) -> Iterator[None]:
    """Waits until no other process is inside for this path: those of one machine start at once. Without a lock where the disk
    lets none be."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(path.with_suffix(".lock").open("w")), fcntl.LOCK_EX)
        yield
