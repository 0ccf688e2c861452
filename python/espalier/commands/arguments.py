# SPDX-License-Identifier: Apache-2.0
"""The command line of `espalier prepare` and `espalier import`, which are one command. Imports only the standard library."""

import argparse
import json
from pathlib import Path

from ..errors import InputError
from ..rows.foreign_files import refuse_folder
from .command_line import ROW_SUFFIXES, ArgumentParser, add_bad_row_flags, check_model, check_output, positive

DESCRIPTION = """\
Converts chats, and rollouts of other programs, to rows of tokens for `espalier
train`, `inspect` and `verify`. `espalier prepare` and `espalier import` are one
command.

Chats (OpenAI-style `messages`, and the formats below) need --model: its chat
template and tokenizer convert them to tokens. Only the assistant's tokens carry
loss, including the end of its turns.

Rollouts with token ids need no model. Sampled token ids, log-probabilities,
masks, rewards and advantages are kept unchanged: nothing is tokenised again.

Files may be JSON lines (plain, gzip or zstd), one JSON document, Parquet, or
packed rows. Python pickles are never read: converters of the Python module
espalier.io accept a trainer's objects in memory. The format is detected from the
fields of the first record of each file. If several formats fit, the command
names them and asks for --from. At the end it prints what it wrote, and which
fields nothing uses.

Without --per-turn a conversation becomes one trajectory with loss on all
assistant messages. With --per-turn every assistant message becomes a separate
trajectory: its prompt is everything before it, and only its tokens carry loss.
Such trajectories share their prompts, and Espalier encodes shared tokens once.
"""

EPILOG = """\
chats (--from) and the fields by which they are detected:
  messages            `messages`; with `response` (the logged answer: loss is on it
                      alone) or `rejected_response` (a preference pair)
  sharegpt            `conversations` of turns with `from` and `value`
  prompt-completion   `prompt` and `completion` (also question, query; response,
                      answer): texts, or lists of messages; loss is on the
                      completion. Alpaca: `instruction`, `output`, with an optional
                      `input` and `history`
  preference          `chosen` and `rejected`, with or without `prompt`: two rows of
                      a pair, with loss on what differs
  atif                ATIF trajectories (`schema_version`, `steps`) without token ids

token ids:
  traces              traces.jsonl of verifiers and prime-rl (`traces`, `nodes`): every
                      leaf of a tree is a row
  samples             prime-rl's TrainingSample and token exports (`token_ids`, `mask`)
  verl                batches or samples of a DataProto (`responses`, `attention_mask`)
  skyrl               GeneratorOutput (`prompt_token_ids`, `response_ids`); SFT data are rows
  areal               `input_ids`, `loss_mask`, `versions`
  slime               samples (`tokens`, `response_length`)
  nemo-rl             `token_ids`, `token_loss_mask`, `input_lengths`
  tinker              datums (`model_input`, `loss_fn_inputs`), shifted by one
  trl                 `prompt_ids` with `completion_ids`, or with `chosen_ids` and
                      `rejected_ids`; SFT data are rows
  atif                ATIF trajectories with token ids
  rows                `input_ids`, with the names that docs/data-format.md lists
  parquet             any of these, in a Parquet file

fields of a chat that change its rows (docs/data-format.md has all of them):
  system, system_prompt, developer    a message before all others
  tools, functions, tool_defs         tool schemas
  chat_template_kwargs, enable_thinking
                                      variables of the template for this row; they
                                      win over --template-args
  weight, loss, train, trainable, loss_mask, loss_weight of a message
                                      its loss: 0 is none
  history                             turns before the others, which carry loss
  label, kto_tag                      true or false: `chosen` of the row
  images, videos, audios              a record that has some is refused
  reward                              copied to the row
  trajectory_id | conversation_id | id, or task_id and trial
                                      name the trajectory (with --per-turn followed
                                      by /turn-K, K from 0)
  the field of --group-by becomes group_id

templates:
  What a template drops is rendered in another form, counted and named, or refused.
  If it cannot render tool calls, they are written into the content, as
  <tool_call>, a line of JSON with name and arguments, </tool_call>.
  If it rewrites history (for instance removes the thinking of earlier turns), a
  turn is not a prefix of the next. This is counted and reported. Every
  trajectory still equals a rendering of the template: without --per-turn such a
  conversation becomes one trajectory per unbroken sequence of turns (/run-J).

examples:
  espalier prepare --model DIR chats.jsonl -o rows.safetensors --per-turn
  espalier prepare --model DIR chats.parquet -o rows.jsonl.zst \\
      --group-by task_id --max-tokens 8192
  espalier import run/rollouts/step_42/train/effective/traces.jsonl -o rows.jsonl.zst
  espalier import rollouts.parquet --from skyrl -o rows.safetensors

exit codes: 0 done, 1 bad input, 2 wrong arguments, 130 interrupted. Nothing is
written unless the command succeeds. ESPALIER_TRACEBACK=1 in the environment
prints the traceback of an error.
"""

