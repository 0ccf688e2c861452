# SPDX-License-Identifier: Apache-2.0
"""Stop strings: where completions end with the token that completes one."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BYTES = 8  # tokens that a character and what stands before it may take: then it is no text of UTF-8


@dataclass
class _Text:
    """The end of the text of a completion, and the tokens of which its last characters are."""

    tail: str = ""
    context: list[int] = field(default_factory=list)  # tokens whose text is in the tail
    new: list[int] = field(default_factory=list)      # tokens whose text may change with the next one

    def add(self, token: int, tokenizer: Any) -> str:
        """The tail with the text of a new token. Decodes few tokens, however long the completion is."""
        self.new.append(token)
        known = tokenizer.decode(self.context) if self.context else ""
        text: str = self.tail + tokenizer.decode(self.context + self.new)[len(known) :]
        if not text.endswith("\N{REPLACEMENT CHARACTER}") or len(self.new) >= _BYTES:
            self.tail, self.context, self.new = text, self.new, []
        return text


class StopTexts:
    """Finds the tokens with which the texts of completions have stop strings: a `watch` of Engine.sample. The work for a token
    depends on the stop strings of its prompt alone."""

    def __init__(self, tokenizer: Callable[[], Any]) -> None:
        self._tokenizer = tokenizer
        self._stops: dict[int, list[str]] = {}  # by prompt
        self._texts: dict[int, dict[int, _Text]] = {}  # by prompt and sample

    def add(self, prompt: int, stops: list[str]) -> None:
        """Stop strings of a prompt."""
        self._stops[prompt], self._texts[prompt] = stops, {}

    def forget(self, prompt: int) -> None:
        self._stops.pop(prompt, None)
        self._texts.pop(prompt, None)

    def __call__(self, new: NDArray[np.int64]) -> list[bool]:
        return [prompt in self._stops and self._has_stop(prompt, sample, token) for prompt, sample, token in new.tolist()]

    def _has_stop(self, prompt: int, sample: int, token: int) -> bool:
        stops = self._stops[prompt]
        text = self._texts[prompt].setdefault(sample, _Text())
        found = text.add(token, self._tokenizer())
        text.tail = text.tail[-max(map(len, stops)) :]
        return any(stop in found for stop in stops)
