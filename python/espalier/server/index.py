# SPDX-License-Identifier: Apache-2.0
"""What a server knows of its training runs and checkpoints, in memory: lists read no file. Used by several threads."""

import datetime
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, TypeVar, overload

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from .paths import KINDS, CheckpointPath

Row = TypeVar("Row")
LISTED_METADATA_BYTES = 4096  # of a run, as JSON; lists leave out what is longer


def json_bytes(value: object) -> int:
    """The length of a value as JSON."""
    return len(json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass"))


def utc(text: str) -> str:
    """A time in one form, in which later ones sort behind earlier ones. Raises ValueError."""
    time = datetime.datetime.fromisoformat(text)
    aware = time if time.tzinfo else time.replace(tzinfo=datetime.UTC)
    return aware.astimezone(datetime.UTC).isoformat(timespec="microseconds")


Time = Annotated[str, AfterValidator(utc)]


class Record(BaseModel):
    """A JSON file of the state folder. Those of other versions may have more fields."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class LoraRecord(Record):
    rank: int = Field(ge=0)
    seed: int = 0
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True


class RunRecord(Record):
    """run.json."""

    training_run_id: str
    created: Time
    base_model: str
    lora: LoraRecord
    user_metadata: dict[str, str] | None = None


class CheckpointRecord(Record):
    """about.json. `name` tells a server that starts which name a whole checkpoint was about to get."""

    time: Time
    size_bytes: int = Field(0, ge=0)
    public: bool = False
    user_metadata: dict[str, str] | None = None
    expires_at: Time | None = None
    name: str | None = None


@dataclass(eq=False)
class _Run:
    record: RunRecord
    has_more_metadata: bool
    checkpoints: dict[str, CheckpointRecord] = field(default_factory=dict)  # by KIND/NAME

    def live(self, now: str) -> Iterator[tuple[str, CheckpointRecord]]:
        """The checkpoints that have not expired."""
        for key, record in self.checkpoints.items():
            if record.expires_at is None or record.expires_at > now:
                yield key, record

    def last_change(self, now: str) -> str:
        """When it was made, or its newest checkpoint."""
        return max([self.record.created, *(record.time for _, record in self.live(now))])

    def summary(self, now: str) -> dict[str, Any]:
        """The run as lists show it."""
        about = self.record
        live = sorted(self.live(now), key=lambda each: each[1].time)
        newest = {KINDS[key.partition("/")[0]]: (key, record) for key, record in live}
        last = {kind: _listed(about, *each) for kind, each in newest.items()}
        return {"training_run_id": about.training_run_id, "base_model": about.base_model, "model_owner": "local",
                "is_lora": about.lora.rank > 0, "lora_rank": about.lora.rank, "last_request_time": self.last_change(now),
                "last_checkpoint": last.get("training"), "last_sampler_checkpoint": last.get("sampler"),
                "user_metadata": about.user_metadata}  # fmt: skip


class Listing(Sequence[dict[str, Any]], Generic[Row]):
    """Rows of a list in their order. Each is made as clients see it when it is read, so that a page costs its own rows alone."""

    def __init__(self, rows: list[Row], show: Callable[[Row], dict[str, Any]]) -> None:
        self._rows = rows
        self._show = show

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, place: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, place: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, place: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(place, slice):
            return [self._show(row) for row in self._rows[place]]
        return self._show(self._rows[place])


class Index:
    """All runs and their checkpoints."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}
        self._lock = threading.Lock()

    # Changes.

    def add_run(self, record: RunRecord) -> None:
        more = record.user_metadata is not None and json_bytes(record.user_metadata) > LISTED_METADATA_BYTES
        with self._lock:
            self._runs[record.training_run_id] = _Run(record.model_copy(update={"user_metadata": None}) if more else record, more)

    def remove_run(self, run: str) -> None:
        with self._lock:
            self._runs.pop(run, None)

    def add(self, path: CheckpointPath, record: CheckpointRecord) -> None:
        """A new checkpoint, or a change of one. Nothing happens where the run is not known."""
        with self._lock:
            if (run := self._runs.get(path.run)) is not None:
                run.checkpoints[path.checkpoint_id] = record

    def remove(self, path: CheckpointPath) -> None:
        with self._lock:
            if (run := self._runs.get(path.run)) is not None:
                run.checkpoints.pop(path.checkpoint_id, None)

    # Questions. now: the time at which checkpoints have expired or have not.

    def record(self, run: str) -> RunRecord | None:
        with self._lock:
            return self._runs[run].record if run in self._runs else None

    def has_more_metadata(self, run: str) -> bool:
        """Whether metadata of a run are too long for lists."""
        with self._lock:
            return run in self._runs and self._runs[run].has_more_metadata

    def checkpoint(self, path: CheckpointPath) -> CheckpointRecord | None:
        with self._lock:
            run = self._runs.get(path.run)
            return run.checkpoints.get(path.checkpoint_id) if run is not None else None

    def checkpoints(self, now: str, run: str | None = None) -> "Listing[tuple[str, str, str, CheckpointRecord, RunRecord]]":
        """The checkpoints of a run, or of all, the newest first."""
        with self._lock:
            runs = self._runs.items() if run is None else [(run, self._runs[run])] if run in self._runs else []
            found = [(record.time, name, key, record, each.record) for name, each in runs for key, record in each.live(now)]
        found.sort(key=lambda row: row[:3], reverse=True)
        return Listing(found, lambda row: _listed(row[4], row[2], row[3]))

    def run(self, run: str, now: str) -> dict[str, Any] | None:
        """A run with its last checkpoints; None if there is none."""
        with self._lock:
            return self._runs[run].summary(now) if run in self._runs else None

    def runs(self, now: str) -> "Listing[_Run]":
        """All runs, the newest first."""
        def show(run: _Run) -> dict[str, Any]:
            with self._lock:
                return run.summary(now)

        with self._lock:
            found = sorted(self._runs.values(), key=lambda run: run.last_change(now), reverse=True)
        return Listing(found, show)

    def expired(self, now: str) -> list[CheckpointPath]:
        """Checkpoints whose time is over."""
        with self._lock:
            return [CheckpointPath.of(name, key) for name, run in self._runs.items() for key, record in run.checkpoints.items()
                    if record.expires_at is not None and record.expires_at <= now]  # fmt: skip

    def without_checkpoints(self, in_use: Iterable[str]) -> list[tuple[str, str]]:
        """Time and id of the runs that have no checkpoint and are in no use, the oldest first."""
        used = set(in_use)
        with self._lock:
            return sorted((run.record.created, name) for name, run in self._runs.items()
                          if not run.checkpoints and name not in used)  # fmt: skip


def _listed(run: RunRecord, key: str, record: CheckpointRecord) -> dict[str, Any]:
    path = CheckpointPath.of(run.training_run_id, key)
    return {"checkpoint_id": key, "checkpoint_type": KINDS[path.kind], "tinker_path": str(path), "base_model": run.base_model,
            **record.model_dump(exclude={"name"})}  # fmt: skip
