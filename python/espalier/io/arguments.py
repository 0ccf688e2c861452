# SPDX-License-Identifier: Apache-2.0
"""The command line of `espalier export`."""

import argparse
from pathlib import Path

from ..commands.command_line import ArgumentParser, add_bad_row_flags, check_output

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


def export_parser():
    parser = ArgumentParser(prog="espalier export", description=EXPORT_DESCRIPTION, epilog=EXPORT_EPILOG,
                            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("files", nargs="+", type=Path, metavar="ROWS", help="files of rows, read in order")
    parser.add_argument("--to", dest="format", choices=tuple(EXPORT_SUFFIXES), required=True, help="format to write")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="file to write")
    add_bad_row_flags(parser)
    return parser


def parse_export(argv):
    parser = export_parser()
    arguments = parser.parse_args(argv)
    for path in arguments.files:
        if not path.is_file():
            parser.error(f"expected a file, received {path}")
    check_output(parser, arguments.output, EXPORT_SUFFIXES[arguments.format])
    return arguments
