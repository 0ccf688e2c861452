# SPDX-License-Identifier: Apache-2.0
"""Names of published adapters."""

import hashlib
from pathlib import Path


def adapter_name(folder: str | Path) -> str:
    """The name under which servers have the adapter of DIR/step_N: `DIR-step_N-` and 12 digits of a hash of path and content.

    Servers key cached prefixes by names. Another adapter has another name, also one that a later run publishes as the same step
    in the same folder; the same adapter has the same name.
    """
    folder = Path(folder).resolve()
    digest = hashlib.sha256(str(folder).encode())
    for path in sorted(folder.glob("adapter_*")):
        with path.open("rb") as file:
            digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return f"{folder.parent.name}-{folder.name}-{digest.hexdigest()[:12]}"


def is_outdated(name: str, path: str, parent: Path) -> bool:
    """Whether a loaded adapter is one that was published in `parent` and is no longer what its folder has."""
    folder = Path(path)
    if folder.parent != parent or not name.startswith(f"{parent.name}-{folder.name}"):
        return False
    return not (folder / "adapter_config.json").is_file() or name != adapter_name(folder)
