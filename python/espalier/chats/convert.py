# SPDX-License-Identifier: Apache-2.0
"""Conversion of records to rows of tokens, in this process or in a worker."""

from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from ..commands.console import clipped
from ..commands.signals import time_limit
from ..errors import BadRow, InputError, RenderError, is_failure
from ..io import atif
from ..io.fields import Fields, Tally, scalar_at
from ..io.formats import FORMATS
from .conversation import Record, record_of
from .encoder import Encoder
from .shapes import kind_of
from .turns import render

REFUSAL = "field `messages`: expected a conversation that the chat template renders, received"


@dataclass(frozen=True)
class Settings:
    """Flags that a conversion needs."""

    model: Path
    per_turn: bool = False
    group_by: str | None = None
    max_tokens: int | None = None
    template_timeout: float = 0.0


@dataclass
class TokenRow:
    """A row without its names. `ids`: the bytes of int32. `loss`: an array of doubles if it has fractions (`weighted`), else of
    bytes."""

    suffix: str
    side: str | None
    tokens: int
    loss_tokens: int
    ids: bytes
    loss: "array[int] | array[float]"
    weighted: bool


@dataclass
class Outcome:
    """What became of one record: rows, or the error that makes it bad."""

    where: str
    record: Record | None = None
    rows: list[TokenRow] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    rewritten_at: str = ""
    error: str | None = None

    def count(self, what):
        self.counts[what] += 1


class Converter:
    """Converts chunks of records. Raises InputError for a model that cannot be used."""

    def __init__(self, template, tokenizer, vocab_size, settings):
        self._template, self._settings = template, settings
        self._encoder = Encoder(tokenizer, vocab_size)

    def __call__(self, chunk_and_kind):
        """The outcomes of the records of a chunk (io/sources.py), beside which stands the format of its file (io/formats.py)."""
        chunk, kind = chunk_and_kind
        return [self._outcome(where, record, kind) for where, record in chunk.records()]

    def _outcome(self, where, record, kind):
        outcome = Outcome(where)
        try:
            if isinstance(record, BadRow):
                raise record
            outcome.record = self._checked(record, kind, outcome)
            self._convert(outcome)
            for conversation in outcome.record.conversations:
                conversation.messages = []  # nobody needs them any more
        except BadRow as error:
            outcome.error = f"{where}: {error}"
        except RenderError as error:
            outcome.error = f"{where}: {REFUSAL}: {error}"
        except InputError as error:
            raise InputError(f"--model {self._settings.model}: {error}") from error
        except BaseException as error:  # a fault of this record only: the others may be good
            if not is_failure(error) or isinstance(error, OSError):
                raise
            outcome.error = f"{where}: {REFUSAL}: {type(error).__name__}: {clipped(str(error))}"
        return outcome

    def _checked(self, record, kind, outcome):
        tally = Tally()
        group_by = self._settings.group_by
        group_id = scalar_at(Fields(record, tally), group_by) if group_by else None
        if kind == "atif" and FORMATS[kind].matches(record):
            record, kind = atif.chat_of(record, tally), "messages"
        elif not FORMATS[kind].matches(record):
            kind = kind_of(record)

        checked = record_of(Fields(record, tally), kind, self._template.ending_tokens, outcome.count)
        checked.group_id = group_id
        return checked

    def _convert(self, outcome):
        record, settings = outcome.record, self._settings
        if settings.per_turn and record.is_pair:
            raise BadRow("<record>", "a chat (--per-turn)", "a preference pair, which cannot be split into turns")
        for name in [*record.ignored]:
            if name.startswith("messages[].") and self._template.reads(name.removeprefix("messages[].")):
                del record.ignored[name]
        for conversation in record.conversations:
            rows = self._rows(conversation, outcome)
            fitting = [row for row in rows if not settings.max_tokens or row.tokens <= settings.max_tokens]
            outcome.counts["too_long"] += len(rows) - len(fitting)
            outcome.rows += fitting
        if record.is_pair and sorted(row.side for row in outcome.rows) != ["chosen", "rejected"]:
            outcome.counts["lone_sides" if len({row.side for row in outcome.rows}) < 2 else "divided_sides"] += 1
            outcome.rows = []
        outcome.counts += Counter()  # without zeros

    def _rows(self, conversation, outcome):
        limit, count = self._settings.template_timeout, outcome.count
        with time_limit(limit, RenderError(f"no result within {limit:g} s (--template-timeout)")):
            try:
                template = self._template.variant(conversation.arguments)
            except ValueError as error:
                raise RenderError(str(error)) from None
            rendered = render(template, conversation.messages, conversation.weights, conversation.tools, count)
        if conversation.tools and not template.renders_tools:
            count("tools_left_out")
        if rendered.rewritten_at is not None:
            count("rewritten")
            outcome.rewritten_at = outcome.rewritten_at or f"{rendered.rewritten_at} ({outcome.where})"
        self._encoder.begin()
        if any(self._encoder.differs_at_once(run.texts) for run in rendered.runs):
            count("retokenised")
        rows = []
        for number, run in enumerate(rendered.runs):
            outcome.counts["weightless"] += sum(weight == 0 for weight in run.weights)
            segments = self._encoder.segments(run.texts)
            if self._settings.per_turn:
                rows += [
                    self._row(segments[: 2 * at + 2], [0.0] * at + [weight], f"/turn-{turn}", conversation.side)
                    for at, (turn, weight) in enumerate(zip(run.turns, run.weights))
                    if weight
                ]
            elif any(run.weights):
                suffix = f"/run-{number}" if len(rendered.runs) > 1 and conversation.side is None else ""
                rows.append(self._row(segments, run.weights, suffix, conversation.side))
        return rows

    def _row(self, segments, weights, suffix, side):
        """segments: the pieces of each text of a run. weights: of its turns."""
        pieces = [piece for segment in segments for piece in segment]
        counts = [sum([piece.tokens for piece in segment]) for segment in segments]
        losses = [0.0 if at % 2 == 0 else weights[at // 2] for at in range(len(segments))]
        weighted = any(loss not in (0.0, 1.0) for loss in losses)
        numbers = losses if weighted else [int(loss) for loss in losses]
        loss = array("d" if weighted else "B")
        for number, count in zip(numbers, counts):
            loss.extend(array(loss.typecode, [number]) * count)
        return TokenRow(
            suffix,
            side,
            sum(counts),
            sum(count for number, count in zip(losses, counts) if number),
            self._encoder.joined(pieces),
            loss,
            weighted,
        )
