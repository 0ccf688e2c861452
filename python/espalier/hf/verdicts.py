# SPDX-License-Identifier: Apache-2.0
"""What proofs have found, kept on disk so that later processes need not prove the same again."""

import functools
import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from .. import kept
from ..native import __version__
from .config_view import original_of

# No result of a backbone depends on these.
_IRRELEVANT = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")


@dataclass(frozen=True)
class Verdict:
    """fault: what is wrong with the small copy; None: nothing. not_small: why there is none, then nothing is known yet."""

    fault: str | None = None
    not_small: str | None = None


def key_of(cls: Any, config: Any) -> str:
    """A digest of all that the verdict on models of class `cls` with `config` depends on: versions, sources, settings."""
    values = {name: value for name, value in original_of(config).to_dict().items() if name not in _IRRELEVANT}
    parts = [_versions(), _sources(), Path(sys.modules[cls.__module__].__file__ or "").read_bytes(), cls.__qualname__,
             json.dumps(values, sort_keys=True, default=str)]  # fmt: skip
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else part.encode())
        digest.update(b"\0")
    return f"{values.get('model_type', cls.__name__)}-{digest.hexdigest()[:32]}"


@functools.cache
def _sources() -> bytes:
    here = Path(__file__).parent
    files = [here.parent / "ops.py", *sorted(here.glob("*.py"))]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).digest()


def _versions() -> str:
    return f"{__version__} {transformers.__version__} {torch.__version__}"


def read(key: str) -> Verdict | None:
    """The verdict of an earlier process; None where there is none that can be read."""
    found = kept.read(_file(key))
    try:
        return Verdict(found["fault"], found["not_small"])
    except (KeyError, TypeError):
        return None


def write(key: str, verdict: Verdict) -> None:
    """Keeps the verdict for later processes, where the disk lets it."""
    kept.write(_file(key), asdict(verdict))


def _file(key: str) -> Path:
    return kept.folder("proofs") / f"{key}.json"
