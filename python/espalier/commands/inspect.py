# SPDX-License-Identifier: Apache-2.0
"""`espalier inspect`. Files that are no rows are converted first, to a temporary folder."""

import argparse
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..rows.advice import needs_conversion
from .command import run_command
from .command_line import byte_count, print_whole
from .console import printable
from .native import print_result, run_native, texts_of
from .parser import DATA, OUTPUT, CommandParser
from .process import Process

EPILOG = """\
The data may also be chats, preference pairs or rollouts of other programs, in the
formats and files that `espalier prepare --help` lists, Parquet included. They are
converted first, as `prepare` does it, to a temporary file in $TMPDIR. Text needs
--model, and --limit counts records of text.
"""
PREPARE_FLAGS = {"--model", "--per-turn", "--limit", "--max-row-bytes", "--skip-bad-rows"}  # of `prepare` that `inspect` has


def parser() -> CommandParser:
    """All flags."""
    made = CommandParser("inspect", epilog=EPILOG)
    made.options("inspect")
    made.group(DATA)
    made.flag("per-turn", "Chats: one trajectory for each message of the assistant, not one for each conversation")
    made.group(OUTPUT)
    made.flag("json", "Print JSON")
    made.others()
    return made


def _inspect(words: Sequence[str]) -> None:
    """Prints the report."""
    arguments, process = parser().parse(words), Process()
    from ..native import core  # not for --help

    texts = texts_of(arguments, without=("json", "per_turn"))
    core.check_options("inspect", texts)
    files = core.expand_file_patterns(arguments.data or [])
    if _needs_conversion(files, arguments):
        with tempfile.TemporaryDirectory(prefix="espalier-inspect-") as folder:
            rows = Path(folder) / "rows.safetensors"
            _convert(arguments, files, rows)
            kept = [(name, text) for name, text in texts if name in ("model", "html")]
            converted = [("converted-from", os.fsencode(file)) for file in files]
            result = _report([("data", os.fsencode(rows)), *kept, *converted], process)
    else:
        result = _report(texts, process)
    has_model = arguments.model is not None
    print_result("inspect", result | {"has_model": has_model, "as_json": bool(arguments.json)})
    if arguments.html and not arguments.json:
        print_whole(f"wrote {printable(arguments.html)}\n")


def _needs_conversion(files: Sequence[Path], arguments: argparse.Namespace) -> bool:
    """Whether `espalier prepare` has to convert the files first. Raises InputError where it has to convert only some of them."""
    from ..native import core

    most = byte_count(arguments.max_row_bytes or core.MAX_ROW_BYTES)
    raw = [file for file in files if needs_conversion(file, most, skips=bool(arguments.skip_bad_rows))]
    rows = [file for file in files if file not in raw]
    if raw and rows:
        raise InputError("--data: expected files of rows, or files that are converted to rows, received both: "
                         f"{raw[0]} is converted, {rows[0]} is not; convert the former with `espalier prepare`")
    if rows and arguments.per_turn:
        raise InputError(f"--per-turn: expected chats, received rows ({rows[0]})")
    return bool(raw)


def _report(texts: Sequence[tuple[str, bytes]], process: Process) -> dict[str, Any]:
    """Signals raise, so that the temporary folder is removed."""
    result: dict[str, Any] = process.run(lambda: run_native("inspect", texts, process)[1], handles_signals=False)
    return result


def _convert(arguments: argparse.Namespace, files: Sequence[Path], rows: Path) -> None:
    """Writes the rows that `prepare` makes of files."""
    from .arguments import parse_prepare
    from .prepare import run

    words = ["-o", str(rows)]
    for name in ("model", "limit", "max-row-bytes"):
        value = getattr(arguments, name.replace("-", "_"))
        words += [f"--{name}={value}"] if value is not None and value != "0" else []
    words += ["--per-turn"] if arguments.per_turn else []
    words += ["--skip-bad-rows"] if arguments.skip_bad_rows else []
    prepare_arguments = parse_prepare([*words, "--", *map(str, files)])
    try:
        _check(prepare_arguments)
        run(prepare_arguments)
    except InputError as error:
        raise InputError(f"{error}{_advice(str(error))}") from None


def _check(arguments: argparse.Namespace) -> None:
    """Raises InputError for text without a model, and for --per-turn without turns."""
    from ..io.importing import kind_of_file

    kinds: dict[Path, Any] = {path: kind_of_file(path, arguments) for path in arguments.files}
    for path, kind in kinds.items():
        if kind and kind.rows is None and arguments.model is None:
            raise InputError(f"{path}: expected `espalier inspect --model DIR`, whose tokenizer and chat template convert text "
                             f"({kind.name}) to tokens, received no model")
        if kind and kind.rows and kind.name != "atif" and arguments.per_turn:
            raise InputError(f"--per-turn: expected chats, received {kind.name} ({path})")


def _advice(message: str) -> str:
    """Where the flags are that a message of `prepare` names and `inspect` lacks."""
    from .arguments import prepare_parser

    unknown = prepare_parser()._option_string_actions.keys() - PREPARE_FLAGS
    named = [flag for flag in dict.fromkeys(re.findall(r"--[a-z-]+", message)) if flag in unknown]
    return f" (`espalier prepare` has {' and '.join(named)}, and `inspect` reads the rows that it writes)" if named else ""


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    return run_command("inspect", lambda: _inspect(arguments))
