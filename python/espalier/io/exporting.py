# SPDX-License-Identifier: Apache-2.0
"""`espalier export`: converts rows to the formats of other trainers."""

from ..commands.console import say
from ..errors import BadRow, InputError
from . import plain_rows
from .fields import Fields
from .plain_rows import NO_LABEL
from .report import Report, files_named
from .sources import records_of_files
from .trace_export import Exporter
from .writing import ROW_TYPES, json_writer, parquet_writer

TRL_TYPES = {
    "input_ids": lambda arrow: arrow.list_(arrow.int32()), "labels": lambda arrow: arrow.list_(arrow.int32()),
    "completion_mask": lambda arrow: arrow.list_(arrow.int8()),
}


def run_export(arguments):
    """Reads all rows and writes the file. Raises InputError."""
    report = Report()
    types = TRL_TYPES if arguments.format == "trl" else ROW_TYPES
    is_parquet = arguments.output.suffix == ".parquet"
    with (parquet_writer(arguments.output, types) if is_parquet else json_writer(arguments.output)) as writer:
        left_out = _EXPORTS[arguments.format](_rows(arguments, report), writer)
        if not report.rows:
            raise InputError(f"{files_named(arguments.files)}: expected at least one row, received none")
    for line in report.notes():
        say(f"export: {line}")
    for what, count in left_out.items():
        say(f"export: left out, because {arguments.format} has no field for it: {what} ({count:,})")
    say(f"export: {report.summary()}")
    say(f"export: wrote {arguments.output}")


def _rows(arguments, report):
    """Yields the checked rows of all files."""
    for _, where, record in records_of_files(arguments.files, arguments.max_row_bytes, "export", report.progress):
        try:
            if isinstance(record, BadRow):
                raise record
            rows = list(plain_rows.rows(Fields(record, report.tally)))
        except BadRow as error:
            report.bad(f"{where}: {error}", arguments.skip_bad_rows)
            continue
        for row in rows:
            report.count(row)
            yield row


def _to_traces(rows, writer):
    exporter = Exporter()
    for row in rows:
        for episode in exporter.add(row):
            writer.add(episode)
    for episode in exporter.finish():
        writer.add(episode)
    return exporter.left_out


def _to_parquet(rows, writer):
    for row in rows:
        writer.add(row)
    return {}


def _to_trl(rows, writer):
    left_out: dict[str, int] = {}
    for number, row in enumerate(rows, start=1):
        ids = row["input_ids"]
        mask = row.get("loss_mask", [0] + [1] * (len(ids) - 1))
        if "loss_weights" in row:
            if not set(row["loss_weights"]) <= {0.0, 1.0}:
                raise InputError(f"row {number}: field `loss_weights`: expected weights of 0 and 1, because labels have no "
                                 "others, received others")
            mask = [int(weight) for weight in row["loss_weights"]]
        writer.add({"input_ids": ids, "labels": [token if loss else NO_LABEL for token, loss in zip(ids, mask)],
                    "completion_mask": mask})
        for name in row.keys() - {"input_ids", "loss_mask", "loss_weights"}:
            left_out[name] = left_out.get(name, 0) + 1
    return left_out


_EXPORTS = {"traces": _to_traces, "parquet": _to_parquet, "trl": _to_trl}
