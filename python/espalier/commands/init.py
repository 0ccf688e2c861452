# SPDX-License-Identifier: Apache-2.0
"""Runs `espalier init`: a random model."""

import json
import sys

from ..errors import InputError
from .command_line import print_whole
from .console import count_of, printable
from .model_command import main
from .model_flags import ModelParser, whole, word

DESCRIPTION = """\
Create a model with random weights from a config.json, initialised as in Transformers.
"""

EPILOG = """\
docs/models.md lists the families. Example:
  espalier init --config examples/tiny_llama.json --out tiny --tokenizer bytes
"""
TOKENIZERS, DTYPES = ("none", "bytes"), ("float64", "float32", "bfloat16")
LEAST_TOKENS = 259  # 256 bytes and three special tokens


def init_parser():
    """All flags. --config is the model's here, not a file of flags."""
    parser = ModelParser("init", DESCRIPTION, EPILOG, usage="espalier init --config FILE --out DIR [FLAGS]")
    parser.group("Model to make")
    parser.flag("config", "config.json of a model of a family that Espalier has", "FILE", path="file", required=True)
    parser.flag("out", "Folder to create; must be empty or new", "DIR", path="folder", required=True)
    parser.flag("seed", "Random seed; equal seeds give equal weights", "N", whole(most=(1 << 64) - 1), default="0")
    parser.flag("tokenizer", "bytes: also write a byte-level tokenizer (ids 0 to 255 are the bytes) with the ChatML template; "
                "none: no tokenizer", "none|bytes", word(TOKENIZERS), words=TOKENIZERS, default="none")  # fmt: skip
    parser.flag("dtype", "Precision of the weights", "|".join(DTYPES), word(DTYPES), words=DTYPES, default="float32")
    parser.help()
    return parser


def init(arguments):
    """Raises InputError.

    Args:
        arguments: Of init_parser.
    """
    try:
        from ..native_engine import native
    except ImportError as error:
        raise InputError(f"init needs LibTorch: {error}") from None
    from ..printed.tokenizer import tokenizer_files

    dtype, has_tokenizer = arguments.dtype or "float32", arguments.tokenizer == "bytes"
    files = json.loads(tokenizer_files()) if has_tokenizer else {}
    parameters = native.init_model(arguments.config, arguments.out, arguments.seed or 0, dtype, files,
                                   LEAST_TOKENS if has_tokenizer else 0)  # fmt: skip
    print_whole(f"{printable(arguments.out)}: {count_of(parameters, 'parameter')} in {dtype}\n")


def parse(arguments):
    """Of the command line."""
    return init_parser().parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(parse, init))
