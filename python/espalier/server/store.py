# SPDX-License-Identifier: Apache-2.0
"""Training runs and checkpoints on disk, by paths such as tinker://RUN/weights/NAME.

    STATE/lock                            locked, as STATE itself, by the server that uses the folder
    STATE/runs/RUN/run.json               the run: base model, adapter, user metadata
    STATE/runs/RUN/KIND/NAME/adapter/     a checkpoint: a folder of PEFT, or a model (Engine.save)
    STATE/runs/RUN/KIND/NAME/about.json   when it was written and when it expires
    STATE/runs/RUN/KIND/.new-*            what is being written; a server that starts gives it its name if it is whole
    STATE/runs/RUN/KIND/.old-NAME         what NAME replaces, until NAME is there; a server that starts puts it back
    STATE/runs/RUN/KIND/.gone-*           what was deleted or has expired
    STATE/parked-weights/                 weights in no use at the moment; emptied when a server starts
    STATE/planned-restart/                what a server that stopped in order left for the next one (restart.py)
    STATE/planned-restart.new/            the same while it is written, or removed; nothing reads it
    STATE/keys/NAME/                      the same for clients with a key of their own

KIND is weights, sampler_weights or external_weights. RUN and NAME have letters, digits and few signs, so that no path from
a client leaves the folder, and links in it are never followed. A save or a removal is durable before its method returns.
"""

import contextlib
import datetime
import fcntl
import json
import os
import re
import secrets
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..native import core
from . import disk
from .errors import Refused
from .index import CheckpointRecord, Listing, RunRecord
from .paths import CheckpointPath, folder_name, is_run
from .recovery import CHECKPOINT_FILE, RUN_FILE, Recovery, gone_folder, new_folder, old_folder

__all__ = ["CheckpointPath", "Store", "check_files", "now"]

_ADAPTER = "adapter"
_PARKED, _MARKER = "parked-weights", ".espalier"
_KEYS = "keys"  # has the folders of clients with keys of their own
_RESTART, _NEW_RESTART = "planned-restart", "planned-restart.new"
_PARKED_NAME = re.compile("[0-9a-f]{16}")
EMPTY_RUN_SECONDS = 7 * 86400  # that a run without checkpoints is kept after its model has gone
EMPTY_RUNS = 1000              # of them; the oldest go first


def now(later: int = 0) -> str:
    """The time in so many seconds."""
    return (datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=later)).isoformat(timespec="microseconds")


def check_files(folder: Path, subject: object) -> None:
    """Raises Refused (422) where the files of a checkpoint are not those that were written. subject: its name for the client."""
    try:
        step = int(json.loads((folder / "trainer_state.json").read_bytes())["step"])
        has_manifest = (folder / "manifest.json").is_file()
        fault = core.manifest_fault(folder, f"step_{step}") if has_manifest else "manifest.json is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        fault = f"trainer_state.json cannot be read: {error}"
    if fault:
        raise Refused(f"{subject}: the checkpoint is damaged: {fault}", 422)


def drop_optimizer(folder: Path) -> None:
    """Removes the optimiser's state from the files of a checkpoint, and from their manifest."""
    manifest = folder / "manifest.json"
    about = json.loads(manifest.read_bytes())
    for file in folder.glob("optimizer*.safetensors"):
        del about["files"][file.name]
        file.unlink()
    disk.write_json(manifest, about)


