# SPDX-License-Identifier: Apache-2.0
"""Commands whose work is in C++ (src/espalier/commands): which library runs them, and what it asks of Python."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..errors import InputError, UsageError
from ..printed import text_of
from ..rows.advice import with_advice
from ..vocabulary import token_bytes
from . import toml
from .command_line import print_whole
from .process import Process
from .version import version_text

WITHOUT_TORCH = ("inspect", "plan", "synth")


class Caller:
    """What a command asks of Python while it runs.

    Attributes:
        version: The text of --version, which runs store.
    """

    def __init__(self) -> None:
        self.version = version_text()

    text_of = staticmethod(text_of)

    @staticmethod
    def read_tables(flag: str, file: bytes, name: str) -> str:
        """The tables [[name]] of the TOML file of a flag."""
        return toml.read_tables(flag, os.fsdecode(file), name)

    @staticmethod
    def read_vocabulary(tokenizer_json: bytes) -> tuple[list[int], bytes]:
        """Offsets and texts of tokens."""
        return token_bytes(Path(os.fsdecode(tokenizer_json)))


class Ranks:
    """The ranks that divide the work of a command: a process group of torch.distributed."""

    def __init__(self, group: str, split: Callable[[int], str], *, is_first: bool) -> None:
        self.group, self.split, self.is_first = group, split, is_first


def texts_of(arguments: argparse.Namespace, *, without: Sequence[str] = ()) -> list[tuple[str, bytes]]:
    """The values of flags as pairs of name and text, in the encoding of file names. Flags that were not used are left out, as are
    --config and those of `without`, which are no options of the library."""
    texts = []
    for name, value in vars(arguments).items():
        if value is not None and name not in ("config", *without):
            parts = value if isinstance(value, list) else [value]
            texts += [(name.replace("_", "-"), b"true" if part is True else os.fsencode(str(part))) for part in parts]
    return texts


def become_ranks(processes: int, arguments: Sequence[str]) -> NoReturn:
    """Makes this process torchrun, which starts so many ranks of a command with its arguments."""
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
                              "-m", "espalier", *arguments])  # fmt: skip


def run_native(name: str, texts: Sequence[tuple[str, bytes]], process: Process, ranks: Ranks | None = None) -> tuple[int, Any]:
    """Runs a command of C++.

    Args:
        name: Of the command.
        texts: Its options, pairs of name and text.
        process: In which it runs.
        ranks: That divide the work.

    Returns:
        The exit status, and what there is to print; None: nothing.

    Raises:
        UsageError: An option cannot have its value.
        InputError: The work fails by what the user gave.
        RuntimeError: It fails otherwise.
    """
    try:
        return _run(name, texts, process, ranks)
    except UsageError:
        raise
    except InputError as error:
        raise with_advice(error) from None


def _run(name: str, texts: Sequence[tuple[str, bytes]], process: Process, ranks: Ranks | None) -> tuple[int, Any]:
    tells = ranks is None or ranks.is_first
    status: int
    if name in WITHOUT_TORCH and not (name == "plan" and dict(texts).get("model")):
        from ..native import core

        process.add(core, tells=tells)
        status, result = core.run_command(name, texts, Caller())
        return status, json.loads(result)
    from ..engine_library import load

    engine: Any = load(f"{name} --model" if name == "plan" else name)
    engine.prepare_process()
    process.add(engine, tells=tells)
    process.stop = engine.StopRequest()
    group, split = (ranks.group, ranks.split) if ranks else ("", lambda _: "")
    status, result = engine.run_command(name, texts, Caller(), process.stop, group, split)
    return status, json.loads(result)


def print_result(kind: str, result: dict[str, Any]) -> None:
    """Prints the text of a result."""
    print_whole(text_of(kind, json.dumps(result)))


def print_json(result: Any, indent: int = 2) -> None:
    """Prints a result as JSON."""
    print_whole(json.dumps(result, indent=indent, ensure_ascii=False) + "\n")
