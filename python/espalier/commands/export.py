# SPDX-License-Identifier: Apache-2.0
"""`espalier export`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from .command import run_command
from .command_line import ArgumentParser, add_bad_row_flags, check_output

DESCRIPTION = """\
Converts rows to the formats of other trainers.

Rows may be JSON lines (plain, gzip or zstd), packed, or Parquet. Fields that the
other format lacks are left out and listed.
"""

EPILOG = """\
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
SUFFIXES = {"traces": JSON_SUFFIXES, "parquet": (".parquet",), "trl": (".parquet", *JSON_SUFFIXES)}


def parser() -> ArgumentParser:
    """All flags."""
    made = ArgumentParser(prog="espalier export", description=DESCRIPTION, epilog=EPILOG,
                            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    made.add_argument("files", nargs="+", type=Path, metavar="ROWS", help="files of rows, read in order")
    made.add_argument("--to", dest="format", choices=tuple(SUFFIXES), required=True, help="format to write")
    made.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="file to write")
    add_bad_row_flags(made)
    return made


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The values of flags."""
    made = parser()
    arguments = made.parse_args(words)
    for path in arguments.files:
        if not path.is_file():
            made.error(f"expected a file, received {path}")
    check_output(made, arguments.output, SUFFIXES[arguments.format])
    return arguments


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    from ..io.exporting import run_export

    return run_command("export", lambda: run_export(parse(arguments)))
