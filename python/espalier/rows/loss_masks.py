# SPDX-License-Identifier: Apache-2.0
"""Converts loss masks and weights in the forms that users have to one array."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from .sequences import listed


def flat_loss_mask(loss_mask: Any, offsets: NDArray[np.int64]) -> NDArray[Any]:
    """Weights [N] >= 0, 0 for tokens without loss, from one array [N] of all rows or one array per row.

    offsets  int64 [R + 1] of the rows. Raises InputError if the mask does not match them, and for negative numbers."""
    if getattr(loss_mask, "ndim", 0) == 1:
        values = np.asarray(loss_mask)
    else:
        rows = [np.asarray(row) for row in listed(loss_mask)]
        if len(rows) != len(offsets) - 1:
            raise InputError(f"loss_mask: expected {len(offsets) - 1} rows, received {len(rows)}")
        for number, (row, length) in enumerate(zip(rows, np.diff(offsets))):
            if row.shape != (length,):
                raise InputError(f"loss_mask: expected {length} entries in row {number} (one for each token), received "
                                 f"shape {list(row.shape)}")  # fmt: skip
        values = np.concatenate(rows) if rows else np.zeros(0)
    if len(values) != offsets[-1]:
        raise InputError(f"loss_mask: expected {offsets[-1]} entries (one for each token), received {len(values)}")
    if values.dtype.kind not in "biuf" or not np.isfinite(values).all():
        raise InputError(f"loss_mask: expected finite numbers, received {values.dtype}")
    if len(values) and values.min() < 0:
        place = int(np.flatnonzero(values < 0)[0])
        at = int(np.searchsorted(offsets, place, side="right")) - 1
        hint = "; for labels, pass labels != -100" if values[place] == -100 else ""
        raise InputError(f"loss_mask: expected weights >= 0, received {values[place]:g} for token {place - offsets[at]} "
                         f"of row {at}{hint}")  # fmt: skip
    return values


def term_weights(loss_mask: Any, offsets: NDArray[np.int64]) -> NDArray[np.float64]:
    """The weights [N] of tokens as terms of a loss: those of flat_loss_mask, or 1 where `loss_mask` is None. First tokens, which
    nothing predicts, have 0."""
    weights = np.ones(offsets[-1]) if loss_mask is None else flat_loss_mask(loss_mask, offsets).astype(np.float64)
    weights[offsets[:-1]] = 0
    return weights
