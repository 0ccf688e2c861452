# SPDX-License-Identifier: Apache-2.0
"""Runs `espalier merge`: python3 -m espalier.commands.merge --model DIR --adapter DIR --out DIR."""

import argparse
import json
import sys
from pathlib import Path

from ..errors import InputError
from .command import run_command
from .command_line import ArgumentParser, check_model, positive
from .console import say

DTYPES = ("float32", "float64", "bfloat16")

DESCRIPTION = """\
Adds an adapter to the weights of its model and writes the result as a new model.

The new folder has the tensor names, files and tokenizer of --model and works with
the same software. Sums are computed in at least float32 and rounded once.
"""

EPILOG = """\
example:
  espalier merge --model DIR --adapter RUN/checkpoints/step_100 -o merged

exit codes: 0 done, 1 bad input, 2 wrong arguments.
"""


def merge_parser():
    """All flags."""
    parser = ArgumentParser(prog="espalier merge", description=DESCRIPTION, epilog=EPILOG,
                            formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="Hugging Face folder of the model")
    add("--adapter", type=Path, required=True, metavar="DIR", help="adapter of the model, a PEFT folder")
    add("-o", "--out", type=Path, required=True, metavar="DIR", help="folder to create; must be empty or new")
    add("--dtype", choices=DTYPES,
        help="precision of the merged weights (default: that of config.json, or float32 if it has none of these)")  # fmt: skip
    add("--threads", type=positive, metavar="N", help="CPU threads (default: all cores)")
    return parser


def _dtype(model):
    """That of the model's files, or float32 if it cannot be written, or where the engine will say what is wrong with them."""
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        parts = [config, config.get("text_config") or {}]
        dtype = next((part[name] for part in parts for name in ("dtype", "torch_dtype") if part.get(name)), None)
    except (OSError, ValueError, AttributeError):
        return "float32"
    if dtype is not None and dtype not in DTYPES:
        say(f"note: the model is in {dtype}; the merged one is written in float32")
    return dtype if dtype in DTYPES else "float32"


def merge(arguments):
    """Raises InputError.

    Args:
        arguments: Of merge_parser.
    """
    try:
        from ..engine import Engine
    except ImportError as error:  # says what to install
        raise InputError(str(error)) from None

    out, options = arguments.out, {} if arguments.threads is None else {"threads": arguments.threads}
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out}: expected a new or empty folder, it has files")
    dtype = arguments.dtype or _dtype(arguments.model)
    engine = Engine(arguments.model, adapters=True, dtype=dtype, device="cpu", **options)
    engine.use(engine.new_adapter(adapter=arguments.adapter))
    engine.save(out, merged=True)
    print(f"{out}: {arguments.adapter} merged, in {dtype}")


def main(arguments=None):
    parser = merge_parser()
    found = parser.parse_args(arguments)
    check_model(parser, found.model)
    return run_command("merge", lambda: merge(found))


if __name__ == "__main__":
    sys.exit(main())
