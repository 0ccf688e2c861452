# SPDX-License-Identifier: Apache-2.0
"""Options as the native engine takes them: pairs of a flag's name and its text."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from .errors import InputError
from .options_base import Options

Option: TypeAlias = bool | int | float | str | os.PathLike[str] | Sequence[str] | None

LISTS = ("lora_targets",)  # options that may be lists of texts


def described(description: str) -> dict[str, tuple[str, str]]:
    """Defaults and meanings by name, of a description of options as JSON."""
    return {each["name"].replace("-", "_"): (each["default"], each["help"]) for each in json.loads(description)}


def given_options(name: str, options: Options | None, kind: type[Options]) -> dict[str, Any]:
    """Those that are not at their defaults."""
    if options is not None and not isinstance(options, kind):
        raise InputError(f"{name}: expected {kind.__name__}, received {type(options).__name__}")
    return {} if options is None else options.given()


def named_texts(options: Mapping[str, Option]) -> list[tuple[str, str]]:
    """Options as pairs of a flag's name and its text; those that are None are left out."""
    return [(name.replace("_", "-"), _text(name, value)) for name, value in options.items() if value is not None]


def _text(name: str, value: object) -> str:
    if isinstance(value, bool | np.bool_):
        return str(bool(value)).lower()
    if isinstance(value, float | np.floating):
        return repr(float(value))
    if isinstance(value, int | str | os.PathLike | np.integer):
        return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
    if name in LISTS and isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
        return ",".join(value)
    raise InputError(f"{name}: expected a number, a text or a boolean, received {type(value).__name__}")


def whole_number(value: Any, name: str = "indices", kind: str = "numbers of rows") -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InputError(f"{name}: expected {kind}, received {value!r}")
    return int(value.__index__())
