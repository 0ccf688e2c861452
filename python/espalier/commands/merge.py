# SPDX-License-Identifier: Apache-2.0
"""`espalier merge`."""

import argparse
import json
from pathlib import Path

from ..errors import InputError
from .command import run_work
from .command_line import ArgumentParser, check_model, positive, print_whole
from .console import say
from .model_command import Work

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


def parser():
    """All flags."""
    made = ArgumentParser(prog="espalier merge", description=DESCRIPTION, epilog=EPILOG,
                            formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = made.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="Hugging Face folder of the model")
    add("--adapter", type=Path, required=True, metavar="DIR", help="adapter of the model, a PEFT folder")
    add("-o", "--out", type=Path, required=True, metavar="DIR", help="folder to create; must be empty or new")
    add("--dtype", choices=DTYPES,
        help="precision of the merged weights (default: that of config.json, or float32 if it has none of these)")  # fmt: skip
    add("--threads", type=positive, metavar="N", help="CPU threads (default: all cores)")
    return made


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


def work(arguments, process):
    """Raises InputError."""
    here = Work("merge", process)
    out, options = arguments.out, {} if arguments.threads is None else {"threads": arguments.threads}
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out}: expected a new or empty folder, it has files")
    dtype = arguments.dtype or _dtype(arguments.model)
    engine = here.engine(arguments.model, {"dtype": dtype, "device": "cpu", **options})
    engine.use(engine.new_adapter(adapter=arguments.adapter))
    engine.save(out, merged=True)
    print_whole(f"{out}: {arguments.adapter} merged, in {dtype}\n")


def parse(arguments):
    """The values of flags."""
    made = parser()
    values = made.parse_args(arguments)
    check_model(made, values.model)
    return values


def main(arguments):
    """Runs the command and returns its exit status."""
    return run_work("merge", parse, work, arguments)
