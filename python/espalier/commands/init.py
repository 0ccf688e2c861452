# SPDX-License-Identifier: Apache-2.0
"""`espalier init`: a random model."""

from .command import run_work
from .command_line import print_whole
from .console import count_of, printable
from .parser import CommandParser, whole, word

DESCRIPTION = """\
Create a model with random weights from a config.json, initialised as in Transformers.
"""

EPILOG = """\
docs/models.md lists the families. Example:
  espalier init --config examples/tiny_llama.json --out tiny --tokenizer bytes
"""
TOKENIZERS, DTYPES = ("none", "bytes"), ("float64", "float32", "bfloat16")
LEAST_TOKENS = 259  # 256 bytes and three special tokens


def parser():
    """All flags. --config is the model's here, not a file of flags."""
    made = CommandParser("init", DESCRIPTION, EPILOG, usage="espalier init --config FILE --out DIR [FLAGS]")
    made.group("Model to make")
    made.flag("config", "config.json of a model of a family that Espalier has", "FILE", path="file", required=True)
    made.flag("out", "Folder to create; must be empty or new", "DIR", path="folder", required=True)
    made.flag("seed", "Random seed; equal seeds give equal weights", "N", whole(most=(1 << 64) - 1), default="0")
    made.flag("tokenizer", "bytes: also write a byte-level tokenizer (ids 0 to 255 are the bytes) with the ChatML template; "
                "none: no tokenizer", "none|bytes", word(TOKENIZERS), words=TOKENIZERS, default="none")  # fmt: skip
    made.flag("dtype", "Precision of the weights", "|".join(DTYPES), word(DTYPES), words=DTYPES, default="float32")
    made.help()
    return made


def work(arguments, process):
    """Raises InputError."""
    from ..engine_library import load
    from ..printed.tokenizer import tokenizer_files

    engine = load("init")
    process.add(engine)
    dtype, has_tokenizer = arguments.dtype or "float32", arguments.tokenizer == "bytes"
    files = tokenizer_files() if has_tokenizer else {}
    parameters = engine.init_model(arguments.config, arguments.out, arguments.seed or 0, dtype, files,
                                   LEAST_TOKENS if has_tokenizer else 0)  # fmt: skip
    print_whole(f"{printable(arguments.out)}: {count_of(parameters, 'parameter')} in {dtype}\n")


def main(arguments):
    """Runs the command and returns its exit status."""
    return run_work("init", lambda words: parser().parse(words), work, arguments)
