# SPDX-License-Identifier: Apache-2.0
"""The rule by which results in low precision are judged (src/espalier/base/error_ratio.h): the error of ours against float64
may be at most twice that of the plain form in the same dtype."""

import math

MAX_RATIO = 2.0


def error_ratio(ours: float, plain: float, roundoff: float) -> float:
    """Our error over that of the plain form, both at least half of the unit `roundoff`. Infinite where either is not finite."""
    if not math.isfinite(ours + plain):
        return math.inf
    ours, plain = max(ours, roundoff / 2), max(plain, roundoff / 2)
    if ours == plain:
        return 1.0
    return ours / plain if plain else math.inf
