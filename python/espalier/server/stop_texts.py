# SPDX-License-Identifier: Apache-2.0
"""Stop strings: where completions end with the token that completes one."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .texts import TextStream


class StopTexts:
    """Finds the tokens with which the texts of completions have stop strings: a `watch` of Engine.sample. The work for a token
    depends on the stop strings of its prompt alone."""

    def __init__(self, tokenizer: Callable[[], Any]) -> None:
        self._tokenizer = tokenizer
        self._stops: dict[int, list[str]] = {}  # by prompt
        self._texts: dict[int, dict[int, TextStream]] = {}  # by prompt and sample

    def add(self, prompt: int, stops: list[str]) -> None:
        """Stop strings of a prompt."""
        self._stops[prompt], self._texts[prompt] = stops, {}

    def forget(self, prompt: int) -> None:
        self._stops.pop(prompt, None)
        self._texts.pop(prompt, None)

    def __call__(self, new: NDArray[np.int64]) -> list[bool]:
        return [prompt in self._stops and self._has_stop(prompt, sample, token) for prompt, sample, token in new.tolist()]

    def _has_stop(self, prompt: int, sample: int, token: int) -> bool:
        texts = self._texts[prompt]
        if sample not in texts:
            texts[sample] = TextStream(self._tokenizer().decode, self._stops[prompt])
        texts[sample].add([token])
        return texts[sample].is_stopped
