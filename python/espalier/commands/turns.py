# SPDX-License-Identifier: Apache-2.0
"""Converts a conversation to token rows with loss on the model's output.

Turn k (an assistant message) has two texts: its prompt, everything before it rendered with the generation prompt; and
its completion, which the rendered turn appends to the prompt, up to and including the special token that ends the turn.
The newline that a template writes after that token is not output of the model: it belongs to the text between this turn
and the next.

Turns are grouped into runs of turns. A turn continues the run of the preceding turn if that turn's text (prompt and
completion) is a prefix of its prompt. If a template rewrites history, for instance by removing the thinking of earlier
turns, a new run begins with a separate rendering. So every turn is in exactly one run, in the context in which it was
written.

Each text of a run is tokenised separately, as in inference: the prompt, the completion, the text in between, ... Hence
the tokens of a turn are a prefix of those of the next turn in its run.
"""

from dataclasses import dataclass, field

from ..errors import InputError, RenderError


@dataclass
class Run:
    """Consecutive turns whose texts extend each other: texts[0], texts[2], ... are input, the odd ones output of the
    model. `turns` has the indices of the assistant messages (from 0)."""

    turns: list = field(default_factory=list)
    texts: list = field(default_factory=list)

    def text(self):
        return "".join(self.texts)


@dataclass
class Rendered:
    """A rendered conversation as runs of consecutive turns, with notes for warnings."""

    runs: list
    rewritten_at: int | None  # first turn whose prompt rewrites earlier text
    skipped_turns: int        # turns without a prompt, or whose rendering does not begin with it
    open_turns: int           # turns that do not end with a special token


def completion_end(rest, ending_tokens):
    """(end of the completion within `rest`, whether a special token ends it)."""
    body = rest.rstrip()
    if any(body.endswith(token) for token in ending_tokens):
        return len(body), True
    return len(rest), False


def render(template, messages, tools=None):
    """Splits a conversation into runs of turns; raises RenderError."""
    rendered = Rendered([], None, 0, 0)
    written = ""  # prompt and completion of the last turn of the current run
    turn = -1
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        turn += 1
        if index == 0:  # has no prompt
            rendered.skipped_turns += 1
            continue
        prompt = template.text(messages[:index], True, tools)
        full = template.text(messages[:index + 1], False, tools)
        try:
            full.encode("utf-8")
        except UnicodeEncodeError:
            raise RenderError("text with an unpaired surrogate, which tokenizers do not accept") from None
        if not full.startswith(prompt):
            rendered.skipped_turns += 1
            continue
        end, closed = completion_end(full[len(prompt):], template.ending_tokens)
        rendered.open_turns += not closed
        completion = full[len(prompt):len(prompt) + end]
        if rendered.runs and prompt.startswith(written):
            run = rendered.runs[-1]
            run.texts.append(prompt[len(written):])
        else:
            if rendered.runs and rendered.rewritten_at is None:
                rendered.rewritten_at = turn
            run = Run(texts=[prompt])
            rendered.runs.append(run)
        run.turns.append(turn)
        run.texts.append(completion)
        written = prompt + completion
    return rendered


class Encoder:
    """Token ids of texts, each encoded separately and cached."""

    def __init__(self, tokenizer, vocab_size=None, capacity=200_000):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._capacity = capacity
        self._known = {}
        self._anchor = self._needed_anchor()

    def whole(self, text):
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if self._vocab_size is not None and ids and max(ids) >= self._vocab_size:
            raise InputError(f"expected token ids below the model's vocab_size {self._vocab_size}, received {max(ids)} "
                             "from its tokenizer")
        return ids

    def segments(self, texts):
        """One list of ids per text."""
        return [self._segment(text, first=index == 0) for index, text in enumerate(texts)]

    def _segment(self, text, first):
        key = (text, first or self._anchor is None)
        ids = self._known.get(key)
        if ids is None:
            if len(self._known) >= self._capacity:
                self._known.clear()
            ids = self.whole(text) if key[1] else self.whole(self._anchor + text)[1:]
            self._known[key] = ids
        return ids

    def _needed_anchor(self):
        """Some tokenizers put a space before any text. Inside a run that space would be wrong, so a special
        token is put before it while encoding, and its id taken away."""
        for token in self._tokenizer.all_special_tokens:
            ids = self.whole(token + "a")
            if len(self.whole(token)) == 1 and ids[:1] == self.whole(token):
                return token if ids[1:] != self.whole("a") else None
        return None


def conversation_row(run, encoder):
    """(input_ids, loss_mask) of a whole run: loss on every turn."""
    input_ids, loss_mask = [], []
    for index, ids in enumerate(encoder.segments(run.texts)):
        input_ids.extend(ids)
        loss_mask.extend([index % 2] * len(ids))
    return input_ids, loss_mask


def turn_rows(run, encoder):
    """(turn, input_ids, loss_mask) of every turn of a run: loss on its own tokens only."""
    before: list[int] = []
    segments = encoder.segments(run.texts)
    for index, turn in enumerate(run.turns):
        before = before + segments[2 * index]
        own = segments[2 * index + 1]
        input_ids = before + own
        yield turn, input_ids, [0] * len(before) + [1] * len(own)
        before = input_ids
