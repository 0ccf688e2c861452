# SPDX-License-Identifier: Apache-2.0
"""`espalier prepare` and `espalier import`: one command, which converts chats and rollouts to rows."""

from ..errors import InputError
from .arguments import parse_prepare
from .arguments import prepare_parser as parser
from .command import run_command
from .console import say

__all__ = ["main", "parser", "run"]


def run(arguments, name="prepare"):
    """Converts all files. `name`: of the command, for its messages. Raises InputError."""
    from ..chats.prepare import prepare_chats
    from ..io.importing import import_tokens, kind_of_file

    kinds = {path: kind_of_file(path, arguments) for path in arguments.files}
    present = {path: kind for path, kind in kinds.items() if kind is not None}
    is_text = [kind.rows is None for kind in present.values()]
    if any(is_text) and not all(is_text):
        described = ", ".join(f"{path} ({kind.name})" for path, kind in present.items())
        raise InputError(f"expected files of token ids or files of text, received both: {described}")
    if any(is_text):
        _refuse_flags(arguments, "token ids", "chats", {
            "--loss-weights": arguments.loss_weights, "--turn-rewards": arguments.turn_rewards,
            "--include-failed": arguments.include_failed, "--shared-targets": arguments.shared_targets != "once"})
        prepare_chats(arguments, kinds, name)
    else:
        _refuse_flags(arguments, "chats", "token ids", {
            "--template-args": present and arguments.template_args,
            "--tool-calls": present and arguments.tool_calls != "auto"})
        import_tokens(arguments, kinds, name)


def _refuse_flags(arguments, expected, received, flags):
    for flag, value in flags.items():
        if value:
            raise InputError(f"{flag}: expected {expected}, received {received} ({arguments.files[0]})")


def main(arguments, name="prepare"):
    """Runs the command and returns its exit status; wrong arguments raise SystemExit."""

    def work():
        values = parse_prepare(arguments, name)
        run(values, name)
        say(f"{name}: wrote {values.output}")

    return run_command(name, work)
