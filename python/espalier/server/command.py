# SPDX-License-Identifier: Apache-2.0
"""Runs `espalier serve`."""

import argparse

from ..commands.command import run_command
from ..errors import InputError
from .arguments import parse_arguments


def _serve(arguments: argparse.Namespace) -> None:
    try:
        from . import run
    except ModuleNotFoundError as error:
        raise InputError(f"expected {error.name}, which is not installed: run pip install 'espalier-train[server]'") from None
    run.serve(arguments)


def main() -> int:
    """Returns the exit code."""
    arguments = parse_arguments()
    return int(run_command("serve", lambda: _serve(arguments)))
