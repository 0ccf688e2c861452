# SPDX-License-Identifier: Apache-2.0
"""The command line of `espalier prepare`. Imports only the standard library."""

import argparse
import json
from pathlib import Path

from .command_line import ROW_SUFFIXES, ArgumentParser, add_bad_row_flags, check_model, check_output, positive

DESCRIPTION = """\
Converts chats to rows of tokens for `espalier train`, `inspect` and `verify`.

Each line of CHATS.jsonl (plain, gzip or zstd) is one JSON object with
OpenAI-style `messages` (roles system, user, assistant and tool; tool calls;
null contents), or a chat in another format (below). The model's chat template
and tokenizer convert it to tokens; only the assistant's tokens carry loss,
including the end of its turns.

Without --per-turn a conversation becomes one trajectory with loss on all
assistant messages. With --per-turn every assistant message becomes a separate
trajectory: its prompt is everything before it, and only its tokens carry loss.
Such trajectories share their prompts, and Espalier encodes shared tokens once.
"""

EPILOG = """\
other chat formats:
  conversations           ShareGPT: turns with `from` and `value`
  prompt, completion      two texts, or two lists of messages (also `response` or
                          `answer` instead of `completion`)
  instruction, output     Alpaca, with an optional `input`
  With any of them, a text in `system` is the system message.

other fields of a line:
  reward                  copied to the row
  trajectory_id | conversation_id | id, or task_id and trial
                          name the trajectory (with --per-turn followed by
                          /turn-K, K from 0)
  tools                   tool schemas, passed to the template if it renders
                          them
  the field of --group-by becomes group_id

templates:
  If the template cannot render tool calls, they are written into the content, as
  <tool_call>, a line of JSON with name and arguments, </tool_call>.
  If it rewrites history (for instance removes the thinking of earlier turns), a
  turn is not a prefix of the next. This is counted and reported. Every
  trajectory still equals a rendering of the template: without --per-turn such a
  conversation becomes one trajectory per unbroken sequence of turns (/run-J).

examples:
  espalier prepare --model DIR chats.jsonl -o rows.safetensors --per-turn
  espalier prepare --model DIR chats.jsonl.gz -o rows.jsonl.zst \\
      --group-by task_id --max-tokens 8192

exit codes: 0 done, 1 bad input, 2 wrong arguments, 130 interrupted. Nothing is
written unless the command succeeds. ESPALIER_TRACEBACK=1 in the environment
prints the traceback of an error.
"""


def seconds(text):
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1e6:
        raise argparse.ArgumentTypeError(f"expected seconds from 0 to 1000000, received {text!r}")
    return value


def template_arguments(text):
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, received {text!r}")
    return value


def argument_parser():
    parser = ArgumentParser(prog="espalier prepare", description=DESCRIPTION, epilog=EPILOG,
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
                        help="how tool calls are rendered; auto: by the template if it renders them completely "
                             "(default: %(default)s)")
    parser.add_argument("--template-args", type=template_arguments, default={}, metavar="JSON",
                        help='variables for the chat template, such as \'{"enable_thinking": false}\'')
    parser.add_argument("--template-timeout", type=seconds, default=30.0, metavar="SECONDS",
                        help="time limit for the chat template to render one conversation, 0: none (default: %(default)g)")
    add_bad_row_flags(parser)
    return parser


def parse_arguments(argv):
    parser = argument_parser()
    arguments = parser.parse_args(argv)
    for path in arguments.chats:
        if not path.is_file():
            parser.error(f"expected a file of chats, received {path}")
    check_model(parser, arguments.model)
    check_output(parser, arguments.output, ROW_SUFFIXES)
    return arguments
