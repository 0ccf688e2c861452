# SPDX-License-Identifier: Apache-2.0
"""The command line of `espalier prepare`. It imports nothing beyond Python itself."""

import argparse
import json
from pathlib import Path

from .command_line import ROW_SUFFIXES, ArgumentParser, add_bad_row_flags, check_model, check_output, positive

DESCRIPTION = """\
Turns chats into rows of tokens for `espalier train`, `inspect` and `verify`.

Each line of CHATS.jsonl (plain, gzip or zstd) is one JSON object with
OpenAI-style `messages` (roles system, user, assistant and tool; tool calls;
null contents), or a chat in another shape (below). The model's own chat
template and tokenizer make the tokens, and only the tokens that the assistant
writes carry loss, the end of its turn among them.

Without --per-turn a conversation becomes one trajectory with loss on all
assistant messages. With --per-turn every assistant message becomes a trajectory
of its own: its prompt is all that stands before it, and only its own tokens
carry loss. Such trajectories share their prompts, and Espalier encodes what
they share once.
"""

EPILOG = """\
other shapes of chats:
  conversations           ShareGPT: turns with `from` and `value`
  prompt, completion      two texts, or two lists of messages (also `response` or
                          `answer` instead of `completion`)
  instruction, output     Alpaca, with an optional `input`
  A text in `system` beside one of them is the system message.

fields of a line that are used besides:
  reward                  carried into the row
  trajectory_id | conversation_id | id, or task_id and trial
                          name the trajectory (with --per-turn followed by
                          /turn-K, K from 0)
  tools                   tool schemas, given to the template where it renders
                          them
  the field of --group-by becomes group_id

templates:
  Where the template cannot render tool calls they are written into the
  content, as <tool_call>, a line of JSON with name and arguments, </tool_call>.
  Where it rewrites history (for instance removes the thinking of earlier
  turns), a turn is no prefix of the next. This is counted and reported. Every
  trajectory is then still a true render: without --per-turn such a conversation
  gives one trajectory for each unbroken run of turns (named /run-J).

examples:
  espalier prepare --model DIR chats.jsonl -o rows.safetensors --per-turn
  espalier prepare --model DIR chats.jsonl.gz -o rows.jsonl.zst \\
      --group-by task_id --max-tokens 8192

exit codes: 0 done, 1 bad input, 2 wrong arguments, 130 interrupted. Nothing is
written unless all is done. ESPALIER_TRACEBACK=1 in the environment shows where
in the program an error arose.
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
                        help="who renders tool calls; auto: the template where it renders them whole "
                             "(default: %(default)s)")
    parser.add_argument("--template-args", type=template_arguments, default={}, metavar="JSON",
                        help='variables for the chat template, such as \'{"enable_thinking": false}\'')
    parser.add_argument("--template-timeout", type=seconds, default=30.0, metavar="SECONDS",
                        help="time for the chat template to render one conversation, 0: any (default: %(default)g)")
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
