# SPDX-License-Identifier: Apache-2.0
"""Counts of records and rows of a command, and its bad records."""

from dataclasses import dataclass, field

from ..commands.console import clipped, count_of
from ..errors import InputError
from .fields import Tally

MOST_NAMES = 40


@dataclass
class BadRecords:
    """Records that could not be used, and the first errors."""

    bad_records: int = 0
    first_errors: list[str] = field(default_factory=list)

    def bad(self, message, skip):
        """Raises InputError for a bad record, or counts it."""
        if not skip:
            raise InputError(message)
        self.bad_records += 1
        if len(self.first_errors) < 10:
            self.first_errors.append(message)

    def bad_notes(self, noun):
        if self.bad_records:
            yield f"{count_of(self.bad_records, noun)} skipped, the first of them:"
            yield from (f"  {error}" for error in self.first_errors)


@dataclass
class Report(BadRecords):
    rows: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    tally: Tally = field(default_factory=Tally)

    def count(self, row):
        """Counts a checked row."""
        self.rows += 1
        self.tokens += len(row["input_ids"])
        loss = row.get("loss_weights") or row.get("loss_mask")
        self.loss_tokens += len(row["input_ids"]) - 1 if loss is None else sum(value > 0 for value in loss)

    def progress(self):
        return f"{self.rows:,} rows, {self.tokens:,} tokens"

    def notes(self):
        yield from (f"{count:,} {text}" for text, count in self.tally.notes.items())
        yield from self.bad_notes("bad record")

    def summary(self):
        text = f"{count_of(self.rows, 'row')}, {self.tokens:,} tokens, {self.loss_tokens:,} with loss"
        text += f"; used: {names(self.tally.used)}"
        ignored = self.tally.ignored()
        return text + (f"; ignored: {names(ignored)}" if ignored else "")


def names(fields):
    fields = [clipped(name, 60) for name in fields]
    return ", ".join(
        fields[:MOST_NAMES]) + (f" and {len(fields) - MOST_NAMES} others" if len(fields) > MOST_NAMES else "")


def files_named(paths):
    return ", ".join(map(str, paths))
