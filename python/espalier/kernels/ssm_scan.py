# SPDX-License-Identifier: Apache-2.0
"""ssm_scan by mamba_chunk_scan_combined of mamba_ssm (recurrences.py).

The library has gradients of final states for sequences of one length, a batch of which is one call. So the sequences of a wave
are filled up at their ends with tokens of step 0, which leave a state as it is: exp(0 A) = 1 and 0 B x = 0. Those of a wave
that differ much in length are several calls (`Waves.batches`).
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .recurrences import Counts, Library, Recurrence
from .waves import CHUNK, Batch, Wave, Waves, joined

LIBRARY = Library("ssm_scan", "Mamba-2", "mamba-ssm", ("2.3",), (torch.bfloat16,),  # products of float32 are in TF32
                  "pip install --no-build-isolation mamba-ssm")  # fmt: skip
_LONG_CHUNK = 256  # of sequences that are longer than CHUNK: fewer states are written
_MOST_NUMBERS = 2**31 - 1  # of a tensor of a call, which its kernels count in 32 bits
_WANTED_NUMBERS = 2**28  # of a tensor of a call of several sequences: a gibibyte in float32
_MOST_BLOCKS = 65535  # chunks of a call: blocks along the second axis of a grid


@functools.cache
def _mamba() -> Any:
    import mamba_ssm.ops.triton.ssd_combined as library

    return library


def _chunk_of(longest: int) -> int:
    return CHUNK if longest <= CHUNK else _LONG_CHUNK


@dataclass(frozen=True)
class SsmScan(Recurrence):
    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    prev: Tensor
    states: Tensor | None
    ends: Tensor
    chunk_size: int = 64

    library = LIBRARY

    def inputs(self) -> list[Tensor | None]:
        return [self.x, self.dt, self.A, self.B, self.C, self.D, self.states]

    def state_shape(self) -> tuple[int, int, int]:
        return self.x.shape[1], self.B.shape[2], self.x.shape[2]

    def fits(self) -> bool:
        x, b = self.x, self.B
        if x.dim() != 3 or b.dim() != 3 or 0 in (x.numel(), b.numel()) or len(b) != len(x) or x.shape[1] % b.shape[1]:
            return False
        sums = torch.promote_types(x.dtype, torch.float32)
        heads = x.shape[1:2]
        given: list[tuple[Tensor, torch.dtype, tuple[int, ...]]] = [
            (b, x.dtype, b.shape), (self.C, x.dtype, b.shape), (self.dt, sums, x.shape[:2]), (self.A, sums, heads)]  # fmt: skip
        if self.D is not None:
            given.append((self.D, sums, heads))
        if self.states is not None:
            given.append((self.states, sums, (len(self.states), *self.state_shape())))
        return all(each.dtype == dtype and each.shape == shape and each.device == x.device for each, dtype, shape in given)

    def is_served(self, waves: Waves) -> bool:
        longest = max(batch.longest for wave in waves.batches for batch in wave)
        return self._numbers_of(longest) <= _MOST_NUMBERS and -(-longest // _chunk_of(longest)) <= _MOST_BLOCKS

    def _numbers_of(self, longest: int) -> int:
        """Numbers of the largest tensor of a call with one sequence of so many tokens."""
        heads, state, dim = self.state_shape()
        chunk, groups = _chunk_of(longest), self.B.shape[1]
        chunks = -(-longest // chunk)
        token_elements = max(heads * dim, groups * state)
        return max(longest * token_elements, chunks * heads * state * dim, chunks * chunk * max(heads, groups * chunk))

    def _sequences_of(self, batch: Batch) -> int:
        """How many sequences of a batch are one call."""
        chunks = -(-batch.longest // _chunk_of(batch.longest))
        return max(1, min(_WANTED_NUMBERS // self._numbers_of(batch.longest), _MOST_BLOCKS // chunks))

    def counts(self, waves: Waves) -> Counts:
        batches = [batch for wave in waves.batches for batch in wave]
        calls = sum(-(-batch.sequences // self._sequences_of(batch)) for batch in batches)
        tokens = sum(batch.sequences * -(-batch.longest // CHUNK) * CHUNK for batch in batches)
        return Counts(calls, tokens, waves.num_levels, len(self.x))

    def scan(self, waves: Waves, inputs: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        x, dt, a, b, c, d, states = inputs
        assert x is not None and dt is not None and a is not None and b is not None and c is not None
        heads, state, dim = self.state_shape()
        out, ends = waves.scan([x, b, c, dt], None if states is None else states.transpose(2, 3), (heads, dim, state),
                               functools.partial(self._step, waves, a, d))  # fmt: skip
        return out, ends.transpose(2, 3)

    def _step(self, waves: Waves, a: Tensor, d: Tensor | None, wave: Wave, rows: Sequence[Tensor],
              initial: Tensor | None) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        outs, finals = [], list[Tensor]()
        for batch in waves.batches[wave.number]:
            most, in_batch = self._sequences_of(batch), []
            filled = [batch.filled(each) for each in rows]
            for first in range(0, batch.sequences, most):
                last = min(first + most, batch.sequences)
                x, b, c, dt = (each[first:last] for each in filled)
                states = None if initial is None else initial[batch.first + first:batch.first + last]
                found = _mamba().mamba_chunk_scan_combined(x, dt, a, b, c, _chunk_of(batch.longest), D=d, initial_states=states,
                                                           return_final_states=wave.is_continued)  # fmt: skip
                in_batch.append(found[0] if wave.is_continued else found)
                finals += [found[1]] if wave.is_continued else []
            outs.append(batch.emptied(joined(in_batch)))
        return joined(outs), joined(finals) if finals else None
