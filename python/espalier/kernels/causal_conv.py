# SPDX-License-Identifier: Apache-2.0
"""causal_conv1d by causal_conv1d_fn of causal-conv1d.

One call has the runs of tokens of which each follows the one before, each run with copies of what it sees of its path in front,
and keeps them apart by `seq_idx`. Importing espalier.ops registers it for CUDA devices where it is installed. What it does not
serve, the composed form computes.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .recurrences import Library, are_paths, composed, finding_of, implemented, named_form, recording
from .waves import kept_of

LIBRARY = Library("causal_conv1d", "convolutions", "causal-conv1d", ("1.6", "1.7"), (torch.bfloat16, torch.float32),
                  "pip install --no-build-isolation causal-conv1d")  # fmt: skip
_NO_ENDS = torch.empty(0, dtype=torch.int64, device="cpu")


@functools.cache
def _library() -> Any:
    import causal_conv1d as library

    return library


class Runs(NamedTuple):
    """The rows of a call, of which those of tails come first and then the tokens; tensors on the device.

    sequence        [1, B] int32: the run of each row
    row             [B] int64, None where the rows are the tokens
    own             [T] int64: places of the tokens
    copied, copy    places of the other rows [M] int64, and their numbers in `origin`
    origin          [U] int64: the rows that have copies, each once"""

    sequence: Tensor
    row: Tensor | None
    own: Tensor
    copied: Tensor
    copy: Tensor
    origin: Tensor

    @classmethod
    def of(cls, prev: NDArray[np.int64], num_tails: int, taps: int, device: torch.device) -> "Runs":
        numbers, history = np.arange(len(prev)), taps - 1
        first = num_tails * history  # token
        starts = np.flatnonzero((prev != numbers - 1) | (numbers == 0))
        above, row = [], first + starts
        for _ in range(history):
            row = _row_before(row, prev, first, history)
            above.append(row)
        seen = np.stack(above)  # [W - 1, runs], -1 for none
        counts = (seen >= 0).sum(0)
        lengths = np.diff(starts, append=len(prev))
        own = numbers + np.repeat(np.cumsum(counts), lengths)
        step, run = np.nonzero(seen >= 0)
        copied = own[starts[run]] - 1 - step
        rows = np.empty(len(prev) + len(copied), np.int64)
        rows[own], rows[copied] = first + numbers, seen[step, run]
        origin, copy = np.unique(seen[step, run], return_inverse=True)
        sequence = np.repeat(np.arange(len(starts), dtype=np.int32), lengths + counts)
        tensors = [torch.from_numpy(each).to(device) for each in (sequence[None], rows, own, copied, copy, origin)]
        return cls(tensors[0], tensors[1] if len(copied) else None, *tensors[2:])


def _row_before(row: NDArray[np.int64], prev: NDArray[np.int64], first: int, history: int) -> NDArray[np.int64]:
    """The rows before rows on their paths, -1 for none."""
    token = prev[np.maximum(row - first, 0)]
    token_row = np.where(token >= 0, first + token, np.where(token == -1, -1, (-1 - token) * history - 1))
    tail_row = np.where(row % history == 0, -1, row - 1)
    return np.where(row < 0, -1, np.where(row < first, tail_row, token_row))


@dataclass(frozen=True)
class CausalConv1d:
    """The arguments of the operator."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    prev: Tensor
    tails: Tensor | None
    silu: bool

    def fits(self) -> bool:
        """Whether the operator takes these arguments; the composed form says what is wrong with others."""
        x, weight, tails = self.x, self.weight, self.tails
        if x.dim() != 2 or weight.dim() != 2 or weight.shape[0] != x.shape[1] or not x.numel():
            return False
        same = weight.dtype in (x.dtype, torch.promote_types(x.dtype, torch.float32)) and weight.device == x.device
        if self.bias is not None:
            same &= self.bias.shape == x.shape[1:] and self.bias.dtype == weight.dtype and self.bias.device == x.device
        if tails is not None:
            same &= tails.shape[1:] == (weight.shape[1] - 1, x.shape[1]) and tails.dtype == x.dtype and tails.device == x.device
        return same and are_paths(self.prev, _NO_ENDS, len(x), 0 if tails is None else len(tails))

    def is_served(self) -> bool:
        return 2 <= self.weight.shape[1] <= 4 and self.x.shape[1] % 8 == 0

    def runs(self) -> Runs:
        taps, device, tails = self.weight.shape[1], self.x.device, 0 if self.tails is None else len(self.tails)
        return kept_of(self.prev, (LIBRARY.operator, taps, tails, device),
                       lambda: Runs.of(self.prev.numpy().astype(np.int64), tails, taps, device))  # fmt: skip

    def rows(self, runs: Runs) -> Tensor:
        if runs.row is None:
            return _in_rows(self.x)
        every = self.x if self.tails is None else torch.cat([self.tails.flatten(0, 1), self.x])
        return every.index_select(0, runs.row)

    def convolved(self, rows: Tensor, weight: Tensor, bias: Tensor | None, runs: Runs) -> Tensor:
        out: Tensor = _library().causal_conv1d_fn(rows.t().unsqueeze(0), weight, bias, seq_idx=runs.sequence,
                                                  activation="silu" if self.silu else None)  # fmt: skip
        return out.squeeze(0).t()


