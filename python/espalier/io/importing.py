# SPDX-License-Identifier: Apache-2.0
"""Rollouts of other programs, which have token ids, as rows."""

from pathlib import Path

from ..commands.console import clipped, say
from ..errors import BadRow, InputError
from . import atif, trl
from .fields import Fields, scalar_at
from .formats import FORMATS, Format, format_of
from .parts import Options
from .report import Report, files_named
from .sources import is_parquet, records_of, records_of_files

ROUNDED = ("log-probabilities have at most 4 decimals: rounding changes ratios of probabilities by up to 5e-5, so an "
           "unchanged policy has ratios near 1, not exactly 1")


def import_tokens(arguments, kinds, name):
    """Writes the rows of files of token ids. kinds: {file: its format, or None without records}. `name`: of the command. Raises
    InputError."""
    from ..native import core

    report = Report()
    with core.RowWriter(arguments.output) as writer:
        _write_rows(writer, kinds, arguments, name, report)
        _refuse_useless(arguments, name, report)
    _tell(name, report)
    kind_names = ", ".join(dict.fromkeys(kind.name for kind in kinds.values() if kind))
    say(f"{name}: {kind_names}: {report.summary()}")


def kind_of_file(path, arguments):
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


def _write_rows(writer, kinds, arguments, name, report):
    options = Options(arguments.loss_weights, arguments.shared_targets, arguments.include_failed, arguments.per_turn,
                      arguments.turn_rewards, arguments.group_by)
    for path, where, record in records_of_files(arguments.files, arguments.max_row_bytes, name, report.progress):
        for row in _rows_of(where, record, kinds[path], options, arguments.skip_bad_rows, report):
            if arguments.limit and report.rows >= arguments.limit:
                return
            if arguments.max_tokens and len(row["input_ids"]) > arguments.max_tokens:
                report.tally.notes["rows dropped by --max-tokens"] += 1
                continue
            writer.add(row)
            report.count(row)
            if kinds[path].name == "traces":
                report.tally.see_logprobs(row.get("logprobs", ()))


def _rows_of(where, record, kind, options, skip, report):
    """The rows of one record: all of them, or none if one is bad and bad records are counted."""
    try:
        if isinstance(record, BadRow):
            raise record
        if not kind.matches(record):
            raise BadRow("<record>", f"a record of {kind.name} (with {kind.fields}) like the first record", "one without")
        fields = Fields(record, report.tally)
        group = {} if options.group_by is None else {"group_id": scalar_at(fields, options.group_by)}
        rows = trl.rows(fields, options, Path(where).name) if kind.name == "trl" else kind.rows(fields, options)
        return [row | group for row in rows]
    except BadRow as error:
        report.bad(f"{where}: {error}", skip)
    except (RecursionError, OverflowError, TypeError, ValueError, AttributeError) as error:
        report.bad(f"{where}: expected a record of {kind.name} with fields of the documented types, received others "
                   f"({type(error).__name__}: {clipped(str(error), 100)})", skip)
    return []


def _tell(name, report):
    for line in report.notes():
        say(f"{name}: {line}")
    if report.tally.decimals == 4:
        say(f"{name}: warning: {ROUNDED}")


def _refuse_useless(arguments, name, report):
    """Raises InputError if there is nothing to train on."""
    if report.rows and report.loss_tokens:
        return
    _tell(name, report)
    files = files_named(arguments.files)
    if not report.rows:
        raise InputError(f"{files}: expected at least one row, received none")
    raise InputError(f"{files}: expected tokens with loss, received {report.rows:,} rows without any")
