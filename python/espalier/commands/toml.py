# SPDX-License-Identifier: Apache-2.0
"""TOML files of commands. Faults are named by file and line."""

import json
import math
import os
import re
import tomllib
from typing import Any

from ..errors import InputError


class TomlFile:
    """A file that a flag names.

    Attributes:
        name: The file.
        values: What it has.

    Raises:
        InputError: It cannot be read, or is not TOML.
    """

    def __init__(self, flag: str, name: str) -> None:
        self.name = os.fsencode(name).decode(errors="replace")  # as messages and JSON show it
        try:
            with open(name, "rb") as file:
                self._text = file.read().decode()
            self.values: dict[str, Any] = tomllib.loads(self._text)
        except OSError as error:
            raise InputError(f"{flag}: cannot open {self.name}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise InputError(f"{self.name}: expected UTF-8, received the byte {error.object[error.start]:#04x}") from None
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise InputError(f"{self._place_in(str(error))}") from None

    def _place_in(self, message: str) -> str:
        """"FILE:LINE: message" of a message of tomllib."""
        place = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)", message)
        if place is None:
            return f"{self.name}: {message}"
        line = place[1] or self._text.count("\n") + 1
        return f"{self.name}:{line}: {message.replace(place[0], '')}"

    def place(self, *path: str | int) -> str:
        """"FILE:LINE" of the statement that sets this key: its last line."""
        lines = self._text.splitlines(keepends=True)
        for number in range(1, len(lines) + 1):
            try:
                value: Any = tomllib.loads("".join(lines[:number]))
                for key in path:
                    value = value[key]
            except (tomllib.TOMLDecodeError, LookupError, TypeError):
                continue
            return f"{self.name}:{number}"
        return self.name

    def headers(self, name: str) -> list[str]:
        """"FILE:LINE" of each table [[name]]; the file alone where text in the file looks like one."""
        lines = [number for number, line in enumerate(self._text.splitlines(), start=1)
                 if re.match(rf"\s*\[\[\s*{re.escape(name)}\s*\]\]", line)]  # fmt: skip
        tables = self.values.get(name, [])
        return [f"{self.name}:{number}" for number in lines] if len(lines) == len(tables) else [self.name] * len(tables)

    def check_value(self, value: object, *path: str | int) -> None:
        """Raises InputError unless it is text, a finite number, true, false or a list of these."""
        parts = value if isinstance(value, list) else [value]
        if any(isinstance(part, float) and not math.isfinite(part) for part in parts):
            raise InputError(f"{self.place(*path)}: key `{path[-1]}`: expected a finite number, received {value}")
        if not all(isinstance(part, str | int | float) for part in parts):
            raise InputError(f"{self.place(*path)}: key `{path[-1]}`: expected text, a number, true, false or a list")


def read_tables(flag: str, file: str, name: str) -> str:
    """The tables [[name]] of a file as JSON: [{"where": "FILE:LINE", "values": {...}}].

    Args:
        flag: That names the file.
        file: The file.
        name: Of the tables.

    Raises:
        InputError: The file has other keys, no such table, or values of other types.
    """
    toml = TomlFile(flag, file)
    for key, value in toml.values.items():
        if key != name or not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            raise InputError(f"{toml.place(key)}: unknown key `{key}`: expected tables [[{name}]]")
    tables = []
    for where, (number, values) in zip(toml.headers(name), enumerate(toml.values.get(name, [])), strict=True):
        for key, value in values.items():
            toml.check_value(value, name, number, key)
        tables.append({"where": where, "values": values})
    if not tables:
        raise InputError(f"{toml.name}: expected tables [[{name}]], received none")
    return json.dumps(tables)
