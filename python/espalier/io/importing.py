# SPDX-License-Identifier: Apache-2.0
"""`espalier import`: converts rollouts of other programs to rows."""

import json
from functools import partial
from pathlib import Path

from ..commands.console import clipped, say
from ..commands.progress import Progress
from ..errors import BadRow, InputError
from ..rows.writer import row_writer
from . import atif, preference, trl
from .fields import Fields
from .formats import FORMATS, Format, Options, format_of
from .report import Report, files_named
from .sources import is_parquet, records_of

ROUNDED = ("log-probabilities have at most 4 decimals: rounding changes ratios of probabilities by up to 5e-5, so an "
           "unchanged policy has ratios near 1, not exactly 1")


def run_import(arguments):
    """Reads all files and writes all rows. Raises InputError."""
    kinds = {path: _kind(path, arguments) for path in arguments.files}
    given = [kind for kind in kinds.values() if kind is not None]
    is_text = [kind.rows is None for kind in given]
    if any(is_text):
        if not all(is_text):
            described = ", ".join(f"{path} ({kind.name})" for path, kind in kinds.items() if kind)
            raise InputError(f"expected files of token ids or files of text, received both: {described}")
        _prepare(arguments, kinds)
        return
    report = Report()
    with row_writer(arguments.output) as writer:
        _write_rows(writer, kinds, arguments, report)
        _refuse_useless(arguments, report)
    _tell(report)
    kind_names = ", ".join(dict.fromkeys(kind.name for kind in given))
    say(f"import: {kind_names}: {report.summary()}")
    say(f"import: wrote {arguments.output}")


def _kind(path, arguments):
    """The format of a file, by its first valid record; None for a file without records."""
    if arguments.format == "parquet" and not is_parquet(path):
        raise InputError(f"{path}: expected a Parquet file, received another; --from names the format of its records")
    first_error = None
    for where, record in records_of(path, arguments.max_row_bytes, lambda fraction: None):
        try:
            if isinstance(record, BadRow):
                raise InputError(f"{where}: {record}")
            kind = format_of(record, where, arguments.format)
        except InputError as error:
            if not arguments.skip_bad_rows:
                raise
            first_error = first_error or error
            continue
        return TEXT_ATIF if kind.name == "atif" and not atif.has_token_ids(record) else kind
    if first_error:
        raise first_error
    return None


TEXT_ATIF = Format("atif", FORMATS["atif"].fields, atif.is_trajectory, None)  # without token ids


def _write_rows(writer, kinds, arguments, report):
    options = Options(arguments.loss_weights, arguments.shared_targets, arguments.include_failed, arguments.per_turn,
                      arguments.turn_rewards)
    with Progress("import") as progress:
        for number, path in enumerate(arguments.files):
            kind = kinds[path]

            def tick(fraction, number=number):
                part = (number + fraction) / len(arguments.files)
                progress.update(part, f"{report.rows:,} rows, {report.tokens:,} tokens")

            for where, record in records_of(path, arguments.max_row_bytes, tick):
                for row in _rows_of(where, record, kind, options, arguments.skip_bad_rows, report):
                    if arguments.limit and report.rows >= arguments.limit:
                        return
                    writer.add(row)
                    report.count(row)
                    if kind.name == "traces":
                        report.tally.see_logprobs(row.get("logprobs", ()))


def _rows_of(where, record, kind, options, skip, report):
    """The rows of one record: all of them, or none if one is bad and bad records are counted."""
    try:
        if isinstance(record, BadRow):
            raise record
        if not kind.matches(record):
            raise BadRow("<record>", f"a record of {kind.name} (with {kind.fields}) like the first record", "one without")
        fields = Fields(record, report.tally)
        if kind.name == "trl":
            return list(trl.rows(fields, options, Path(where).name))
        return list(kind.rows(fields, options))
    except BadRow as error:
        report.bad(f"{where}: {error}", skip)
    except (RecursionError, OverflowError, TypeError, ValueError, AttributeError) as error:
        report.bad(f"{where}: expected a record of {kind.name} with fields of the documented types, received others "
                   f"({type(error).__name__}: {clipped(str(error), 100)})", skip)
    return []


def _tell(report):
    for line in report.notes():
        say(f"import: {line}")
    if report.tally.decimals == 4:
        say(f"import: warning: {ROUNDED}")


def _refuse_useless(arguments, report):
    """Raises InputError if there is nothing to train on."""
    if report.rows and report.loss_tokens:
        return
    _tell(report)
    files = files_named(arguments.files)
    if not report.rows:
        raise InputError(f"{files}: expected at least one row, received none")
    raise InputError(f"{files}: expected tokens with loss, received {report.rows:,} rows without any")


def _prepare(arguments, kinds):
    """Passes text to `espalier prepare`."""
    from ..commands import prepare
    from ..commands.arguments import parse_arguments

    if arguments.model is None:
        path, kind = next((path, kind) for path, kind in kinds.items() if kind)
        raise InputError(
            f"{path}: expected --model DIR, whose tokenizer and chat template convert text ({kind.name}) to tokens, "
            "received none")
    if arguments.per_turn and any(kind.name == "preference" for kind in kinds.values() if kind):
        raise InputError("--per-turn: expected chats, received preference pairs, which cannot be split into turns")
    words = [
        "--model",
        str(arguments.model), "-o",
        str(arguments.output), "--max-row-bytes",
        str(arguments.max_row_bytes)
    ]
    words += ["--per-turn"] * arguments.per_turn + ["--skip-bad-rows"] * arguments.skip_bad_rows
    if arguments.limit:  # a pair is two conversations
        pairs = any(kind.name == "preference" for kind in kinds.values() if kind)
        words += ["--limit", str(arguments.limit * (1 + pairs))]
    prepare.run(parse_arguments([*words, "--", *map(str, arguments.files)]), partial(_chats, kinds, prepare.Names()))


def _chats(kinds, names, path, most_bytes, tick):
    """Yields (where, chat as bytes of JSON, or BadRow). names: of pairs, over all files."""
    kind = kinds[path]
    for where, record in records_of(path, most_bytes, tick):
        try:
            if isinstance(record, BadRow):
                raise record
            chats = [record]
            if kind.name == "atif":
                chats = [atif.chat_of(record)]
            elif kind.name == "preference":
                chats = preference.chats_of(record, Path(where).name, names)
        except BadRow as error:
            yield where, error
            continue
        for chat in chats:
            yield where, json.dumps(chat).encode()
