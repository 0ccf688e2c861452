# SPDX-License-Identifier: Apache-2.0
"""What a recurrent layer computes along the paths of a forest."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Recurrence:
    """Its states go on as S' = A S + B: a product of matrices, or of numbers where A has one for each head.

    call          (tokens, prev, states, ends) -> (out [N, ...], end states [E, ...] or None without ends), for some of the
                  tokens (None: for all), as the recurrences in espalier.ops
    factors       (tokens, prev, ends) -> [E, ...]: A from the beginnings of paths where prev is -2 to the ends; zero from
                  others
    like          [0, ...]: of the shape and dtype of states
    like_factors  [0, ...]: of those of A
    """

    call: Callable[[Tensor | None, Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor | None]]
    factors: Callable[[Tensor, Tensor, Tensor], Tensor]
    like: Tensor
    like_factors: Tensor

    def moved(self, factors: Tensor, states: Tensor) -> Tensor:
        """A S."""
        return factors * states if factors.shape[-1] == 1 else factors @ states
