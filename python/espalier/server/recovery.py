# SPDX-License-Identifier: Apache-2.0
"""What a server that starts finds below --state: it ends what a kill or a power cut interrupted, and reads what there is.

A checkpoint that is whole gets its name, or keeps it. Files that are not as a server writes them are left where they are, and out
of all lists, with a line in the log.
"""

import contextlib
import logging
import re
import secrets
from pathlib import Path
from typing import TypeVar

import pydantic

from . import disk
from .index import CheckpointRecord, Index, RunRecord
from .paths import KINDS, CheckpointPath, is_name, run_of_folder

logger = logging.getLogger("uvicorn.error")
RUN_FILE, CHECKPOINT_FILE = "run.json", "about.json"
LOGGED_FAULTS = 20  # of a start; the others are counted
_OLD, _GONE = ".old-", ".gone-"
_TOKEN = re.compile(r"\.(new|gone)-[0-9a-f]{16}")
Record = TypeVar("Record", RunRecord, CheckpointRecord)


def new_folder(kind: Path) -> Path:
    """Where a checkpoint is written until it is whole."""
    return kind / f".new-{secrets.token_hex(8)}"


def gone_folder(parent: Path) -> Path:
    """Where something lies that is being removed."""
    return parent / f".gone-{secrets.token_hex(8)}"


def old_folder(folder: Path) -> Path:
    """Where a checkpoint lies until the one that replaces it is there."""
    return folder.with_name(f"{_OLD}{folder.name}")


class Recovery:
    """Reads the folder of all runs into an index."""

    def __init__(self, runs: Path) -> None:
        self.index = Index()
        self._faults = 0
        for entry in disk.entries(runs):
            if (run := run_of_folder(entry.name)) is None:
                continue  # a folder of the user
            if entry.is_dir(follow_symlinks=False):
                self._read_run(run, runs / entry.name)
            else:
                self._leave_out(runs / entry.name, "expected a folder, received a file or a link")
        if self._faults > LOGGED_FAULTS:
            logger.warning("%s: %d more are left out of lists", runs, self._faults - LOGGED_FAULTS)

    def _leave_out(self, path: Path, why: str) -> None:
        self._faults += 1
        if self._faults <= LOGGED_FAULTS:
            logger.warning("%s: left out of lists: %s", path, why)

    def _record(self, path: Path, kind: type[Record]) -> Record | None:
        try:
            return kind.model_validate_json(disk.read_record(path))
        except OSError as error:
            self._leave_out(path, error.strerror or str(error))
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            self._leave_out(path, f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}")
        return None

    def _read_run(self, run: str, folder: Path) -> None:
        with contextlib.suppress(OSError):  # that of another user
            folder.chmod(0o700)
        kinds = [folder / kind for kind in KINDS if disk.is_folder(folder / kind)]
        for kind in kinds:
            self._finish(kind)
        if not kinds and not (folder / RUN_FILE).exists():
            with contextlib.suppress(OSError):  # something of the user is in it
                folder.rmdir()
            return
        record = self._record(folder / RUN_FILE, RunRecord)
        if record is None:
            return
        if record.training_run_id != run:
            self._leave_out(folder / RUN_FILE, f"training_run_id: expected {run}, received {record.training_run_id[:100]!r}")
            return
        self.index.add_run(record)
        for kind in kinds:
            for entry in disk.entries(kind):
                if is_name(entry.name):
                    self._read_checkpoint(CheckpointPath(run, kind.name, entry.name), kind / entry.name)

    def _read_checkpoint(self, path: CheckpointPath, folder: Path) -> None:
        if not disk.is_folder(folder):
            self._leave_out(folder, "expected a folder, received a file or a link")
        elif (record := self._record(folder / CHECKPOINT_FILE, CheckpointRecord)) is not None:
            self.index.add(path, record)

    def _finish(self, kind: Path) -> None:
        """Ends the saves and removals of a folder of checkpoints that were interrupted."""
        folders = [kind / entry.name for entry in disk.entries(kind) if entry.is_dir(follow_symlinks=False)]
        whole = [folder for folder in folders if _TOKEN.fullmatch(folder.name) and (folder / CHECKPOINT_FILE).exists()
                 and not folder.name.startswith(_GONE)]  # fmt: skip
        self._name(kind, whole)
        for folder in set(folders) - set(whole):
            replaced = kind / folder.name.removeprefix(_OLD)
            if not folder.name.startswith(_OLD) or not is_name(replaced.name):
                if _TOKEN.fullmatch(folder.name):
                    disk.remove_tree(folder)
            elif replaced.exists():
                disk.remove_tree(folder)
            else:
                folder.rename(replaced)
                disk.sync(kind)

    def _name(self, kind: Path, whole: list[Path]) -> None:
        """Gives checkpoints their names. Of several the newest has it last."""
        records = [(folder, record) for folder in whole if (record := self._record(folder / CHECKPOINT_FILE, CheckpointRecord))]
        for folder, record in sorted(records, key=lambda each: each[1].time):
            if record.name is None or not is_name(record.name):
                self._leave_out(folder, "a whole checkpoint without a name: rename its folder to use it, or remove it")
                continue
            place = kind / record.name
            if place.exists():
                place.rename(gone := gone_folder(kind))
                disk.remove_tree(gone)
            folder.rename(place)
            disk.sync(kind)
