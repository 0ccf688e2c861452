# SPDX-License-Identifier: Apache-2.0
"""What a step on several ranks took, beside what was predicted."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """A step on several ranks; every rank has the same one. `print` it.

    Attributes:
        flat_tokens: Of all ranks; None where the step was not told its share.
        encoded_tokens: Likewise.
        predicted_imbalance: Seconds of the slowest rank over the mean, less 1; None as above.
        seconds: Measured, by rank: from the beginning of its work to its end, without waiting for other ranks; None where
            waiting and work cannot be told apart (mode "zero3", but for steps that are watched, and meshes with the dimension
            cp).
        micro_batches: By rank; None where the step was not told.
        dummies: By rank: micro-batches without weight that it ran beside its own.
        parts_imbalance: On a mesh with the dimension cp: predicted seconds of the slowest parts over the mean, less 1, of the
            ranks with the same rows that differ most. None otherwise.
        sent_bytes: Likewise, by rank: keys, values, states and gradients that it has sent to other ranks.

    Examples:
        >>> import espalier
        >>> print(espalier.distributed.Report(8, 5, 0.02, (1.0, 1.2), (2, 1), (0, 0)))
        2 ranks, 5 of 8 tokens encoded (1.60x)
        predicted: the slowest rank is 2.0% over the mean
        measured: the slowest rank is 9.1% over the mean
        micro-batches by rank: 2, 1
    """

    flat_tokens: int | None
    encoded_tokens: int | None
    predicted_imbalance: float | None
    seconds: tuple[float, ...] | None
    micro_batches: tuple[int, ...] | None
    dummies: tuple[int, ...]
    parts_imbalance: float | None = None
    sent_bytes: tuple[int, ...] | None = None

    @property
    def measured_imbalance(self) -> float | None:
        """Seconds of the slowest rank over the mean, less 1; None where they were not measured."""
        return imbalance_of(self.seconds) if self.seconds else None

    def __str__(self) -> str:
        lines = [f"{len(self.dummies)} {'rank' if len(self.dummies) == 1 else 'ranks'}"]
        if self.flat_tokens and self.encoded_tokens is not None:
            ratio = self.flat_tokens / max(self.encoded_tokens, 1)
            lines[0] += f", {self.encoded_tokens:,} of {self.flat_tokens:,} tokens encoded ({ratio:.2f}x)"
        for name, value in ("predicted", self.predicted_imbalance), ("measured", self.measured_imbalance):
            if value is not None:
                lines.append(f"{name}: the slowest rank is {value:.1%} over the mean")
        if self.parts_imbalance is not None and self.sent_bytes is not None:
            lines.append(f"parts of micro-batches: the slowest is {self.parts_imbalance:.1%} over the mean; ranks have sent "
                         f"{sum(self.sent_bytes):,} bytes to others")  # fmt: skip
        if self.micro_batches:
            dummies = f", and {sum(self.dummies)} without weight" if sum(self.dummies) else ""
            lines.append(f"micro-batches by rank: {', '.join(map(str, self.micro_batches))}{dummies}")
        return "\n".join(lines)


def imbalance_of(values: Sequence[float]) -> float:
    """The largest of `values` over their mean, less 1."""
    mean = sum(values) / len(values)
    return max(values) / mean - 1 if mean else 0.0
