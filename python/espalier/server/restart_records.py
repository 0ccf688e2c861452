# SPDX-License-Identifier: Apache-2.0
"""The files of a planned restart: restart.json with what the server knew, and arrays.safetensors with the numbers.

Both have checksums, and folders of weights have their own (manifest.json).
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pydantic
import safetensors.numpy
from numpy.typing import NDArray
from pydantic import Field

from . import disk
from .data import Datum
from .errors import Refused
from .index import LoraRecord, Record
from .losses import RequestLoss
from .training import Passes

STATE_FILE, ARRAYS_FILE = "restart.json", "arrays.safetensors"
FILE_BYTES = 16 << 30  # which a server may read

Array = str  # the name of one in arrays.safetensors


class DatumRecord(Record):
    tokens: Array
    targets: Array
    inputs: dict[str, Array]


class PassesRecord(Record):
    """training.Passes."""

    data: list[DatumRecord]
    loss: str
    options: dict[str, float]
    forward_only: bool


class OperationRecord(Record):
    """A request to a model that has not begun. kind: the class of its request, `passes`, or `refused`."""

    seq_id: int
    kind: str
    passes: PassesRecord | None = None
    body: dict[str, Any] = Field(default_factory=dict)
    reason: str = ""


class ModelRecord(Record):
    model_id: str
    base: str
    lora: LoraRecord
    next_seq_id: int
    weights: str
    published: str | None
    forests: list[list[PassesRecord]] | None  # whose gradients no step has used; None: they were too many
    waiting: list[OperationRecord]


class CompletionsRecord(Record):
    client: int
    count: int
    kept: list[dict[str, Any]]


class SamplerRecord(Record):
    """weights: the folder of a snapshot; None: those of the base, or the newest ones of a model."""

    sampler_id: str
    base: str
    model_path: str | None
    weights: str | None
    lora: LoraRecord | None
    model_id: str | None
    clients: int
    completions: list[CompletionsRecord]


class SessionRecord(Record):
    session_id: str
    display_name: str | None
    idle_seconds: float
    models: list[ModelRecord]
    samplers: list[SamplerRecord]


class ResultRecord(Record):
    request_id: str
    extra: dict[str, Any]
    sequences: int
    age_seconds: float
    kind: Literal["protobuf", "json", "failure"]
    array: Array = ""
    body: dict[str, Any] = Field(default_factory=dict)


class SampledRecord(Record):
    """sessions.Records of a request."""

    request_id: str
    logprobs: Array
    ends: Array


class RestartRecord(Record):
    version: Literal[1] = 1
    arrays_sha256: str
    fingerprints: dict[str, str]  # of the bases, by name
    sessions: list[SessionRecord]
    results: list[ResultRecord]
    sampled: list[SampledRecord]


class _File(Record):
    """restart.json: the record as a text, and its checksum."""

    sha256: str
    record: str


class Arrays:
    """Arrays by name, to be written or as they were read."""

    def __init__(self, known: dict[str, NDArray[Any]] | None = None) -> None:
        self._known = known or {}
        self.nbytes = 0

    def add(self, values: NDArray[Any]) -> Array:
        name = str(len(self._known))
        self._known[name] = np.ascontiguousarray(values)
        self.nbytes += values.nbytes
        return name

    def __getitem__(self, name: Array) -> NDArray[Any]:
        return self._known[name]

    def write(self, folder: Path) -> str:
        """Returns the checksum of the file."""
        content = safetensors.numpy.save(self._known)
        _write(folder / ARRAYS_FILE, content)
        return hashlib.sha256(content).hexdigest()


def write_record(folder: Path, record: RestartRecord) -> None:
    text = record.model_dump_json()
    _write(folder / STATE_FILE, json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "record": text}).encode())


def read_record(folder: Path) -> RestartRecord:
    """Raises Refused where the file is not the one that was written."""
    try:
        file = _File.model_validate_json(disk.read_record(folder / STATE_FILE, FILE_BYTES))
        if hashlib.sha256(file.record.encode()).hexdigest() != file.sha256:
            raise Refused(f"{STATE_FILE} was changed after it was written: its checksum differs", 422)
        return RestartRecord.model_validate_json(file.record)
    except OSError as error:
        raise Refused(f"{error.filename or folder}: {error.strerror or error}", 422) from None
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise Refused(f"{STATE_FILE}: {'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}", 422) from None


def read(folder: Path) -> tuple[RestartRecord, Arrays]:
    """Raises Refused where the files are not those that were written."""
    record = read_record(folder)
    try:
        content = disk.read_record(folder / ARRAYS_FILE, FILE_BYTES)
    except OSError as error:
        raise Refused(f"{error.filename or folder}: {error.strerror or error}", 422) from None
    if hashlib.sha256(content).hexdigest() != record.arrays_sha256:
        raise Refused(f"{ARRAYS_FILE} was changed after it was written: its checksum differs", 422)
    return record, Arrays(safetensors.numpy.load(content))


def passes_record(passes: Passes, arrays: Arrays) -> PassesRecord:
    options, inputs = passes.loss.record()
    data = [DatumRecord(tokens=arrays.add(datum.tokens), targets=arrays.add(datum.targets),
                        inputs={name: arrays.add(values) for name, values in given.items()})
            for datum, given in zip(passes.data, inputs)]  # fmt: skip
    return PassesRecord(data=data, loss=passes.loss.name, options=options, forward_only=passes.forward_only)


def passes_of(record: PassesRecord, arrays: Arrays) -> Passes:
    inputs = [{name: arrays[array] for name, array in datum.inputs.items()} for datum in record.data]
    data = [Datum(arrays[datum.tokens], arrays[datum.targets], given) for datum, given in zip(record.data, inputs)]
    return Passes(data, RequestLoss.restored(record.loss, record.options, inputs), record.forward_only)


def _write(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
