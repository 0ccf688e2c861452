# SPDX-License-Identifier: Apache-2.0
"""What requests to samplers want beside tokens: log-probabilities of other tokens, at prompts and completions.

Each is made in slices, between which the engine works for others; its size is known, and bounded, before it begins.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import espalier

from . import schema
from .data import MAX_TARGETS, fits_csr
from .errors import Refused
from .requests import JsonTensor, Sample

MAX_SCORE_BYTES = 64 << 20  # of what a request wants beside tokens
SLICE_CELLS = 1 << 16       # targets of a slice, where it has more than one of each position


@dataclass(frozen=True)
class Score:
    """Log-probabilities that a request wants, of tokens whose ids it names or of the most likely ones."""

    message: Any
    tokens: NDArray[np.int32]
    begin: int = 0  # the first position
    k: int = 0
    targets: NDArray[np.int64] | None = None


def check_size(sample: Sample, prompt_tokens: int, max_tokens: int) -> None:
    """Raises Refused where a result would be too large."""
    targets = sample.target_prompt_logprobs
    cells = {
        "topk_prompt_logprobs": 8 * sample.topk_prompt_logprobs * prompt_tokens,
        "topk_sample_logprobs": 8 * sample.topk_sample_logprobs * max_tokens * sample.num_samples,
        "prompt_alt_tokens_k": 12 * sample.prompt_alt_tokens_k * (prompt_tokens - 1),
        "target_prompt_logprobs": 4 * math.prod(max(0, size) for size in targets.shape or []) if targets else 0}  # fmt: skip
    total = sum(cells.values())
    if total > MAX_SCORE_BYTES:
        largest = max(cells, key=lambda name: cells[name])
        raise Refused(f"{largest}: expected at most {MAX_SCORE_BYTES} bytes of log-probabilities beside those of the tokens, "
                      f"received a request for up to {total}")  # fmt: skip


def target_table(given: JsonTensor, prompt_tokens: int, vocab_size: int) -> NDArray[np.int64]:
    """The ids to score at each prompt position after the first, [prompt_tokens - 1, K]; -1: none. Raises Refused."""
    shape = given.shape or []
    if len(shape) != 2 or shape[0] != prompt_tokens - 1 or not 1 <= shape[1] <= MAX_TARGETS:
        raise Refused(f"target_prompt_logprobs: expected shape [{prompt_tokens - 1}, K], K from 1 to {MAX_TARGETS}, received "
                      f"{shape}")  # fmt: skip
    table = np.full(shape, -1, np.int64)
    values = np.asarray(given.data, np.int64)
    if given.sparse_crow_indices is not None:
        rows, columns = np.asarray(given.sparse_crow_indices), np.asarray(given.sparse_col_indices or [], np.int64)
        if not fits_csr(rows, columns, len(values), (shape[0], shape[1])):
            raise Refused("target_prompt_logprobs: expected a sparse matrix (CSR), received indices that do not fit its shape")
        table[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    elif len(values) == table.size:
        table = values.reshape(shape)
    else:
        raise Refused(f"target_prompt_logprobs: expected {table.size} ids, received {len(values)}")
    if table.max() >= vocab_size or table.min() < -1 or (table == -1).all():
        raise Refused(f"target_prompt_logprobs: expected ids below {vocab_size}, at least one of them, and -1 elsewhere")
    return table


def slices(engine: espalier.Engine, scores: list[Score], vocab_size: int) -> Iterator[None]:
    """Sets the messages of all scores, with what the engine has in use at each step. A step is one pass over one sequence."""
    for score in scores:
        if score.targets is None:
            _set_topk(engine, score, min(score.k, vocab_size))
            yield
            continue
        parts = []
        width = max(1, SLICE_CELLS // len(score.tokens))
        for begin in range(0, score.targets.shape[1], width):
            parts.append(_target_logprobs(engine, score.tokens, score.targets[:, begin : begin + width]))
            yield
        set_tensor(score.message, np.concatenate(parts, axis=1))


def _set_topk(engine: espalier.Engine, score: Score, k: int) -> None:
    """Of the positions from `begin` on. The first of a prompt, which nothing predicts, has -1 and nan."""
    found = engine.topk_logprobs([score.tokens], k)[0]
    ids, values = found.ids.astype("<i4"), found.values.astype("<f4")
    values[0] = np.nan
    message, begin = score.message, score.begin
    message.token_ids, message.logprobs = ids[begin:].tobytes(), values[begin:].tobytes()
    message.k, message.length = k, len(score.tokens) - begin


def _target_logprobs(engine: espalier.Engine, prompt: NDArray[np.int32], targets: NDArray[np.int64]) -> NDArray[np.float32]:
    """Of ids [N - 1, K] at positions 1 to N - 1; nan where the id is -1."""
    width = targets.shape[1]
    named = np.where(targets < 0, prompt[1:, None], targets)
    columns = [np.append(prompt[:1], column) for column in named.T]
    rows = espalier.trajectories({"offsets": np.arange(width + 1) * len(prompt), "input_ids": np.tile(prompt, width),
                                  "target_ids": np.concatenate(columns).astype(np.int32)})  # fmt: skip
    values = np.stack([row[1:] for row in engine.logprobs(rows)], axis=1)
    return np.where(targets < 0, np.nan, values).astype(np.float32)


def set_tensor(message: Any, values: NDArray[Any]) -> None:
    is_whole = values.dtype.kind == "i"
    message.dense = values.astype("<i8" if is_whole else "<f4").tobytes()
    message.dtype = schema.INT64 if is_whole else schema.FLOAT32
    message.shape.extend(values.shape)


class Draws:
    """K tokens after each prefix of a prompt. Prefixes are prompts that are sampled as all others are, few of them at a time."""

    AT_A_TIME = 32

    def __init__(self, sample: Sample, prompt: NDArray[np.int32], seed: int) -> None:
        k = sample.prompt_alt_tokens_k
        self.tokens = np.zeros((len(prompt) - 1, k), np.int64)
        self.logprobs = np.zeros((len(prompt) - 1, k), np.float32)
        self._prompt, self._seed, self._temperature, self._k = prompt, seed, sample.sampling_params.temperature, k
        self._next = 0
        self._left = self.tokens.size
        self._open: dict[int, tuple[int, int]] = {}  # place and draws to come, by number of the prompt

    @property
    def is_done(self) -> bool:
        return self._left == 0

    def more(self) -> "list[tuple[int, NDArray[np.int32], espalier.SamplingParams]]":
        """Prefixes to sample from now on, with their places. Each has its own random numbers."""
        found = []
        for place in range(self._next, min(len(self.tokens), self._next + self.AT_A_TIME - len(self._open))):
            seed = (self._seed + (place + 1) * 0x9E3779B97F4A7C15) & ((1 << 62) - 1)
            found.append((place, self._prompt[: place + 1], espalier.SamplingParams(
                samples=self._k, max_new_tokens=1, stop_ids=[], seed=seed, temperature=self._temperature)))  # fmt: skip
        self._next += len(found)
        return found

    def begin(self, number: int, place: int) -> None:
        """The number of the prompt of a prefix."""
        self._open[number] = (place, self._k)

    def add(self, drawn: espalier.Completion) -> bool:
        """One draw. Returns whether it was the last of its prefix."""
        place, left = self._open[drawn.prompt]
        self.tokens[place, drawn.sample], self.logprobs[place, drawn.sample] = drawn.tokens[0], drawn.logprobs[0]
        self._left -= 1
        if left > 1:
            self._open[drawn.prompt] = (place, left - 1)
            return False
        del self._open[drawn.prompt]
        return True

    @property
    def numbers(self) -> list[int]:
        """Prompts that are not done."""
        return list(self._open)
