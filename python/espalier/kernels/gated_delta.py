# SPDX-License-Identifier: Apache-2.0
"""gated_delta_rule by chunk_gated_delta_rule of flash-linear-attention (recurrences.py)."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .recurrences import EXTRA, Counts, Library, Recurrence
from .waves import Wave, Waves

LIBRARY = Library("gated_delta_rule", "gated delta rules", "flash-linear-attention", ("0.6",), (torch.bfloat16, torch.float32),
                  EXTRA)  # fmt: skip
_MOST_KEY_DIM = 256  # of the library's kernels


@functools.cache
def _fla() -> Any:
    import fla.ops.gated_delta_rule as library

    return library


@dataclass(frozen=True)
class GatedDeltaRule(Recurrence):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    prev: Tensor
    states: Tensor | None
    ends: Tensor
    chunk_size: int = 64

    library = LIBRARY

    def inputs(self) -> list[Tensor | None]:
        return [self.q, self.k, self.v, self.g, self.beta, self.states]

    def state_shape(self) -> tuple[int, int, int]:
        return self.v.shape[1], self.q.shape[2], self.v.shape[2]

    def fits(self) -> bool:
        q, k, v, states = self.q, self.k, self.v, self.states
        if q.dim() != 3 or k.shape != q.shape or v.dim() != 3 or 0 in (q.numel(), v.numel()) or v.shape[1] % q.shape[1]:
            return False
        sums = torch.promote_types(q.dtype, torch.float32)
        same = all(each.shape == v.shape[:2] and each.dtype == sums for each in (self.g, self.beta)) and len(v) == len(q)
        same &= k.dtype == v.dtype == q.dtype and {each.device for each in (k, v, self.g, self.beta)} == {q.device}
        if states is not None:
            same &= states.shape[1:] == self.state_shape() and states.dtype == sums and states.device == q.device
        return same

    def is_served(self, _waves: Waves) -> bool:
        return self.q.shape[2] <= _MOST_KEY_DIM

    def counts(self, waves: Waves) -> Counts:
        return Counts(len(waves.waves), len(self.q), waves.num_levels, len(self.q))

    def scan(self, waves: Waves, inputs: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        *rows, states = inputs
        return waves.scan([each for each in rows if each is not None], states, self.state_shape(), _step)


def _step(wave: Wave, rows: Sequence[Tensor], initial: Tensor | None) -> tuple[Tensor, Tensor | None]:
    q, k, v, g, beta = (each.unsqueeze(0) for each in rows)
    out, final = _fla().chunk_gated_delta_rule(
        q, k, v, g, beta, initial_state=initial, output_final_state=wave.is_continued, use_qk_l2norm_in_kernel=True,
        cu_seqlens=wave.cu_seqlens, cu_seqlens_cpu=wave.cu_seqlens_cpu)  # fmt: skip
    return out.squeeze(0), final
