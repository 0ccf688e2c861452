# SPDX-License-Identifier: Apache-2.0
"""Training runs and checkpoints on disk, by paths such as tinker://RUN/weights/NAME.

    STATE/lock                            held by the server that uses the folder
    STATE/runs/RUN/run.json               the run: base model, adapter, user metadata
    STATE/runs/RUN/KIND/NAME/adapter/     a checkpoint: a folder of PEFT, or a model, with optimiser state (Engine.save)
    STATE/runs/RUN/KIND/NAME/about.json   when it was written and when it expires
    STATE/runs/RUN/KIND/.new-*            what is being written; whole before it gets its name
    STATE/runs/RUN/KIND/.old-NAME         what NAME replaces, until NAME is there; a server that starts puts it back
    STATE/runs/RUN/KIND/.gone-*           what was deleted or has expired
    STATE/parked/                         weights in no use at the moment; emptied when a server starts

KIND is weights, sampler_weights or external_weights. RUN and NAME have letters, digits and few signs, so that no path from
a client leaves the folder.
"""

import contextlib
import datetime
import fcntl
import json
import os
import re
import secrets
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError
from .errors import Refused

KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
_RUN = re.compile(r"[A-Za-z0-9_-]{1,64}:train:[0-9]{1,9}")
_ABOUT, _ADAPTER = "about.json", "adapter"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True)
class CheckpointPath:
    """tinker://run/kind/name."""

    run: str
    kind: str
    name: str

    @classmethod
    def parse(cls, path: str) -> "CheckpointPath":
        """Of a path from a client. Raises Refused."""
        run, *rest = path.removeprefix("tinker://").split("/", 1) if path.startswith("tinker://") else (path,)
        if not rest or not _RUN.fullmatch(run):
            raise Refused(f"path: expected tinker://RUN/{'|'.join(KINDS)}/NAME, received {path[:200]!r}")
        return cls.of(run, rest[0])

    @classmethod
    def of(cls, run: str, checkpoint_id: str) -> "CheckpointPath":
        """checkpoint_id: KIND/NAME. Raises Refused."""
        kind, _, name = checkpoint_id.partition("/")
        if not _RUN.fullmatch(run) or kind not in KINDS or not _NAME.fullmatch(name):
            raise Refused(f"checkpoint: expected {'|'.join(KINDS)}/NAME, NAME of letters, digits, `.`, `_` and `-`, received "
                          f"{checkpoint_id[:200]!r}")  # fmt: skip
        return cls(run, kind, name)

    def __str__(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"


def now(later: int = 0) -> str:
    """The time in so many seconds."""
    return (datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=later)).isoformat()


