# SPDX-License-Identifier: Apache-2.0
"""`espalier serve`."""

import argparse
from collections.abc import Sequence

from ..commands.command import run_command
from ..errors import InputError
from .arguments import parse_arguments
from .arguments import serve_parser as parser

__all__ = ["main", "parser"]


def _serve(arguments: argparse.Namespace) -> None:
    try:
        from . import run
    except ModuleNotFoundError as error:
        raise InputError(f"expected {error.name}, which is not installed: run pip install 'espalier-train[server]'") from None
    run.serve(arguments)


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    values = parse_arguments(list(arguments))
    return run_command("serve", lambda: _serve(values))
