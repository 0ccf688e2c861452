# SPDX-License-Identifier: Apache-2.0
"""`espalier import`, which is `espalier prepare` by another name."""

from collections.abc import Sequence

from . import prepare
from .arguments import prepare_parser
from .command_line import ArgumentParser


def parser() -> ArgumentParser:
    """All flags."""
    return prepare_parser("import")


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    return prepare.main(arguments, "import")