def _in_rows(values: Tensor) -> Tensor:
    """Contiguous, with the strides of its shape even if that has one row."""
    return values.contiguous().flatten().view(values.shape)


def _is_taken(given: CausalConv1d, device: str) -> bool:
    if torch.are_deterministic_algorithms_enabled() or not given.fits() or not given.is_served():
        return False  # gradients of weights are summed by atomic additions
    if device != "CPU" and given.x.dtype not in LIBRARY.dtypes:
        return False
    if named := named_form():
        return named == "library"
    return given.x.device.type == "cuda" and finding_of(LIBRARY, given.x).is_right


def _forward(device: str, *arguments: Any) -> Tensor:
    """espalier::causal_conv1d."""
    given = CausalConv1d(*arguments)
    if not _is_taken(given, device):
        return composed(LIBRARY.operator, *arguments)
    with torch.no_grad():
        runs = given.runs()
        out = given.convolved(given.rows(runs), given.weight, given.bias, runs)
        return out.contiguous() if runs.row is None else out.index_select(0, runs.own)


def _backward(device: str, grad: Tensor, *arguments: Any) -> tuple[Tensor | None, ...]:
    """espalier::causal_conv1d_backward."""
    given = CausalConv1d(*arguments)
    if not _is_taken(given, device):
        return composed(f"{LIBRARY.operator}_backward", grad, *arguments)
    runs = given.runs()
    rows = given.rows(runs)
    if runs.row is not None:
        grad = rows.new_zeros(rows.shape).index_copy_(0, runs.own, grad)
    with recording():
        leaves = [each.detach().requires_grad_() for each in (rows, given.weight, given.bias) if each is not None]
        out = given.convolved(leaves[0], leaves[1], leaves[2] if len(leaves) > 2 else None, runs)
        row_grads, *others = torch.autograd.grad(out, leaves, _in_rows(grad))
    x, tails = _of_tokens_and_tails(row_grads.contiguous(), given, runs)
    return x, others[0], others[1] if len(others) > 1 else None, tails


def _of_tokens_and_tails(row_grads: Tensor, given: CausalConv1d, runs: Runs) -> tuple[Tensor, Tensor | None]:
    """The gradients of x and tails from those of the rows of a call. Copies are added up in sums' dtype: there may be many."""
    if runs.row is None:
        return row_grads, None if given.tails is None else torch.zeros_like(given.tails)
    sums = torch.promote_types(row_grads.dtype, torch.float32)
    first = 0 if given.tails is None else given.tails.shape[0] * given.tails.shape[1]
    found = row_grads.new_zeros((first + len(given.x), row_grads.shape[1]))
    torch.index_select(row_grads, 0, runs.own, out=found[first:])
    added = found.index_select(0, runs.origin).to(sums)
    added.index_add_(0, runs.copy, row_grads.index_select(0, runs.copied).to(sums))
    found.index_copy_(0, runs.origin, added.to(found.dtype))
    if given.tails is None:
        return found, None
    return found[first:].clone(), found[:first].clone().view_as(given.tails)


def register(device: str = "CUDA") -> torch.library.Library:
    """Lets the operator causal_conv1d find the functions above, on CUDA devices, or in tests on the "CPU", for as long as the
    result lives."""
    return implemented(LIBRARY.operator, functools.partial(_forward, device), functools.partial(_backward, device), device)
