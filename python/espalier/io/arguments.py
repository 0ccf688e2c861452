# SPDX-License-Identifier: Apache-2.0
"""The command lines of `espalier import` and `espalier export`."""

import argparse
from pathlib import Path

from ..commands.command_line import ROW_SUFFIXES, ArgumentParser, add_bad_row_flags, check_model, check_output, positive
from .formats import NAMES

IMPORT_DESCRIPTION = """\
Converts rollouts of other programs to rows for `espalier train`, `inspect` and
`verify`.

Sampled token ids, log-probabilities, masks, rewards and advantages are kept
unchanged: nothing is tokenised again. Files may be JSON lines (plain, gzip or
zstd), one JSON document, Parquet, or packed rows. Python pickles are never
read: converters of the Python module espalier.io accept a trainer's objects in
memory.

The format is detected from the fields of the first record of each file. If
several formats fit, the command names them and asks for --from. At the end it
prints the number of rows, tokens and tokens with loss, and the fields that were
used and ignored.
"""

IMPORT_EPILOG = """\
formats (--from) and the fields by which they are detected:
  traces              traces.jsonl of verifiers and prime-rl (`traces`, `nodes`): every
                      leaf of a tree is a row
  samples             prime-rl's TrainingSample and token exports (`token_ids`, `mask`)
  verl                batches or samples of a DataProto (`responses`, `attention_mask`)
  skyrl               GeneratorOutput (`prompt_token_ids`, `response_ids`); SFT data are rows
  areal               `input_ids`, `loss_mask`, `versions`
  slime               samples (`tokens`, `response_length`)
  tinker              datums (`model_input`, `loss_fn_inputs`), shifted by one
  trl                 `prompt_ids` with `completion_ids`, or with `chosen_ids` and
                      `rejected_ids`; SFT data are rows
  atif                ATIF 1.7 trajectories (`schema_version`, `steps`), with or without token ids
  rows                `input_ids`, with the names that docs/data-format.md lists
  parquet             any of these, in a Parquet file
  text, which requires --model and is converted by `espalier prepare`: messages,
  sharegpt, prompt-completion, preference (`chosen`, `rejected`), and ATIF without
  token ids

examples:
  espalier import run/rollouts/step_42/train/effective/traces.jsonl -o rows.jsonl.zst
  espalier import rollouts.parquet --from skyrl -o rows.safetensors
  espalier import trajectory.json --model DIR -o rows.jsonl

exit codes: 0 done, 1 bad input, 2 wrong arguments, 130 interrupted. Nothing is
written unless the command succeeds. ESPALIER_TRACEBACK=1 in the environment
prints the traceback of an error.
"""

EXPORT_DESCRIPTION = """\
Converts rows to the formats of other trainers.

Rows may be JSON lines (plain, gzip or zstd), packed, or Parquet. Fields that the
other format lacks are left out and listed.
"""

EXPORT_EPILOG = """\
formats (--to):
  traces              traces.jsonl of verifiers and prime-rl (.jsonl, .jsonl.gz, .jsonl.zst):
                      one episode with one tree for consecutive rows of a group; its nodes
                      are shared by rows. `espalier import` converts it back to the same
                      rows
  parquet             the rows themselves with all their columns (.parquet)
  trl                 `input_ids`, `labels`, `completion_mask`, for SFTTrainer (.parquet,
                      .jsonl, .jsonl.gz, .jsonl.zst)

examples:
  espalier export rows.jsonl --to traces -o traces.jsonl
  espalier export rows.safetensors --to trl -o train.parquet

exit codes: 0 done, 1 bad input, 2 wrong arguments, 130 interrupted. Nothing is
written unless the command succeeds.
"""

JSON_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
EXPORT_SUFFIXES = {"traces": JSON_SUFFIXES, "parquet": (".parquet",), "trl": (".parquet", *JSON_SUFFIXES)}


def import_parser():
    parser = ArgumentParser(prog="espalier import", description=IMPORT_DESCRIPTION, epilog=IMPORT_EPILOG,
                            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="files of rollouts, read in order")
    parser.add_argument("--from", dest="format", choices=NAMES, metavar="FORMAT",
                        help="format of the records (default: detected from their fields)")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="ROWS",
                        help="ROWS.jsonl, .jsonl.gz, .jsonl.zst, or packed: ROWS.safetensors")
    parser.add_argument("--model", type=Path, metavar="DIR",
                        help="Hugging Face directory with tokenizer and chat template, for text")
    parser.add_argument("--per-turn", action="store_true",
                        help="one row per turn of the assistant, for ATIF trajectories and text")
    parser.add_argument(
        "--shared-targets",
        choices=("once", "sum"),
        default="once",
        help="sampled messages in several branches of a trace carry loss in the first of them (once), as in "
        "prime-rl, or in all of them (default: %(default)s)")
    parser.add_argument("--loss-weights", metavar="NAME",
                        help="the weights to use if traces or samples have several, such as rl or ce")
    parser.add_argument(
        "--turn-rewards",
        action="store_true",
        help="sum per-token rewards of verl and SkyRL over each turn (turn_rewards); without it, over the whole "
        "row (reward)")
    parser.add_argument("--include-failed", action="store_true", help="also convert traces that failed")
    parser.add_argument("--limit", type=positive, metavar="N", help="stop after N rows (of text: conversations)")
    add_bad_row_flags(parser)
    return parser


def export_parser():
    parser = ArgumentParser(prog="espalier export", description=EXPORT_DESCRIPTION, epilog=EXPORT_EPILOG,
                            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("files", nargs="+", type=Path, metavar="ROWS", help="files of rows, read in order")
    parser.add_argument("--to", dest="format", choices=tuple(EXPORT_SUFFIXES), required=True, help="format to write")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="file to write")
    add_bad_row_flags(parser)
    return parser


def parse_import(argv):
    parser = import_parser()
    arguments = parser.parse_args(argv)
    _check_files(parser, arguments.files)
    if arguments.model is not None:
        check_model(parser, arguments.model)
    check_output(parser, arguments.output, ROW_SUFFIXES)
    return arguments


def parse_export(argv):
    parser = export_parser()
    arguments = parser.parse_args(argv)
    _check_files(parser, arguments.files)
    check_output(parser, arguments.output, EXPORT_SUFFIXES[arguments.format])
    return arguments


def _check_files(parser, files):
    for path in files:
        if not path.is_file():
            parser.error(f"expected a file, received {path}")