def _write_json(path: Path, value: object) -> None:
    """The file has its old content or the new one, whatever happens."""
    new = path.with_name(f"{path.name}.new")
    with new.open("w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


class Store:
    """The folder of one server, made if it is missing. Raises InputError where another server uses it."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._runs = self.folder / "runs"
        self._parked = self.folder / "parked"
        self._runs.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"{self.folder}: expected a folder that no other server uses, but one does: name another with "
                             "--state") from None  # fmt: skip
        shutil.rmtree(self._parked, ignore_errors=True)
        self._parked.mkdir()
        self._changes = threading.Lock()  # renames, by the threads of the bases and of the event loop
        self._recover()

    def _recover(self) -> None:
        """After a server that was killed."""
        for old in self._runs.glob("*/*/.old-*"):
            replaced = old.with_name(old.name.removeprefix(".old-"))
            if not replaced.exists():
                old.rename(replaced)
        for kind in self._runs.glob("*/*"):
            for pattern in (".new-*", ".old-*", ".gone-*"):
                for leftover in kind.glob(pattern):
                    shutil.rmtree(leftover, ignore_errors=True)

    def close(self) -> None:
        self._lock.close()

    def parked(self) -> Path:
        """A new place for weights that are in no use."""
        return self._parked / secrets.token_hex(8)

    def _folder(self, path: CheckpointPath) -> Path:
        return self._runs / path.run.replace(":", ".") / path.kind / path.name

    def add_run(self, run: str, about: dict[str, Any]) -> None:
        """Writes what a run is."""
        folder = self._runs / run.replace(":", ".")
        folder.mkdir(exist_ok=True)
        _write_json(folder / "run.json", {"training_run_id": run, "created": now(), **about})

    def run(self, run: str) -> dict[str, Any] | None:
        """What a run is, with its last checkpoints; None if there is none."""
        if not _RUN.fullmatch(run):
            return None
        about = _read_json(self._runs / run.replace(":", ".") / "run.json")
        if about is None:
            return None
        found = self.checkpoints(run)
        last = {each["checkpoint_type"]: each for each in sorted(found, key=lambda each: each["time"])}
        times = [about["created"], *(each["time"] for each in found)]
        rank = about["lora"]["rank"]
        return {"training_run_id": run, "base_model": about["base_model"], "model_owner": "local", "is_lora": rank > 0,
                "lora_rank": rank, "last_request_time": max(times), "last_checkpoint": last.get("training"),
                "last_sampler_checkpoint": last.get("sampler"), "user_metadata": about.get("user_metadata"),
                "about": about}  # fmt: skip

    def runs(self) -> list[dict[str, Any]]:
        """All runs, the newest first."""
        found = [self.run(path.parent.name.replace(".", ":")) for path in self._runs.glob("*/run.json")]
        return sorted((run for run in found if run), key=lambda run: run["last_request_time"], reverse=True)

    def checkpoints(self, run: str | None = None) -> list[dict[str, Any]]:
        """The checkpoints of a run, or of all, the newest first."""
        found = []
        for file in self._runs.glob(f"{run.replace(':', '.') if run else '*'}/*/*/{_ABOUT}"):
            folder = file.parent
            if folder.parent.name not in KINDS or not _NAME.fullmatch(folder.name):
                continue
            path = CheckpointPath(folder.parents[1].name.replace(".", ":"), folder.parent.name, folder.name)
            if about := self._live(path):
                found.append(about)
        return sorted(found, key=lambda each: each["time"], reverse=True)

    def _live(self, path: CheckpointPath) -> dict[str, Any] | None:
        """What is known of a checkpoint, unless it has expired."""
        about = _read_json(self._folder(path) / _ABOUT)
        if about is None:
            return None
        if about.get("expires_at") and about["expires_at"] <= now():
            self._remove(path)
            return None
        run = _read_json(self._runs / path.run.replace(":", ".") / "run.json") or {}
        return {"checkpoint_id": f"{path.kind}/{path.name}", "checkpoint_type": KINDS[path.kind], "tinker_path": str(path),
                "base_model": run.get("base_model"), **about}  # fmt: skip

    def find(self, path: CheckpointPath) -> Path:
        """The folder of PEFT of a checkpoint, or that of a model. Raises Refused."""
        if self._live(path) is None:
            raise Refused(f"{path}: expected a checkpoint, found none; it may have expired", 404)
        return self._folder(path) / _ADAPTER

    @contextlib.contextmanager
    def writing(self, path: CheckpointPath, *, overwrite: bool = False, ttl_seconds: int | None = None,
                user_metadata: dict[str, str] | None = None) -> Iterator[Path]:  # fmt: skip
        """Where to write the weights. Afterwards it is the checkpoint, in place of what was there. Raises Refused if that exists
        and `overwrite` is not given."""
        if not overwrite and self._live(path) is not None:
            raise Refused(f"{path}: expected no such checkpoint, it exists already; `overwrite` replaces it", 409)
        folder = self._folder(path)
        new, old = folder.with_name(f".new-{secrets.token_hex(8)}"), folder.with_name(f".old-{folder.name}")
        new.mkdir(parents=True)
        try:
            yield new / _ADAPTER
            size = sum(file.stat().st_size for file in new.rglob("*") if file.is_file())
            _write_json(new / _ABOUT, {"time": now(), "size_bytes": size, "public": False, "user_metadata": user_metadata,
                                       "expires_at": _expiry(ttl_seconds)})  # fmt: skip
            with self._changes:
                shutil.rmtree(old, ignore_errors=True)
                if folder.exists():
                    folder.rename(old)
                new.rename(folder)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(new, ignore_errors=True)

    def set_ttl(self, path: CheckpointPath, ttl_seconds: int | None) -> None:
        """When the checkpoint expires, from now on; None: never. Raises Refused."""
        with self._changes:
            self.find(path)
            about = self._folder(path) / _ABOUT
            _write_json(about, {**(_read_json(about) or {}), "expires_at": _expiry(ttl_seconds)})

    def delete(self, path: CheckpointPath) -> None:
        """Raises Refused if there is none."""
        self.find(path)
        self._remove(path)

    def _remove(self, path: CheckpointPath) -> None:
        folder = self._folder(path)
        gone = folder.with_name(f".gone-{secrets.token_hex(8)}")
        with contextlib.suppress(FileNotFoundError):
            folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _expiry(ttl_seconds: int | None) -> str | None:
    return None if ttl_seconds is None else now(ttl_seconds)
