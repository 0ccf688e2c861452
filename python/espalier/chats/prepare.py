# SPDX-License-Identifier: Apache-2.0
"""Chats of files as rows: what `espalier prepare` does with text."""

import hashlib
import os
from array import array
from pathlib import Path

from ..commands.console import count_of, say
from ..commands.model import load_tokenizer, vocab_size_of
from ..commands.progress import Progress
from ..commands.signals import time_limit
from ..errors import BadRow, InputError
from ..io.sources import chunks_of, records_of_files
from .convert import Converter, Settings
from .report import Report
from .template import ChatTemplate
from .workers import in_order


def prepare_chats(arguments, kinds, name):
    """Writes the rows of files of text. kinds: {file: its format, or None without records}. Raises InputError."""
    from ..native import core

    if arguments.model is None:
        path, kind = next((path, kind) for path, kind in kinds.items() if kind)
        raise InputError(
            f"{path}: expected --model DIR, whose tokenizer and chat template convert text ({kind.name}) to tokens, received none"
        )
    tokenizer = load_tokenizer(arguments.model)
    template = _template(arguments, tokenizer, name)
    for line in template.describe():
        say(f"{name}: {line}")
    settings = Settings(
        arguments.model,
        arguments.per_turn,
        arguments.group_by,
        arguments.max_tokens,
        arguments.template_timeout,
    )
    converter = Converter(template, tokenizer, vocab_size_of(arguments.model), settings)
    report = Report()
    with core.RowWriter(arguments.output) as writer:
        _write_rows(writer, converter, arguments, kinds, name, report)
        if report.counts["differing_prompts"] or report.counts["skipped_turns"]:
            report.cure = template.cure
        _refuse_useless(arguments, report, name)
    for line in report.notes():
        say(f"{name}: {line}")
    say(f"{name}: {report.summary()}")


def _template(arguments, tokenizer, name):
    limit = arguments.template_timeout
    endless = ValueError(f"expected a chat template that terminates, received no result within {limit:g} s (--template-timeout)")
    try:
        with time_limit(limit, endless):
            return ChatTemplate(
                tokenizer,
                arguments.tool_calls,
                arguments.template_args,
                lambda: _has_content_beside_calls(arguments.files, arguments.max_row_bytes, name),
            )
    except ValueError as error:
        raise InputError(f"--model {arguments.model}: {error}") from error


def _has_content_beside_calls(files, most_bytes, name):
    """Whether a message of some file has both tool calls and content. `name`: of the command, for its progress."""
    records = records_of_files(files, most_bytes, name, lambda: "read, looking for content beside tool calls")
    return any(_has_both(record) for _, _, record in records if not isinstance(record, BadRow))


def _has_both(value):
    """Looks at all depths: chats of all formats have calls and contents in one object."""
    if isinstance(value, list):
        return any(map(_has_both, value))
    if not isinstance(value, dict):
        return False
    calls = value.get("tool_calls") or value.get("function_call")
    if calls and any(_says_something(value.get(name)) for name in ("content", "value", "message")):
        return True
    return any(_has_both(item) for item in value.values() if isinstance(item, (list, dict)))


def _says_something(content):
    return bool(content.strip()) if isinstance(content, str) else bool(content)


def _write_rows(writer, converter, arguments, kinds, name, report):
    """Passes the rows of all records to the writer, in the order of the files, whatever the number of processes."""
    names, pair_names = Names(), Names()
    read = [0.0]  # the fraction of the input

    def chunks():
        for number, path in enumerate(arguments.files):

            def tick(fraction, number=number):
                read[0] = (number + fraction) / len(arguments.files)

            for chunk in chunks_of(path, arguments.max_row_bytes, tick):
                yield chunk, kinds[path].name

    with Progress(name) as progress:
        for outcomes in in_order(converter, chunks(), arguments.workers or len(os.sched_getaffinity(0))):
            for outcome in outcomes:
                if arguments.limit and report.records >= arguments.limit:
                    return
                if outcome.error is not None:
                    report.bad(outcome.error, arguments.skip_bad_rows)
                    continue
                _write_outcome(writer, outcome, names, pair_names, report)
            progress.update(read[0], f"{report.trajectories} trajectories, {report.flat_tokens:,} flat tokens")


def _write_outcome(writer, outcome, names, pair_names, report):
    import numpy as np  # not before the model is read, whose absence has a message of its own

    record = outcome.record
    report.add(outcome)
    pair = None
    if record.is_pair:
        pair = pair_names.unique(record.pair_id or file_name(outcome.where))
        chat_names: dict[str | None, str] = {side: names.unique(f"{pair}/{side}") for side in ("chosen", "rejected")}
    else:
        name = names.unique(record.name or file_name(outcome.where))
        chat_names = {None: name}
        report.counts["renamed"] += record.name is not None and name != record.name
    for row in outcome.rows:
        loss = np.frombuffer(row.loss, np.float64 if row.weighted else np.uint8)
        writer.add(
            {
                "trajectory_id": chat_names[row.side] + row.suffix,
                "group_id": record.group_id,
                "pair_id": pair or record.pair_id,
                "chosen": record.chosen if row.side is None else row.side == "chosen",
                "reward": record.reward,
                "input_ids": np.frombuffer(row.ids, np.int32),
                "loss_weights" if row.weighted else "loss_mask": loss,
            }
        )


def _refuse_useless(arguments, report, name):
    """Raises InputError if there is nothing to train on."""
    if report.trajectories > 0 and report.loss_tokens > 0:
        return
    for line in report.notes():
        say(f"{name}: {line}")
    chats = ", ".join(map(str, arguments.files))
    if report.trajectories == 0:
        raise InputError(f"{chats}: expected at least one trajectory, received none")
    received = count_of(report.trajectories, "trajectory", "trajectories")
    raise InputError(
        f"{chats}: expected tokens with loss, received {received} without any: the rendered assistant messages "
        "add nothing to their prompts in any of them"
    )


class Names:
    """Gives every conversation a unique name: `name`, or name~2, name~3, ... if it is taken."""

    def __init__(self):
        self._taken, self._counts = Digests(), {}

    def unique(self, name):
        candidate, count = name, self._counts.get(name, 1)
        while not self._taken.add(candidate):
            count += 1
            candidate = f"{name}~{count}"
        if count > 1:
            self._counts[name] = count
        return candidate


class Digests:
    """A set of texts that needs 16 to 32 bytes for each. A text whose digest of 64 bits equals another's counts as that one."""

    def __init__(self):
        self._slots, self._count = array("Q", bytes(8 << 10)), 0

    def add(self, text):
        """Adds a text; False if it is there already."""
        digest = int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "little") or 1
        if not self._put(digest):
            return False
        self._count += 1
        if 2 * self._count > len(self._slots):
            digests, self._slots = self._slots, array("Q", bytes(16 * len(self._slots)))
            for other in filter(None, digests):
                self._put(other)
        return True

    def _put(self, digest):
        mask = len(self._slots) - 1
        place = digest & mask
        while self._slots[place]:
            if self._slots[place] == digest:
                return False
            place = (place + 1) & mask
        self._slots[place] = digest
        return True


def file_name(where):
    """FILE:LINE without the folder, as printable text."""
    return os.fsencode(Path(where).name).decode("utf-8", "replace")
