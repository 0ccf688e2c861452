"""`espalier prepare`: chat messages into token rows, through the model's own tokenizer and chat template."""

import argparse
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from .chats import BadRow, conversation_of, open_lines
from .progress import Progress
from .rows import row_writer
from .template import ChatTemplate, RenderError
from .turns import Encoder, conversation_row, render, turn_rows

DESCRIPTION = """\
Turns chats into rows of tokens for `espalier train`, `inspect` and `verify`.

Each line of CHATS.jsonl (plain, gzip or zstd) is one JSON object with OpenAI-style `messages`: roles system,
user, assistant and tool; tool calls; null contents. The model's own chat template and tokenizer make the
tokens, and only the tokens that the assistant writes carry loss, the end of its turn among them.

Without --per-turn a conversation becomes one trajectory with loss on all assistant messages. With --per-turn
every assistant message becomes a trajectory of its own: its prompt is all that stands before it, and only its
own tokens carry loss. Such trajectories share their prompts, and Espalier encodes what they share once.
"""

EPILOG = """\
fields of a line that are used besides `messages`:
  reward                  carried into the row
  trajectory_id | conversation_id | id, or task_id and trial
                          name the trajectory (with --per-turn followed by /turn-K, K from 0)
  tools                   tool schemas, given to the template where it renders them
  the field of --group-by becomes group_id

templates:
  Where the template cannot render tool calls they are written into the content, as
  <tool_call>, a line of JSON with name and arguments, </tool_call>.
  Where it rewrites history (for instance removes the thinking of earlier turns), a turn is no prefix of the
  next. This is counted and reported. Every trajectory is then still a true render: without --per-turn such
  a conversation gives one trajectory for each unbroken run of turns (named /run-J).

examples:
  espalier prepare --model DIR chats.jsonl -o rows.safetensors --per-turn
  espalier prepare --model DIR chats.jsonl.gz -o rows.jsonl.zst --group-by task_id --max-tokens 8192

exit codes: 0 done, 1 bad input, 2 wrong arguments
"""


class InputError(Exception):
    """What the user gave cannot be used; the message says where, what was expected, what was received."""


@dataclass
class Report:
    """What came in and went out."""

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
        """One line for everything that the user should know."""
        if self.rewritten:
            yield (f"{self.rewritten} of {self.conversations} conversations: template rewrites history at turn "
                   f"{self.first_rewrite}; those turns share less and each is tokenised from its own render")
        if self.retokenised:
            yield (f"{self.retokenised} of {self.conversations} conversations: tokenising the whole text at once "
                   "would give other ids than its prompts and turns one by one (rows have the latter)")
        if self.skipped_turns:
            yield (f"{self.skipped_turns} turns left out: nothing stands before the turn, or its rendering does not "
                   "begin with the template's generation prompt, so what the model writes cannot be located")
        if self.open_turns:
            yield f"{self.open_turns} turns: the template ends them with no special token, so no stop is learnt"
        if self.tools_left_out:
            yield f"{self.tools_left_out} conversations have `tools`, which the template does not render"
        if self.too_long:
            yield f"{self.too_long} trajectories dropped by --max-tokens"
        if self.renamed:
            yield f"{self.renamed} conversations share a name with an earlier one and got ~2, ~3, ..."
        if self.skipped_rows:
            yield f"{self.skipped_rows} bad lines skipped, the first of them:"
            yield from (f"  {error}" for error in self.first_errors)

    def summary(self):
        return (f"{self.conversations} conversations, {self.trajectories} trajectories, "
                f"{self.flat_tokens} flat tokens, {self.loss_tokens} loss tokens, "
                f"{self.rewritten} rewritten histories")


