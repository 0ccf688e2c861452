# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  an interrupt is to end it quietly from the first import on
"""Runs `espalier inspect` on files that are no rows: python3 -m espalier.commands.raw_rows PROGRAM [INSPECT...] -- PREPARE...

PREPARE are arguments of `espalier prepare` without -o. Its rows are packed into a temporary folder, on which PROGRAM runs as
`inspect` with the flags INSPECT. The folder is removed before this process ends, also at an error or by a signal, which ends
PROGRAM too.
"""

import _signal  # type: ignore[import-not-found]  # built in, unlike `signal`, for which files are read

# While modules are read, an interrupt ends the command without a traceback.
INTERRUPT_RAISES = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
if __name__ == "__main__" and INTERRUPT_RAISES:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from ..errors import InputError
from ..io.importing import kind_of_file
from .arguments import parse_prepare, prepare_parser
from .command import run_command
from .prepare import run

FLAGS = {"--model", "--per-turn", "--limit", "--max-row-bytes", "--skip-bad-rows"}  # of `prepare` that `inspect` has


def inspect_raw(program, flags, prepare_words):
    """Prints the report and returns the exit code. Raises InputError."""
    with tempfile.TemporaryDirectory(prefix="espalier-inspect-") as folder:
        rows = Path(folder) / "rows.safetensors"
        arguments = parse_prepare(["-o", str(rows), *prepare_words])
        try:
            _check(arguments)
            run(arguments)
        except InputError as error:
            raise InputError(f"{error}{_advice(str(error))}") from None
        return _run_program([program, "inspect", *flags, f"--data={rows}",
                             *(f"--converted-from={file}" for file in arguments.files)])


def _check(arguments):
    """Raises InputError for text without a model, and for --per-turn without turns."""
    kinds = {path: kind_of_file(path, arguments) for path in arguments.files}
    for path, kind in kinds.items():
        if kind and kind.rows is None and arguments.model is None:
            raise InputError(f"{path}: expected `espalier inspect --model DIR`, whose tokenizer and chat template convert text "
                             f"({kind.name}) to tokens, received no model")
        if kind and kind.rows and kind.name != "atif" and arguments.per_turn:
            raise InputError(f"--per-turn: expected chats, received {kind.name} ({path})")


def _advice(message):
    """Where the flags are that a message of `prepare` names and `inspect` lacks."""
    unknown = prepare_parser()._option_string_actions.keys() - FLAGS
    named = [flag for flag in dict.fromkeys(re.findall(r"--[a-z-]+", message)) if flag in unknown]
    return f" (`espalier prepare` has {' and '.join(named)}, and `inspect` reads the rows that it writes)" if named else ""


def _run_program(words):
    process = subprocess.Popen(words)
    try:
        code = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    return code if code >= 0 else 128 - code


def main(words):
    end = words.index("--")
    program, *flags = words[:end]
    return run_command("inspect", lambda: sys.exit(inspect_raw(program, flags, words[end + 1:])))


if __name__ == "__main__":
    if INTERRUPT_RAISES:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
