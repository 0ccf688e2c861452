# SPDX-License-Identifier: Apache-2.0
"""Counts of a conversion of chats, and what they say to the user."""

from collections import Counter
from dataclasses import dataclass, field

from ..commands.console import clipped, count_of
from ..io.report import MOST_NAMES, BadRecords

# By kind: what is counted, and what it means. {first} is the place of the first.
NOTES = {
    "rewritten": (
        "of {conversations}: template rewrites history at turn {first}; those turns share less and each is "
        "tokenised from a separate rendering"
    ),
    "retokenised": (
        "of {conversations}: tokenising the whole text at once would give different ids than tokenising prompts "
        "and turns separately (rows have the latter)"
    ),
    "skipped_turns": (
        "turn",
        "left out: nothing precedes the turn, or its rendering does not begin with the template's generation "
        "prompt, so the completion cannot be located; first {first}",
    ),
    "differing_prompts": (
        "turn",
        "that the template writes in another way than its generation prompt begins (such as without the "
        "thought that it opens): rows have the text as the template writes it, with loss from where they "
        "part{cure}; first {first}",
    ),
    "differing_history": (
        "turn",
        "whose prompt the template writes in another way once the turn is there: rows have the prompt as in "
        "sampling, and the turn behind it; first {first}",
    ),
    "open_turns": ("turn", "that the template does not end with a special token, so the model does not learn to stop"),
    "weightless": ("turn", "without loss, as their marks, prompts or pairs say"),
    "marked_others": ("message", "of other roles than assistant with a mark of loss, which has no effect; first {first}"),
    "tools_left_out": ("conversation", "with `tools`, which the template does not render"),
    "dropped_reasoning": (
        "turn",
        "whose reasoning the template does not render: their answers are learned without it; first {first}",
    ),
    "dropped_answers": ("turn", "whose content is not in the rendering as the file has it; first {first}"),
    "dropped_beside_calls": (
        "turn",
        "with content beside tool calls, which the template does not render; --tool-calls content writes both; first {first}",
    ),
    "dropped_arguments": ("tool call", "with arguments that the template does not write; first {first}"),
    "developer_as_system": ("message", "of role developer as system messages, since the template does not write that role"),
    "special_tokens": ("message", "whose text has special tokens of the tokenizer, which are encoded as such; first {first}"),
    "empty_answers": ("turn", "without content or tool calls: the model learns to end at once; first {first}"),
    "thoughts_of_others": ("message", "of other roles than assistant with reasoning, which is not rendered; first {first}"),
    "short_ids": ("message", "with ids of tool calls of nine letters and digits in place of theirs, which the template refuses"),
    "null_arguments": ("tool call", "with arguments that are null, which stay as the file has them; first {first}"),
    "null_arguments_left_out": (
        "tool call",
        "without arguments that are null and that their function does not have; first {first}",
    ),
    "lone_sides": ("preference pair", "left out, because one of its sides has no row"),
    "divided_sides": (
        "preference pair",
        "left out, because the template rewrites history between turns with loss, so that a side is not one row; first {first}",
    ),
    "too_long": ("trajectory", "dropped by --max-tokens"),
    "renamed": ("conversation", "with the name of an earlier one: renamed to ~2, ~3, ..."),
}
PLURALS = {"trajectory": "trajectories"}


@dataclass
class Report(BadRecords):
    """Counts of input and output. `counts` and `first` are by kinds of NOTES, `dropped:ROLE` among them. `ignored`: fields
    that nothing uses, and in how many records or messages."""

    records: int = 0
    conversations: int = 0
    trajectories: int = 0
    flat_tokens: int = 0
    loss_tokens: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    ignored: Counter[str] = field(default_factory=Counter)
    cure: str | None = None

    def add(self, outcome):
        """Adds what became of one record (convert.Outcome)."""
        self.records += 1
        self.conversations += len(outcome.record.conversations)
        self.counts.update(outcome.counts)
        for kind in outcome.counts:
            self.first.setdefault(kind, outcome.rewritten_at if kind == "rewritten" else outcome.where)
        self.ignored.update(outcome.record.ignored)
        self.trajectories += len(outcome.rows)
        self.flat_tokens += sum(row.tokens for row in outcome.rows)
        self.loss_tokens += sum(row.loss_tokens for row in outcome.rows)

    def notes(self):
        """Warnings for the user, one line each."""
        for kind, text in NOTES.items():
            if not self.counts[kind]:
                continue
            noun, meaning = (None, text) if isinstance(text, str) else text
            amount = f"{self.counts[kind]:,}" if noun is None else count_of(self.counts[kind], noun, PLURALS.get(noun))
            yield f"{amount} " + meaning.format(
                conversations=count_of(self.conversations, "conversation"),
                first=self.first.get(kind, ""),
                cure=f"; --template-args '{self.cure}' makes both alike" if self.cure else "",
            )
        for kind, count in self.counts.items():
            if kind.startswith("dropped:"):
                yield (
                    f"{count_of(count, 'message')} of role {kind.partition(':')[2]} whose text is not in the rendering; "
                    f"first {self.first[kind]}"
                )
        if self.ignored:
            yield f"ignored: {self._ignored_names()}"
        yield from self.bad_notes("bad line")

    def _ignored_names(self):
        names = [f"{clipped(name, 60)} ({count:,})" for name, count in self.ignored.most_common(MOST_NAMES)]
        others = len(self.ignored) - len(names)
        return ", ".join(names) + (f" and {others} others" if others else "")

    def summary(self):
        return (
            f"{count_of(self.conversations, 'conversation')}, {count_of(self.trajectories, 'trajectory', 'trajectories')}, "
            f"{self.flat_tokens:,} flat tokens, {self.loss_tokens:,} loss tokens, "
            f"{count_of(self.counts['rewritten'], 'rewritten history', 'rewritten histories')}"
        )