# In the order of --from's help: names of io/formats.py, which reading would import NumPy.
FORMATS = ("traces", "samples", "verl", "skyrl", "areal", "slime", "nemo-rl", "tinker", "trl", "atif", "rows", "messages",
           "sharegpt", "prompt-completion", "preference", "parquet")

# Arguments of apply_chat_template that are no variables of a template.
RESERVED = frozenset(("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
                      "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors",
                      "return_dict", "return_assistant_tokens_mask", "sanitize_control_tokens", "tokenizer_kwargs"))  # fmt: skip


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
    if reserved := RESERVED & value.keys():
        raise argparse.ArgumentTypeError(f"expected variables of the template, received {min(reserved)!r}")
    return value


def prepare_parser(name="prepare"):
    parser = ArgumentParser(prog=f"espalier {name}", description=DESCRIPTION, epilog=EPILOG,
                            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="files of chats or of rollouts, read in order")
    parser.add_argument("--from", dest="format", choices=FORMATS, metavar="FORMAT",
                        help="format of the records (default: detected from their fields)")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="ROWS",
                        help="ROWS.jsonl, .jsonl.gz, .jsonl.zst, or packed: ROWS.safetensors")
    parser.add_argument("--group-by", metavar="FIELD",
                        help="field of a record that becomes group_id; a dotted path reaches into objects")
    parser.add_argument("--limit", type=positive, metavar="N", help="stop after N records (of token ids: rows)")
    parser.add_argument("--max-tokens", type=positive, metavar="N", help="drop (and count) longer trajectories")
    parser.add_argument("--workers", type=positive, metavar="N",
                        help="processes that convert chats (default: one for each core); rows do not depend on it")
    add_bad_row_flags(parser)
    chats = parser.add_argument_group("chats")
    chats.add_argument("--model", type=Path, metavar="DIR", help="Hugging Face directory with tokenizer and chat template")
    chats.add_argument("--per-turn", action="store_true", help="one trajectory per assistant message (also of ATIF's token ids)")
    chats.add_argument("--tool-calls", choices=("auto", "template", "content"), default="auto",
                       help="how tool calls are rendered; auto: by the template if it renders those of the data completely "
                            "(default: %(default)s)")
    chats.add_argument("--template-args", type=template_arguments, default={}, metavar="JSON",
                       help='variables for the chat template, such as \'{"enable_thinking": false}\'')
    chats.add_argument("--template-timeout", type=seconds, default=30.0, metavar="SECONDS",
                       help="time limit for the chat template to render one conversation, 0: none (default: %(default)g)")
    tokens = parser.add_argument_group("token ids")
    tokens.add_argument(
        "--shared-targets", choices=("once", "sum"), default="once",
        help="sampled messages in several branches of a trace carry loss in the first of them (once), as in "
        "prime-rl, or in all of them (default: %(default)s)")
    tokens.add_argument("--loss-weights", metavar="NAME",
                        help="the weights to use if traces or samples have several, such as rl or ce")
    tokens.add_argument(
        "--turn-rewards", action="store_true",
        help="sum per-token rewards of verl and SkyRL over each turn (turn_rewards); without it, over the whole "
        "row (reward)")
    tokens.add_argument("--include-failed", action="store_true", help="also convert traces that failed")
    return parser


def parse_prepare(argv, name="prepare"):
    parser = prepare_parser(name)
    arguments = parser.parse_args(argv)
    for path in arguments.files:
        if path.is_dir():
            try:
                refuse_folder(path)
            except InputError as error:
                parser.error(str(error))
        if not path.is_file():
            parser.error(f"expected a file, received {path}")
    if arguments.model is not None:
        check_model(parser, arguments.model)
    check_output(parser, arguments.output, ROW_SUFFIXES)
    return arguments
