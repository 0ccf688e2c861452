# SPDX-License-Identifier: Apache-2.0
"""What proofs have found, kept on disk so that later processes need not prove the same again."""

import functools
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import kept
from ..native import __version__
from . import versions
from .code_digest import Undigestible, digest_of
from .config_view import original_of

# No result of a backbone depends on these.
_IRRELEVANT = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")


@dataclass(frozen=True)
class Verdict:
    """fault: what is wrong on trees, None: nothing. reference: what the proof compared with. doubt: why there is no proof by a
    small copy; then nothing is known yet. may_pass: the fault is a failure, of memory or a driver, that may not come again."""

    fault: str | None = None
    reference: str = "a small copy in float64"
    doubt: str | None = None
    may_pass: bool = False


def key_of(cls: Any, config: Any, functions: Iterable[tuple[str, Any]]) -> str | None:
    """A digest of all that the verdict on models of class `cls` with `config` depends on: versions, settings, and the code that
    runs: named functions, as they are in this process. None where it is not known whether another process has the same code."""
    values = {name: value for name, value in original_of(config).to_dict().items() if name not in _IRRELEVANT}
    try:
        code = digest_of(functions)
    except Undigestible:
        return None
    parts = [_versions(), _sources(), cls.__qualname__, code, json.dumps(values, sort_keys=True, default=str)]
    digest = hashlib.sha256("\0".join(parts).encode())
    return f"{values.get('model_type', cls.__name__)}-{digest.hexdigest()[:32]}"


@functools.cache
def _sources() -> str:
    here = Path(__file__).parent
    files = [here.parent / "ops.py", *sorted(here.glob("*.py"))]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def _versions() -> str:
    return f"{__version__} {versions.VERSION} {torch.__version__}"


def read(key: str) -> Verdict | None:
    """The verdict of an earlier process; None where there is none that can be read."""
    found = kept.read(_file(key))
    try:
        return Verdict(found["fault"], found["reference"])
    except (KeyError, TypeError):
        return None


def write(key: str, verdict: Verdict) -> None:
    """Keeps the verdict for later processes, where the disk lets it, but for what may be otherwise the next time."""
    if verdict.doubt is None and not verdict.may_pass:
        kept.write(_file(key), {"fault": verdict.fault, "reference": verdict.reference})


def _file(key: str) -> Path:
    return kept.folder("proofs") / f"{key}.json"
