# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the command lines of commands written in Python. Imports only the standard library."""

import argparse
import difflib
import errno
import os
import re
import sys

from .console import say, write

ROW_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".safetensors")


def positive(text):
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, received {text!r}")
    return value


def nearest_word(word, known):
    """That of `known` which `word` is similar to; None: none is."""
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=0.5)), None)


def byte_count(text):
    """A size such as 8GiB, 500MB or a number of bytes."""
    size = re.fullmatch(r"(\d{1,19}\.?\d{0,19}) *(?:([kmgtpe])(i)?)?b?", str(text), re.ASCII | re.IGNORECASE)
    power = " kmgtpe".index(size[2].lower()) if size and size[2] else 0
    count = int(float(size[1]) * (1024 if size[3] else 1000) ** power) if size else 0
    if not 0 < count < 1 << 63:
        raise argparse.ArgumentTypeError(f"expected a size such as 8GiB or 500MB, received {text!r}")
    return count


class OutputError(Exception):
    """Standard output cannot be written."""


def print_whole(text):
    """Writes to standard output. Raises OutputError if that fails, BrokenPipeError if the reader has closed it."""
    if sys.stdout is None:
        raise OutputError(os.strerror(errno.EBADF))
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # Otherwise Python would try to flush the buffer again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise OutputError(error.strerror or str(error)) from None


class ArgumentParser(argparse.ArgumentParser):
    def error(self, message):
        unknown = re.fullmatch(r"unrecognized arguments: (--[\w-]+).*", message, re.DOTALL)
        if unknown:
            near = nearest_word(unknown[1], self._option_string_actions)
            message = f"unknown flag {unknown[1]} of `{self.prog}`" + (f"; did you mean {near}?" if near else "")
        say(f"espalier: error: {message} (see `{self.prog} --help`)")
        sys.exit(2)

    def _print_message(self, message, file=None):
        """argparse ignores failures to write the help; here they fail the command."""
        if file is not sys.stdout:
            write(message)
            return
        print_whole(message)


def hub_advice(missing):
    """Advice if a missing folder is the name of a Hugging Face Hub model."""
    name = str(missing)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) or missing.parent.exists():
        return ""
    return (f"; it looks like a model of the Hugging Face Hub, which `hf download {name} --local-dir {missing.name}` "
            "downloads")


def add_bad_row_flags(parser):
    parser.add_argument("--max-row-bytes", type=byte_count, default=256 << 20, metavar="SIZE",
                        help="longer lines, such as of 1GiB, are bad rows and do not fill the memory (default: 256MiB)")
    parser.add_argument("--skip-bad-rows", action="store_true",
                        help="count and report bad lines instead of stopping at the first")


def check_model(parser, model):
    if not model.is_dir():
        parser.error(f"argument --model: expected a directory, received {model}{hub_advice(model)}")


def check_output(parser, output, suffixes):
    """Refuses an output file in a missing folder, or with none of the suffixes."""
    if not output.resolve().parent.is_dir():
        parser.error(f"argument -o: expected a path in an existing folder, received {output}")
    if not output.name.endswith(suffixes):
        *others, last = suffixes
        names = f"{', '.join(others)} or {last}" if others else last
        parser.error(f"argument -o: expected a name in {names}, received {output.name}")
