# SPDX-License-Identifier: Apache-2.0
"""`espalier prepare`: converts chat messages to token rows with the model's tokenizer and chat template."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import BadRow, InputError, RenderError, is_failure
from ..rows.lines import lines_of
from ..rows.writer import row_writer
from .arguments import parse_arguments
from .chats import conversation_of
from .command import run_command
from .console import clipped, count_of, say
from .model import load_tokenizer, vocab_size_of
from .progress import Progress
from .signals import time_limit
from .template import ChatTemplate
from .turns import Encoder, conversation_row, render, turn_rows


@dataclass
class Report:
    """Counts of input and output."""

    conversations: int = 0
    trajectories: int = 0
    flat_tokens: int = 0
    loss_tokens: int = 0
    rewritten: int = 0
    first_rewrite: str = ""
    retokenised: int = 0
    skipped_rows: int = 0
    first_errors: list = field(default_factory=list)
    skipped_turns: int = 0
    open_turns: int = 0
    too_long: int = 0
    renamed: int = 0
    tools_left_out: int = 0

    def notes(self):
        """Warnings for the user, one line each."""
        if self.rewritten:
            yield (f"{self.rewritten} of {count_of(self.conversations, 'conversation')}: template rewrites history at turn "
                   f"{self.first_rewrite}; those turns share less and each is tokenised from a separate rendering")
        if self.retokenised:
            yield (f"{self.retokenised} of {count_of(self.conversations, 'conversation')}: tokenising the whole text at once "
                   "would give different ids than tokenising prompts and turns separately (rows have the latter)")
        if self.skipped_turns:
            yield (f"{count_of(self.skipped_turns, 'turn')} left out: nothing precedes the turn, or its rendering does not "
                   "begin with the template's generation prompt, so the completion cannot be located")
        if self.open_turns:
            yield (f"{count_of(self.open_turns, 'turn')}: the template does not end them with a special token, so the model "
                   "does not learn to stop")
        if self.tools_left_out:
            yield f"{count_of(self.tools_left_out, 'conversation')} with `tools`, which the template does not render"
        if self.too_long:
            yield f"{count_of(self.too_long, 'trajectory', 'trajectories')} dropped by --max-tokens"
        if self.renamed:
            yield f"{count_of(self.renamed, 'conversation')} with the name of an earlier one: renamed to ~2, ~3, ..."
        if self.skipped_rows:
            yield f"{count_of(self.skipped_rows, 'bad line')} skipped, the first of them:"
            yield from (f"  {error}" for error in self.first_errors)

    def summary(self):
        return (f"{count_of(self.conversations, 'conversation')}, {count_of(self.trajectories, 'trajectory', 'trajectories')}, "
                f"{self.flat_tokens:,} flat tokens, {self.loss_tokens:,} loss tokens, "
                f"{count_of(self.rewritten, 'rewritten history', 'rewritten histories')}")


def numbered_lines(path, most_bytes, tick):
    """Yields (FILE:LINE, line) for the lines of a file, like lines_of."""
    for number, line in enumerate(lines_of(path, most_bytes, tick), start=1):
        yield f"{path}:{number}", line


def conversations(arguments, report, tick):
    """Yields the conversations of all files. Bad lines raise or are counted. Calls tick(fraction of the input read)."""
    for number, path in enumerate(arguments.chats):
        def tick_in_file(fraction, number=number):
            tick((number + fraction) / len(arguments.chats))

        lines = arguments.lines(path, arguments.max_row_bytes, tick_in_file)
        for where, line in lines:
            if arguments.limit and report.conversations >= arguments.limit:
                return
            try:
                if isinstance(line, BadRow):
                    raise line
                if line is None:
                    raise BadRow("<line>", f"at most {arguments.max_row_bytes} bytes (--max-row-bytes)", "more")
                if not line.strip():
                    continue
                conversation = conversation_of(line, where, arguments.group_by)
            except BadRow as error:
                skip_or_raise(f"{where}: {error}", arguments, report)
                continue
            yield conversation


def skip_or_raise(message, arguments, report, cause=None):
    if not arguments.skip_bad_rows:
        raise InputError(message) from cause
    report.skipped_rows += 1
    if len(report.first_errors) < 10:
        report.first_errors.append(message)


def rows_of(rendered, name, per_turn, encoder):
    """Yields (trajectory_id, input_ids, loss_mask) of one rendered conversation."""
    for number, run in enumerate(rendered.runs):
        if per_turn:
            for turn, input_ids, loss_mask in turn_rows(run, encoder):
                yield f"{name}/turn-{turn}", input_ids, loss_mask
        else:
            suffix = f"/run-{number}" if len(rendered.runs) > 1 else ""
            yield name + suffix, *conversation_row(run, encoder)


class Names:
    """Gives every conversation a unique name: `name`, or name~2, name~3, ... if it is taken."""

    def __init__(self):
        self._taken, self._counts = set(), {}

    def unique(self, name):
        candidate, count = name, self._counts.get(name, 1)
        while candidate in self._taken:
            count += 1
            candidate = f"{name}~{count}"
        self._counts[name] = count
        self._taken.add(candidate)
        return candidate


def rendered_or_none(conversation, template, encoder, arguments, report):
    """The rendered conversation with tokenised texts; None for a bad row, which is counted or raises."""
    refusal = f"{conversation.where}: field `messages`: expected a conversation that the chat template renders, received"
    limit = arguments.template_timeout
    try:
        with time_limit(limit, RenderError(f"no result within {limit:g} s (--template-timeout)")):
            rendered = render(template, template.adapt(conversation.messages), conversation.tools)
        retokenised = any(conversation_row(run, encoder)[0] != encoder.whole(run.text()) for run in rendered.runs)
    except RenderError as error:
        skip_or_raise(f"{refusal}: {error}", arguments, report)
        return None
    except InputError as error:
        raise InputError(f"--model {arguments.model}: {error}") from error
    except BaseException as error:  # a fault of this row only: the others may be good
        if not is_failure(error) or isinstance(error, OSError):
            raise
        skip_or_raise(f"{refusal}: {type(error).__name__}: {clipped(str(error))}", arguments, report, error)
        return None
    note(conversation, rendered, template, report)
    report.retokenised += retokenised
    return rendered


def write_rows(writer, arguments, template, encoder, report):
    """Reads all chats and passes their rows to the writer."""
    names = Names()

    def tick(fraction):
        progress.update(fraction, f"{report.trajectories} trajectories, {report.flat_tokens:,} flat tokens")

    with Progress("prepare") as progress:
        for conversation in conversations(arguments, report, tick):
            rendered = rendered_or_none(conversation, template, encoder, arguments, report)
            if rendered is None:
                continue
            name = names.unique(conversation.name or file_name(conversation.where))
            report.renamed += conversation.name is not None and name != conversation.name
            for trajectory_id, input_ids, loss_mask in rows_of(rendered, name, arguments.per_turn, encoder):
                if arguments.max_tokens and len(input_ids) > arguments.max_tokens:
                    report.too_long += 1
                    continue
                writer.add({"trajectory_id": trajectory_id, "group_id": conversation.group_id,
                            "pair_id": conversation.pair_id, "chosen": conversation.chosen,
                            "reward": conversation.reward, "input_ids": input_ids, "loss_mask": loss_mask})
                report.trajectories += 1
                report.flat_tokens += len(input_ids)
                report.loss_tokens += sum(loss_mask)


def prepare(arguments, tokenizer, template):
    """Reads all chats and writes all rows; returns the report."""
    encoder = Encoder(tokenizer, vocab_size_of(arguments.model))
    report = Report()
    with row_writer(arguments.output) as writer:
        write_rows(writer, arguments, template, encoder, report)
        refuse_useless(arguments, report)
    return report


def refuse_useless(arguments, report):
    """Raises InputError if there is nothing to train on."""
    if report.trajectories > 0 and report.loss_tokens > 0:
        return
    for line in report.notes():
        say(f"prepare: {line}")
    chats = ", ".join(map(str, arguments.chats))
    if report.trajectories == 0:
        raise InputError(f"{chats}: expected at least one trajectory, received none")
    received = count_of(report.trajectories, "trajectory", "trajectories")
    raise InputError(f"{chats}: expected tokens with loss, received {received} without any: the rendered assistant messages "
                     "add nothing to their prompts in any of them")


def file_name(where):
    """FILE:LINE without the folder, as printable text."""
    return os.fsencode(Path(where).name).decode("utf-8", "replace")


def note(conversation, rendered, template, report):
    """Counts one conversation and its warnings."""
    report.conversations += 1
    report.skipped_turns += rendered.skipped_turns
    report.open_turns += rendered.open_turns
    report.tools_left_out += bool(conversation.tools) and not template.renders_tools
    if rendered.rewritten_at is not None:
        report.rewritten += 1
        report.first_rewrite = report.first_rewrite or f"{rendered.rewritten_at} ({conversation.where})"


def run(arguments, lines=numbered_lines):
    """lines(path, maximum bytes of a line, tick) yields the chats of a file as (where, bytes or BadRow)."""
    arguments.lines = lines
    tokenizer = load_tokenizer(arguments.model)
    limit = arguments.template_timeout
    endless = ValueError(f"expected a chat template that terminates, received no result within {limit:g} s "
                         "(--template-timeout)")
    try:
        with time_limit(limit, endless):
            template = ChatTemplate(tokenizer, arguments.tool_calls, arguments.template_args)
    except ValueError as error:
        raise InputError(f"--model {arguments.model}: {error}") from error
    for line in template.describe():
        say(f"prepare: {line}")
    report = prepare(arguments, tokenizer, template)
    for line in report.notes():
        say(f"prepare: {line}")
    say(f"prepare: {report.summary()}")
    say(f"prepare: wrote {arguments.output}")


def main(argv=None):
    """Runs the command and returns its exit code; wrong arguments raise SystemExit."""
    return run_command("prepare", lambda: run(parse_arguments(argv)))