class Store:
    """The folder of one server, made if it is missing. Raises InputError where another server uses it, or where something else
    has a name that the server needs."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).resolve()
        self._runs = self.folder / "runs"
        self._parked = self.folder / _PARKED
        self._changes = threading.RLock()  # of names, by the threads of the bases and of the event loop
        self._locks: list[int] = []
        try:
            self._open()
            self._index = Recovery(self._runs).index
        except OSError as error:
            self.close()
            raise InputError(f"--state {self.folder}: cannot be used: {error.strerror}: {error.filename}") from None
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        disk.make_folder(self.folder)
        names = {"lock", "runs", _KEYS, _PARKED, _RESTART, _NEW_RESTART}
        for path in (self.folder / name for name in sorted(names)):
            if path.is_symlink():
                raise InputError(f"{path}: expected no link, received one, which is not followed: remove it, or name another "
                                 "folder with --state")  # fmt: skip
        self._lock()
        if set(os.listdir(self.folder)) <= names:  # else it has things for others, too
            with contextlib.suppress(PermissionError):  # the folder of another user
                self.folder.chmod(0o700)
        disk.make_folder(self._runs)
        disk.remove_tree(self.folder / _NEW_RESTART)
        self._empty_parked()

    def _empty_parked(self) -> None:
        marker = self._parked / _MARKER
        if not marker.exists():
            if disk.entries(self._parked):
                raise InputError(f"{self._parked}: expected a folder of the server, received one with files of others: move it, "
                                 "or name another folder with --state")  # fmt: skip
            disk.make_folder(self._parked)
            marker.touch(mode=0o600)
            disk.sync(self._parked)
        for entry in disk.entries(self._parked):
            if _PARKED_NAME.fullmatch(entry.name):
                disk.remove_tree(self._parked / entry.name)

    def _lock(self) -> None:
        """Locks the file for file systems that cannot lock a folder, and the folder as the file may be removed."""
        self._locks.append(os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        self._locks.append(os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        for number, descriptor in enumerate(self._locks):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(f"{self.folder}: expected a folder that no other server uses, but one does: name another with "
                                 "--state") from None  # fmt: skip
            except OSError:
                if number == 0:
                    raise

    def close(self) -> None:
        for descriptor in self._locks:
            os.close(descriptor)
        self._locks.clear()

    def parked(self) -> Path:
        """A new place for weights that are in no use."""
        return self._parked / secrets.token_hex(8)

    # Planned restarts.

    @contextlib.contextmanager
    def writing_restart(self) -> Iterator[Path]:
        """A folder to write what the next start reads. Afterwards it is whole and durable; after an error there is none."""
        new = self.folder / _NEW_RESTART
        disk.remove_tree(new)
        try:
            disk.make_folder(new)
            yield new
            disk.sync_tree(new)
            new.rename(self.folder / _RESTART)
            disk.sync(self.folder)
        except BaseException:
            self.remove_restart()
            disk.remove_tree(new)
            raise

    def restart_folder(self) -> Path | None:
        """What the last server left; None where it left nothing."""
        folder = self.folder / _RESTART
        return folder if disk.is_folder(folder) else None

    def remove_restart(self) -> None:
        """Removes that. No later start finds it once this method has returned."""
        with contextlib.suppress(FileNotFoundError):
            (self.folder / _RESTART).rename(self.folder / _NEW_RESTART)
            disk.sync(self.folder)
        disk.remove_tree(self.folder / _NEW_RESTART)

    # Training runs.

    def _run_folder(self, run: str) -> Path:
        return self._runs / folder_name(run)

    def _folder(self, path: CheckpointPath) -> Path:
        return self._run_folder(path.run) / path.kind / path.name

    def add_run(self, run: str, about: dict[str, Any]) -> None:
        """Writes what a run is. Raises Refused (507) where the disk is full."""
        record = RunRecord.model_validate({"training_run_id": run, "created": now(), **about})
        with disk.naming_full_disk(run):
            folder = self._run_folder(run)
            disk.make_folder(folder)
            try:
                disk.write_json(folder / RUN_FILE, record.model_dump())
            except BaseException:
                self._remove_run_folder(run)
                raise
        self._index.add_run(record)

    def run(self, run: str) -> dict[str, Any] | None:
        """A run with its last checkpoints; None if there is none. Reads a file where its metadata are too long for lists."""
        found = self._index.run(run, now()) if is_run(run) else None
        if found is None or not self._index.has_more_metadata(run):
            return found
        try:
            record = RunRecord.model_validate_json(disk.read_record(self._run_folder(run) / RUN_FILE))
        except (OSError, ValueError) as error:
            raise Refused(f"{run}: {RUN_FILE} is damaged since the server started: {error}"[:1000], 422) from None
        return {**found, "user_metadata": record.user_metadata}

    def runs(self) -> Listing[Any]:
        """All runs, the newest first, without metadata that are too long for lists."""
        return self._index.runs(now())

    def remove_run(self, run: str) -> None:
        """Removes a run that has no checkpoints. Nothing happens where its folder has anything else."""
        with self._changes:
            if self._remove_run_folder(run):
                self._index.remove_run(run)

    def _remove_run_folder(self, run: str) -> bool:
        folder = self._run_folder(run)
        try:
            for entry in disk.entries(folder):
                if entry.is_dir(follow_symlinks=False):
                    (folder / entry.name).rmdir()
                elif entry.name != RUN_FILE:
                    return False
            (folder / RUN_FILE).unlink(missing_ok=True)
            folder.rmdir()
        except OSError:
            return not folder.exists()
        return True

    # Checkpoints.

    def checkpoints(self, run: str | None = None) -> Listing[Any]:
        """The checkpoints of a run, or of all, the newest first."""
        return self._index.checkpoints(now(), run)

    def _live(self, path: CheckpointPath) -> CheckpointRecord | None:
        """What is known of a checkpoint that has not expired."""
        record = self._index.checkpoint(path)
        return None if record is None or (record.expires_at is not None and record.expires_at <= now()) else record

    def run_of(self, path: CheckpointPath) -> RunRecord:
        """The run of a checkpoint. Reads no file. Raises Refused (404) if there is none."""
        run = self._index.record(path.run)
        if run is None or self._live(path) is None:
            raise Refused(f"{path}: expected a checkpoint, found none; it may have expired", 404)
        return run

    def find(self, path: CheckpointPath) -> Path:
        """The folder of PEFT of a checkpoint, or that of a model. Raises Refused: 404, 422."""
        self._check_is_there(path)
        folder = self._folder(path) / _ADAPTER
        if not disk.is_folder(folder):
            raise Refused(f"{path}: the checkpoint is damaged: its folder {_ADAPTER} is missing, or is a link", 422)
        return folder

    def _check_is_there(self, path: CheckpointPath) -> None:
        if self._live(path) is None:
            self.remove_expired()
            raise Refused(f"{path}: expected a checkpoint, found none; it may have expired", 404)

    def files(self, path: CheckpointPath) -> dict[str, Path]:
        """The files of a checkpoint, by their names in it. Raises Refused."""
        with self._changes:
            return disk.plain_files(self.find(path))

    @contextlib.contextmanager
    def reading(self, path: CheckpointPath, *, optimizer: bool = False) -> Iterator[Path]:
        """A folder with the files of a checkpoint, which stay the same whatever becomes of it meanwhile. Raises Refused: 404, 422
        where they are not those that were written, 400 where `optimizer` is wanted and was not saved."""
        place = self.second_folder(path, optimizer=optimizer)
        try:
            yield place
        finally:
            disk.remove_tree(place)

    def second_folder(self, path: CheckpointPath, *, optimizer: bool = False) -> Path:
        """As `reading`; the folder stays until the caller removes it."""
        place = self.parked()
        try:
            with disk.naming_full_disk(path), self._changes:
                disk.link_tree(self.find(path), place)
            check_files(place, path)
            if optimizer and not any(place.glob("optimizer*.safetensors")):
                raise Refused(f"{path}: it has no optimiser state: load it without, or one of save_state (tinker://RUN/weights/NAME)")
        except BaseException:
            disk.remove_tree(place)
            raise
        return place

    @contextlib.contextmanager
    def writing(self, path: CheckpointPath, *, overwrite: bool = False, ttl_seconds: int | None = None,
                user_metadata: dict[str, str] | None = None) -> Iterator[Path]:  # fmt: skip
        """Where to write the weights. Afterwards it is the checkpoint, in place of what was there. Raises Refused: 409 if that
        exists and `overwrite` is not given, 507 where the disk is full."""
        self._check_is_free(path, overwrite=overwrite)
        new = new_folder(self._folder(path).parent)
        try:
            with disk.naming_full_disk(path):
                disk.make_folder(new)
                yield new / _ADAPTER
                record = CheckpointRecord(time=now(), size_bytes=disk.sync_tree(new), user_metadata=user_metadata,
                                          expires_at=_expiry(ttl_seconds), name=path.name)  # fmt: skip
                # Last: with this file the folder is whole, and a server that starts gives it its name.
                disk.write_json(new / CHECKPOINT_FILE, record.model_dump())
                self._name(path, new, record, overwrite=overwrite)
        finally:
            with contextlib.suppress(OSError):
                (new / CHECKPOINT_FILE).unlink()  # first: what is removed half-way is not whole
            disk.remove_tree(new)

    def copy(self, path: CheckpointPath, run: str, about: dict[str, Any], ttl_seconds: int | None) -> CheckpointPath:
        """Copies a checkpoint into a new run. Raises Refused as `reading` and `writing` do; there is no new run then."""
        copy = CheckpointPath(run, path.kind, path.name)
        with self.reading(path) as folder:
            self.add_run(run, about)
            try:
                with self.writing(copy, ttl_seconds=ttl_seconds) as place:
                    disk.copy_tree(folder, place)
            except BaseException:
                self.remove_run(run)
                raise
        return copy

    def _check_is_free(self, path: CheckpointPath, *, overwrite: bool) -> None:
        if overwrite:
            return
        if self._live(path) is not None:
            raise Refused(f"{path}: expected no such checkpoint, it exists already; `overwrite` replaces it", 409)
        if self._index.checkpoint(path) is None and self._folder(path).exists():
            raise Refused(f"{path}: its folder exists, but is damaged; `overwrite` replaces it", 409)

    def _name(self, path: CheckpointPath, new: Path, record: CheckpointRecord, *, overwrite: bool) -> None:
        folder = self._folder(path)
        old = old_folder(folder)
        with self._changes:
            self._check_is_free(path, overwrite=overwrite)
            disk.remove_tree(old)
            try:
                if disk.is_folder(folder):
                    folder.rename(old)
                new.rename(folder)
                disk.sync(folder.parent)
            except BaseException:
                with contextlib.suppress(OSError):
                    if not new.exists():
                        folder.rename(new)
                    if old.exists():
                        old.rename(folder)
                raise
            self._index.add(path, record)
            gone = gone_folder(folder.parent)
            with contextlib.suppress(OSError):
                old.rename(gone)
        disk.remove_tree(gone)

    def set_ttl(self, path: CheckpointPath, ttl_seconds: int | None) -> None:
        """When the checkpoint expires, from now on; None: never. Raises Refused: 404, 507 where the disk is full."""
        with disk.naming_full_disk(path), self._changes:
            self.find(path)
            before = self._index.checkpoint(path)
            assert before is not None
            record = before.model_copy(update={"expires_at": _expiry(ttl_seconds)})
            file = self._folder(path) / CHECKPOINT_FILE
            try:
                disk.write_json(file, record.model_dump())
            except BaseException:
                with contextlib.suppress(OSError):
                    disk.write_json(file, before.model_dump())
                raise
            self._index.add(path, record)

    def delete(self, path: CheckpointPath) -> None:
        """Raises Refused (404) if there is none."""
        with self._changes:
            self._check_is_there(path)
            gone = self._take_away(path)
        disk.remove_tree(gone)

    def _take_away(self, path: CheckpointPath) -> Path:
        """Takes the name from a checkpoint. Returns the folder that is to be removed."""
        folder = self._folder(path)
        gone = gone_folder(folder.parent)
        disk.remove_tree(old_folder(folder))
        with contextlib.suppress(FileNotFoundError):  # removed by hand
            folder.rename(gone)
        self._index.remove(path)
        disk.sync(folder.parent)
        return gone

    # Now and then.

    def tidy(self, in_use: Iterable[str]) -> None:
        """Removes checkpoints whose time is over, and runs that have had none for long or are too many. in_use: runs of models
        that are there."""
        self.remove_expired()
        self._remove_empty_runs(in_use)

    def remove_expired(self) -> None:
        """Removes checkpoints whose time is over."""
        for path in self._index.expired(now()):
            with self._changes:
                if self._live(path) is not None:  # written again, or with another time, meanwhile
                    continue
                gone = self._take_away(path)
            disk.remove_tree(gone)

    def _remove_empty_runs(self, in_use: Iterable[str]) -> None:
        empty = self._index.without_checkpoints(in_use)
        before = now(-EMPTY_RUN_SECONDS)
        for number, (created, run) in enumerate(empty):
            if created > before and number >= len(empty) - EMPTY_RUNS:
                return
            self.remove_run(run)


def _expiry(ttl_seconds: int | None) -> str | None:
    return None if ttl_seconds is None else now(ttl_seconds)
