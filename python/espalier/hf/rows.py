# SPDX-License-Identifier: Apache-2.0
"""The token rows of a batch as trainers make them: padded, left or right, or packed."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import Unsupported

INPUTS = ("input_ids", "attention_mask", "position_ids")
BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")  # of packed rows, for kernels; position_ids say the same


@dataclass(frozen=True)
class Rows:
    """R rows with N tokens, in the order in which they stand in a batch [B, S]."""

    offsets: NDArray[np.int64]  # [R + 1] int64
    tokens: NDArray[np.int32]  # [N] int32
    places: NDArray[np.int64]  # [N] int64: where each token stands among the B * S of the batch


def read_rows(input_ids: NDArray[Any], attention_mask: NDArray[Any] | None = None,
              position_ids: NDArray[Any] | None = None) -> Rows:  # fmt: skip
    """The rows of input_ids [B, S].

    attention_mask  [B, S] of ones where tokens are and zeros where padding is, before or after them; without it all are
                    tokens.
    position_ids    [B, S] or [1, S]: a row begins wherever they do not count up by one, as in Transformers; there they
                    are 0, or the column, as where a padded row begins.

    Arrays of integers. Raises Unsupported where the batch has another form."""
    if input_ids.ndim != 2:
        raise Unsupported(f"input_ids: expected [B, S], received shape {list(input_ids.shape)}")
    real = _real_tokens(attention_mask, input_ids.shape)
    begins = _beginnings(real, position_ids, attention_mask is not None)
    places = np.flatnonzero(real)
    tokens = input_ids.reshape(-1)[places]
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < 2**31:
        raise Unsupported(f"input_ids: expected ids from 0 to 2^31 - 1, received {tokens.min()} to {tokens.max()}")
    offsets = np.append(np.flatnonzero(begins.reshape(-1)[places]), len(places)).astype(np.int64)
    return Rows(offsets, tokens.astype(np.int32), places)


def check_boundaries(name: str, given: NDArray[Any], rows: Rows) -> None:
    """Raises Unsupported unless `given` tells of the boundaries of packed `rows`: as cumulated lengths [R + 1] from 0,
    or, for seq_idx, as a number [B, S] for each token that changes from row to row."""
    if name == "seq_idx":
        given = given.reshape(-1)[rows.places] if given.size > rows.places[-1] else given.reshape(-1)
        given = np.concatenate([[0], 1 + np.flatnonzero(np.diff(given)), [len(given)]])
    if not np.array_equal(given, rows.offsets):
        raise Unsupported(f"{name}: expected the boundaries of the rows that position_ids tell of, "
                          f"{_shortened(rows.offsets)}; received {_shortened(given)}")  # fmt: skip


def _shortened(numbers: Iterable[Any]) -> str:
    texts = [str(number) for number in numbers]
    return ", ".join(texts if len(texts) <= 8 else [*texts[:4], "...", texts[-1]])


def _real_tokens(mask: NDArray[Any] | None, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    if mask is None:
        return np.ones(shape, bool)
    if mask.shape != shape:
        raise Unsupported(f"attention_mask: expected {list(shape)} as input_ids, received shape {list(mask.shape)}; "
                          "masks with four dimensions are not served: rows say what sees what")  # fmt: skip
    real: NDArray[np.bool_] = mask == 1
    if not (real | (mask == 0)).all():
        raise Unsupported(f"attention_mask: expected ones and zeros, received values up to {mask.max()}; say where "
                          "packed rows begin by position_ids, without an attention_mask")  # fmt: skip
    runs = real[:, 0] + (real[:, 1:] & ~real[:, :-1]).sum(1)
    if (runs > 1).any():
        raise Unsupported("attention_mask: expected padding before and after the tokens of a row only, received "
                          f"padding between tokens in row {int(np.flatnonzero(runs > 1)[0])}")  # fmt: skip
    return real


def _beginnings(real: NDArray[np.bool_], positions: NDArray[Any] | None, is_masked: bool) -> NDArray[np.bool_]:
    """Which tokens begin a row, [B, S]."""
    follows = np.zeros(real.shape, bool)
    follows[:, 1:] = real[:, 1:] & real[:, :-1]
    if positions is None:
        return real & ~follows
    if positions.ndim != 2 or positions.shape[1] != real.shape[1] or positions.shape[0] not in (1, real.shape[0]):
        raise Unsupported(f"position_ids: expected {list(real.shape)} as input_ids, received shape "
                          f"{list(positions.shape)}")  # fmt: skip
    positions = np.broadcast_to(positions, real.shape)
    begins = real & ~follows
    follows[:, 1:] &= np.diff(positions, axis=1) == 1
    restarts = real & ~follows
    if is_masked and (restarts & ~begins).any():
        raise Unsupported("position_ids: expected no row to begin inside another where there is an attention_mask, "
                          "by which it sees the other; leave attention_mask out where rows are packed")  # fmt: skip
    first = positions[restarts]
    odd = (first != 0) & (first != np.nonzero(restarts)[1])
    if odd.any():
        raise Unsupported("position_ids: expected rows that begin at position 0, received one that begins at "
                          f"{first[odd][0]}")  # fmt: skip
    return restarts
