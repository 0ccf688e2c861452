# SPDX-License-Identifier: Apache-2.0
"""Divides a rendered conversation into input and output of the model.

Turn k (an assistant message) has two texts: its prompt, everything before it rendered with the generation prompt; and
its completion, which the rendered turn appends to the prompt, up to and including the special token that ends the turn.
The newline that a template writes after that token is not output of the model: it belongs to the text between this turn
and the next.

A rendered turn may not begin with its prompt. Where they differ within the generation prompt (it opens a thought that the
answer does not have), the row holds the rendered turn, with loss from the place where they part. Where the template writes
earlier messages in another way once the turn is there, the completion is what stands behind the end of the prompt in it.
Both are counted.

Turns are grouped into runs of turns. A turn continues the run of the preceding turn if that turn's text (prompt and
completion) is a prefix of its prompt. If a template rewrites history, for instance by removing the thinking of earlier
turns, a new run begins with a separate rendering. So every turn is in exactly one run, in the context in which it was
written.
"""

from dataclasses import dataclass, field

from ..errors import RenderError
from .checks import Context, check_answer, check_context
from .probes import common_length, outside_of_tokens

TAILS = (400, 100)  # characters before the generation prompt by which the end of a prompt is found
SENTINEL = "\u2603 espalier probe \u2603"


@dataclass
class Run:
    """Consecutive turns whose texts extend each other: texts[0], texts[2], ... are input, the odd ones output of the
    model. `turns` has the indices of the assistant messages (from 0), `weights` their loss."""

    turns: list = field(default_factory=list)
    texts: list = field(default_factory=list)
    weights: list = field(default_factory=list)


@dataclass
class Rendered:
    """A rendered conversation as runs of consecutive turns."""

    runs: list
    rewritten_at: int | None = None  # first turn whose prompt rewrites earlier text


def completion_end(rest, template):
    """(end of the completion within `rest`, whether a special token ends it)."""
    if template.end_of_text and rest.endswith(template.end_of_text):
        rest = rest[: -len(template.end_of_text)]
    body = rest.rstrip()
    if any(body.endswith(token) for token in template.ending_tokens):
        return len(body), True
    return len(rest), False


def render(template, messages, weights, tools, tally):
    """Splits a conversation of checked messages into runs of turns; raises RenderError. weights: the loss of each turn.
    tally(kind): counts what is worth a note."""
    rendered = Rendered([])
    adapted = template.adapt(messages, tally)
    views = template.views(adapted, tools)
    origins = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    written = ""  # prompt and completion of the last turn of the current run
    gaps: set[int] = set()  # indices of messages that a prompt lacks
    places = [index for index, message in enumerate(adapted) if message["role"] == "assistant"]
    for turn, index in enumerate(places):
        texts = _prompt_and_rest(template, views, adapted, index, tools, tally) if index else None
        if texts is None:
            tally("skipped_turns")
            continue
        prompt, rest = texts
        end, closed = completion_end(rest, template)
        if not closed:
            tally("open_turns")
        completion = rest[:end]
        check_answer(messages[origins[turn]], completion, tally)
        if rendered.runs and prompt.startswith(written):
            run = rendered.runs[-1]
            run.texts.append(prompt[len(written) :])
        else:
            if rendered.runs and rendered.rewritten_at is None:
                rendered.rewritten_at = turn
            run, context = Run(texts=[prompt]), Context(messages)
            rendered.runs.append(run)
        gaps.update(context.gaps(origins[turn], prompt))
        run.turns.append(turn)
        run.texts.append(completion)
        run.weights.append(weights[turn])
        written = prompt + completion
    if rendered.runs:
        check_context(messages[: origins[run.turns[-1]] + 1], gaps, template.special_tokens, tally)
    return rendered


def _prompt_and_rest(template, views, messages, index, tools, tally):
    """(the prompt of a turn, what the rendered turn appends to it); None if it cannot be located."""
    prompt, full = views.prompt(index), views.answered(index)
    try:
        full.encode("utf-8")
    except UnicodeEncodeError:
        raise RenderError("text with an unpaired surrogate, which tokenizers do not accept") from None
    header = template.probes.header
    is_prefix = full.startswith(prompt)
    if is_prefix and (not header or prompt.endswith(header) or header not in full[len(prompt) :]):
        return prompt, full[len(prompt) :]
    base = views.answered(index - 1).removesuffix(template.end_of_text)
    generation = prompt[len(base) :] if prompt.startswith(base) else ""
    if is_prefix and header in generation:
        return prompt, full[len(prompt) :]
    other = template.views([*messages[:index], *template.probes.in_form([{"role": "assistant", "content": SENTINEL}])], tools)
    opening = common_length(full, other.answered(index))  # whatever the answer begins with
    parting = outside_of_tokens(min(opening, common_length(prompt, full)), (prompt, full), template.added_tokens)
    if prompt.startswith(base) and full.startswith(base) and parting >= len(base):
        tally("differing_prompts")
        begin = _behind_header(full, parting, opening, header)
        return full[:begin], full[begin:]
    texts = filter(None, map(template.probes.content_text, reversed(messages[:index])))
    begin = _behind_prompt(prompt, full, generation, next(texts, ""), (parting, opening))
    if begin is None:
        return None
    tally("differing_history")
    behind = _behind_header(full, begin, opening, header)
    return prompt + full[begin:behind], full[behind:]


def _behind_header(full, begin, opening, header):
    """Where the answer begins in a rendered turn: at `begin`, or behind the header of a turn that ends before `opening`."""
    at = full.rfind(header, max(0, begin - len(header)), opening) if header else -1
    return begin if at < 0 else max(begin, at + len(header))


def _behind_prompt(prompt, full, generation, content, places):
    """Where the answer begins in a rendered turn that writes messages before it in another way than its prompt; None if the last
    of them is not found there. content: of that message, or of the last that has one. places: where both texts part, and where
    the answer's own text begins."""
    parting, opening = places
    last = prompt.rfind(content) if content else -1
    for length in (*(len(generation) + tail for tail in TAILS), *([len(prompt) - last] if last >= 0 else [])):
        tail = prompt[-length:]
        at = full.rfind(tail)
        between = full[at + len(tail) : opening]
        is_earlier = last >= 0 and content in between and len(between) > len(generation)
        if at >= 0 and len(tail) > len(generation) and not is_earlier:
            return at + len(tail)
    if last < 0 or last + len(content) > parting:
        return None
    at = full.find(generation, last + len(content)) if generation else -1
    return at + len(generation) if at >= 0 else parting
