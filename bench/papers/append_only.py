# SPDX-License-Identifier: Apache-2.0
"""Append-only merging, the best that a careful trainer does without trees: rows that others extend are dropped, and their
loss terms move to a row that extends them.

What is exact. Terms of several rows on the same token and the same prefix become one, with the sum of the weights and the
weighted mean of the advantages. Their sum stays the same where a term is linear in weight and advantage:

- cross-entropy: always;
- `reinforce` and `cispo`: if `logprobs` and `ref_logprobs` are equal on the token;
- PPO's clipping (`ppo`, `grpo`, `dapo`): if, besides, no advantage is above zero while another is below it, because
  min(r A, clip(r) A) is A times another function of r for either sign.

A row of which some term fails this stays where it is, so merging never changes a loss; `merge` counts such rows. Losses that
depend on which row a term is in are beyond merging: GSPO, preference pairs, means over the tokens of each row. Advantages have
to be there before, because the rewards of a group are those of all rows. Trees need none of this: each row keeps its terms.
"""

from dataclasses import dataclass

import numpy as np

import espalier

TERM_FIELDS = ("logprobs", "ref_logprobs")


@dataclass
class Merged:
    rows: list  # with loss_weights, and advantages where the rows have some
    dropped: int  # rows that others extend, or that are there twice
    conflicts: int  # rows that others extend but whose terms do not go together with theirs


class Terms:
    """The loss terms of a row, by token."""

    def __init__(self, row):
        self.row = row
        size = len(row["input_ids"])
        self.weights = np.array(row.get("loss_weights", row.get("loss_mask", [1] * size)), dtype=float)
        self.advantages = None
        if "advantages" in row or "advantage" in row:
            self.advantages = np.array(row.get("advantages", [row.get("advantage")] * size), dtype=float)
        self.fields = {name: list(row[name]) for name in TERM_FIELDS if name in row}
        if self.weights[:1].any():
            self.weights[0] = 0  # nothing predicts the first token

    def clash(self, other, linear):
        """Whether terms of `other`, a prefix of this row, cannot be added here. linear: in the advantage, whatever its sign."""
        size = len(other.weights)
        both = (self.weights[:size] > 0) & (other.weights > 0)
        if (self.advantages is None) != (other.advantages is None):
            return True
        if not linear and self.advantages is not None and np.any(both & (self.advantages[:size] * other.advantages < 0)):
            return True
        trained = np.flatnonzero(both)
        return any(name not in self.fields or name not in other.fields
                   or any(self.fields[name][t] != other.fields[name][t] for t in trained)
                   for name in self.fields.keys() | other.fields.keys())  # fmt: skip

    def add(self, other):
        size = len(other.weights)
        weights = self.weights[:size] + other.weights
        if self.advantages is not None:
            sums = self.advantages[:size] * self.weights[:size] + other.advantages * other.weights
            self.advantages[:size] = np.divide(sums, weights, out=self.advantages[:size].copy(), where=weights > 0)
        for name, values in self.fields.items():
            for t in np.flatnonzero(other.weights > 0):
                values[t] = other.fields[name][t]
        self.weights[:size] = weights

    def as_row(self):
        row = {name: value for name, value in self.row.items() if name not in ("loss_mask", "advantage")}
        row |= {"loss_weights": self.weights.tolist(), **self.fields}
        if self.advantages is not None:
            row["advantages"] = self.advantages.tolist()
        return row


def merge(rows, linear=False):
    """Rows of which none extends another, but for those with conflicts. linear: the objective is linear in advantages."""
    forest = espalier.build(rows)
    node = forest.end_node
    terms = [Terms(row) for row in rows]
    kept, conflicts = [], 0
    # Longest first: whatever extends a row has been decided on before.
    for number in sorted(range(len(rows)), key=lambda row: (-len(rows[row]["input_ids"]), row)):
        longer = [other for other in kept if node[number] <= node[other] < forest.subtree_last[node[number]]]
        free = next((other for other in longer if not terms[other].clash(terms[number], linear)), None)
        if free is not None:
            terms[free].add(terms[number])
            continue
        conflicts += bool(longer)
        kept.append(number)
    return Merged([terms[number].as_row() for number in sorted(kept)], len(rows) - len(kept), conflicts)
