# SPDX-License-Identifier: Apache-2.0
"""`espalier inspect`. Files that are no rows are converted first, to a temporary folder."""

import argparse
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError
from .command import run_command
from .command_line import print_whole
from .console import printable
from .native import print_result, run_native, texts_of
from .parser import OUTPUT, CommandParser
from .process import Process

DESCRIPTION = "Show which prefixes the trajectories share, what that gains, and what is lost."
EPILOG = """\
The data may also be chats, preference pairs or rollouts of other programs, in the
formats and files that `espalier prepare --help` lists, Parquet included. They are
converted first, as `prepare` does it, to a temporary file in $TMPDIR. Text needs
--model, and --limit counts records of text.
"""
PREPARE_FLAGS = {"--model", "--per-turn", "--limit", "--max-row-bytes", "--skip-bad-rows"}  # of `prepare` that `inspect` has


def parser() -> CommandParser:
    """All flags."""
    made = CommandParser("inspect", DESCRIPTION, EPILOG)
    made.options("inspect")
    made.group(OUTPUT)
    made.flag("json", "Print JSON")
    made.others()
    return made


def _inspect(words: Sequence[str]) -> None:
    """Prints the report."""
    arguments, process = parser().parse(words), Process()
    texts = texts_of(arguments, without=("json",))
    result = _report(texts, process)
    if "convert" in result:
        with tempfile.TemporaryDirectory(prefix="espalier-inspect-") as folder:
            rows = Path(folder) / "rows.safetensors"
            _convert(arguments, result["convert"], rows)
            kept = [(name, text) for name, text in texts if name in ("model", "html")]
            converted = [("converted-from", file) for file in result["convert"]]
            result = _report([("data", str(rows)), *kept, *converted], process)
    has_model = arguments.model is not None
    print_result("inspect", result | {"has_model": has_model, "as_json": bool(arguments.json)})
    if arguments.html and not arguments.json:
        print_whole(f"wrote {printable(arguments.html)}\n")


def _report(texts: Sequence[tuple[str, str]], process: Process) -> dict[str, Any]:
    """Signals raise, so that the temporary folder is removed."""
    result: dict[str, Any] = process.run(lambda: run_native("inspect", texts, process)[1], handles_signals=False)
    return result


def _convert(arguments: argparse.Namespace, files: Sequence[str], rows: Path) -> None:
    """Writes the rows of files that are none."""
    from .arguments import parse_prepare
    from .prepare import run

    words = ["-o", str(rows)]
    for name in ("model", "limit", "max-row-bytes"):
        value = getattr(arguments, name.replace("-", "_"))
        words += [f"--{name}={value}"] if value is not None and value != "0" else []
    words += ["--per-turn"] if arguments.per_turn else []
    words += ["--skip-bad-rows"] if arguments.skip_bad_rows else []
    prepare_arguments = parse_prepare([*words, "--", *files])
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
