# SPDX-License-Identifier: Apache-2.0
"""What the classes of `espalier.options` have in common."""

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any, Self

from .errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options by name, frozen. Values are checked where they are used, by the engine, with the messages of the commands.

    Lists are kept as tuples and paths as texts, so that options are equal to what JSON gives back.
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):
                object.__setattr__(self, field.name, tuple(value))
            elif isinstance(value, os.PathLike):
                object.__setattr__(self, field.name, os.fspath(value))

    def replace(self, **changes: Any) -> Self:
        """A copy in which some options have other values.

        Args:
            **changes: Options by name.

        Returns:
            The copy.

        Raises:
            InputError: There is no such option.

        Examples:
            >>> from espalier import SamplingParams
            >>> SamplingParams(samples=4).replace(temperature=0.7).samples
            4
        """
        self._check_names(changes)
        return dataclasses.replace(self, **changes)

    def to_json(self) -> str:
        """All options as one JSON object with a line for each.

        Returns:
            The text, for `from_json`.

        Examples:
            >>> from espalier import SamplingParams
            >>> SamplingParams.from_json(SamplingParams(samples=4).to_json()).samples
            4
        """
        return json.dumps({field.name: getattr(self, field.name) for field in dataclasses.fields(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Options from a JSON object; those that it does not name have their defaults.

        Args:
            text: What `to_json` gave, or an object with some of the options.

        Returns:
            The options.

        Raises:
            InputError: The text is not a JSON object, or names an option that does not exist.

        Examples:
            >>> from espalier import EngineConfig
            >>> EngineConfig.from_json('{"learning_rate": 1e-4}').learning_rate
            0.0001
        """
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(f"{cls.__name__}: expected a JSON object, received text that is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise InputError(f"{cls.__name__}: expected a JSON object, received {json.dumps(found)[:80]}")
        cls._check_names(found)
        return cls(**found)

    def given(self) -> dict[str, Any]:
        """The options whose values are not their defaults.

        Returns:
            A dict by name.

        Examples:
            >>> from espalier import SamplingParams
            >>> SamplingParams(samples=4, temperature=1.0).given()
            {'samples': 4}
        """
        return {field.name: value for field in dataclasses.fields(self)
                if (value := getattr(self, field.name)) != field.default}  # fmt: skip

    @classmethod
    def _check_names(cls, given: Mapping[str, Any]) -> None:
        names = [field.name for field in dataclasses.fields(cls)]
        for name in given:
            if name not in names:
                raise InputError(f"{cls.__name__}: expected only {', '.join(names)}, received {name}")