def load_tokenizer(model):
    """The tokenizer of a Hugging Face directory, without PyTorch: importing it takes longer than the work."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    hidden = "torch" not in sys.modules
    if hidden:
        sys.modules["torch"] = None  # find_spec then says that there is none
    try:
        from transformers import AutoTokenizer
        from transformers.utils import logging

        logging.set_verbosity_error()
        return AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"--model {model}: expected a directory with a tokenizer, received: {error}") from None
    finally:
        if hidden:
            del sys.modules["torch"]


def vocab_size_of(model):
    """vocab_size of the model's config.json, None where there is none."""
    try:
        config = json.loads((model / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")


def conversations(arguments, report):
    """Yields (conversation, part of the input read). Bad lines raise or are counted."""
    for number, path in enumerate(arguments.chats):
        stream, fraction = open_lines(path)
        with stream:
            for line_number, line in enumerate(_lines(stream, path), start=1):
                if arguments.limit and report.conversations >= arguments.limit:
                    return
                if not line.strip():
                    continue
                where = f"{path}:{line_number}"
                try:
                    conversation = conversation_of(line, where, arguments.group_by)
                except BadRow as error:
                    skip_or_raise(f"{where}: {error}", arguments, report)
                    continue
                yield conversation, (number + fraction()) / len(arguments.chats)


def _lines(stream, path):
    try:
        yield from stream
    except (OSError, EOFError, RuntimeError) as error:  # a damaged gzip or zstd stream
        raise InputError(f"{path}: expected a whole compressed file, received: {error}") from None
    except Exception as error:
        if type(error).__name__ != "ZstdError":
            raise
        raise InputError(f"{path}: expected a whole compressed file, received: {error}") from None


def skip_or_raise(message, arguments, report):
    if not arguments.skip_bad_rows:
        raise InputError(message)
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


def unique_name(name, taken):
    """`name`, or name~2, name~3, ... where it is taken."""
    candidate, count = name, 1
    while candidate in taken:
        count += 1
        candidate = f"{name}~{count}"
    taken.add(candidate)
    return candidate


def prepare(arguments, tokenizer, template):
    """Reads all chats and writes all rows; returns the report."""
    encoder = Encoder(tokenizer, vocab_size_of(arguments.model))
    report, taken = Report(), set()
    progress = Progress("prepare")
    with row_writer(arguments.output) as writer:
        for conversation, fraction in conversations(arguments, report):
            try:
                rendered = render(template, template.adapt(conversation.messages), conversation.tools)
            except RenderError as error:
                skip_or_raise(f"{conversation.where}: field `messages`: expected a conversation that the chat template "
                              f"renders, received: {error}", arguments, report)
                continue
            name = unique_name(conversation.name or Path(conversation.where).name, taken)
            note(conversation, rendered, encoder, template, report)
            report.renamed += conversation.name is not None and name != conversation.name
            for trajectory_id, input_ids, loss_mask in rows_of(rendered, name, arguments.per_turn, encoder):
                if arguments.max_tokens and len(input_ids) > arguments.max_tokens:
                    report.too_long += 1
                    continue
                writer.add({"trajectory_id": trajectory_id, "group_id": conversation.group_id,
                            "reward": conversation.reward, "input_ids": input_ids, "loss_mask": loss_mask})
                report.trajectories += 1
                report.flat_tokens += len(input_ids)
                report.loss_tokens += sum(loss_mask)
            progress.update(fraction, f"{report.trajectories} trajectories, {report.flat_tokens} flat tokens")
        progress.close()
        if report.trajectories == 0:
            for line in report.notes():
                print(f"prepare: {line}", file=sys.stderr)
            raise InputError(f"{', '.join(map(str, arguments.chats))}: expected at least one trajectory, received none")
    return report


def note(conversation, rendered, encoder, template, report):
    """Counts one conversation and what is particular about it."""
    report.conversations += 1
    report.skipped_turns += rendered.skipped_turns
    report.open_turns += rendered.open_turns
    report.tools_left_out += bool(conversation.tools) and not template.renders_tools
    if rendered.rewritten_at is not None:
        report.rewritten += 1
        report.first_rewrite = report.first_rewrite or f"{rendered.rewritten_at} ({conversation.where})"
    report.retokenised += any(
        conversation_row(run, encoder)[0] != encoder.whole(run.text()) for run in rendered.runs)


def positive(text):
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, received {text!r}")
    return value


def template_arguments(text):
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, received {text!r}")
    return value


def parse_arguments(argv):
    parser = argparse.ArgumentParser(prog="espalier prepare", description=DESCRIPTION, epilog=EPILOG,
                                     formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("chats", nargs="+", type=Path, metavar="CHATS.jsonl", help="files of chats, read in order")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR",
                        help="Hugging Face directory with tokenizer and chat template")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="ROWS",
                        help="ROWS.jsonl, .jsonl.gz, .jsonl.zst, or packed: ROWS.safetensors")
    parser.add_argument("--per-turn", action="store_true", help="one trajectory per assistant message")
    parser.add_argument("--group-by", metavar="FIELD",
                        help="field of a line that becomes group_id; a dotted path reaches into objects")
    parser.add_argument("--limit", type=positive, metavar="N", help="stop after N conversations")
    parser.add_argument("--max-tokens", type=positive, metavar="N", help="drop (and count) longer trajectories")
    parser.add_argument("--tool-calls", choices=("auto", "template", "content"), default="auto",
                        help="who renders tool calls; auto: the template where it renders them whole "
                             "(default: %(default)s)")
    parser.add_argument("--template-args", type=template_arguments, default={}, metavar="JSON",
                        help='variables for the chat template, such as \'{"enable_thinking": false}\'')
    parser.add_argument("--skip-bad-rows", action="store_true",
                        help="count and report bad lines instead of stopping at the first")
    arguments = parser.parse_args(argv)
    for path in arguments.chats:
        if not path.is_file():
            parser.error(f"expected a file of chats, received {path}")
    if not arguments.model.is_dir():
        parser.error(f"argument --model: expected a directory, received {arguments.model}")
    if not arguments.output.resolve().parent.is_dir():
        parser.error(f"argument -o: expected a path in an existing folder, received {arguments.output}")
    name = arguments.output.name
    if not name.endswith((".safetensors", ".jsonl", ".jsonl.gz", ".jsonl.zst")):
        parser.error(f"argument -o: expected a name in .jsonl, .jsonl.gz, .jsonl.zst or .safetensors, received {name}")
    return arguments


def main(argv=None):
    arguments = parse_arguments(argv)
    try:
        tokenizer = load_tokenizer(arguments.model)
        try:
            template = ChatTemplate(tokenizer, arguments.tool_calls, arguments.template_args)
        except ValueError as error:
            raise InputError(f"--model {arguments.model}: {error}") from None
        for line in template.describe():
            print(f"prepare: {line}", file=sys.stderr)
        report = prepare(arguments, tokenizer, template)
    except (InputError, OSError) as error:
        print(f"espalier prepare: {error}", file=sys.stderr)
        return 1
    for line in report.notes():
        print(f"prepare: {line}", file=sys.stderr)
    print(f"prepare: {report.summary()}", file=sys.stderr)
    print(f"prepare: wrote {arguments.output}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
