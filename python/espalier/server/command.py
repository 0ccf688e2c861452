# SPDX-License-Identifier: Apache-2.0
"""`espalier serve`."""

import argparse
from collections.abc import Sequence

from ..commands.command import run_command
from ..errors import InputError
from .arguments import parse_arguments
from .arguments import serve_parser as parser
from .listening import listen

__all__ = ["main", "parser"]


def _serve(arguments: argparse.Namespace) -> None:
    # First: until it listens clients are refused, and try again after up to 30 s. Then they wait until it answers.
    with listen(arguments.host, arguments.port, has_key=bool(arguments.api_keys)) as listener:
        try:
            from . import run
        except ModuleNotFoundError as error:
            raise InputError(f"expected {error.name}, which is not installed: run pip install 'espalier-train[server]'") from None
        run.serve(arguments, listener)


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    values = parse_arguments(list(arguments))
    return run_command("serve", lambda: _serve(values))
