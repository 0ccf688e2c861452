# SPDX-License-Identifier: Apache-2.0
"""Planned restarts: what a server that stops in order writes into --state, and what the next one makes of it.

Sessions, models, samplers and results come back under their ids, and requests that had not begun are done. Weights lie as they do
while they are in no use. Gradients are no part of that: the passes that made them are kept, and repeated before the next request
to their model. A start reads all of it once, and removes it before the first client is answered, so that nothing goes back in
time later.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..commands.console import count_of, say
from ..errors import InputError
from . import disk, requests, restart_records as records, training
from .errors import Refused
from .full_weights import FullWeights
from .futures import Failure, Future, failure_of
from .index import LoraRecord
from .sample_requests import CLIENT_NUMBERS
from .sessions import Completions, Sampler, Session
from .store import check_files
from .worker import LoraSettings, TrainingWorker, Weights, Worker

if TYPE_CHECKING:
    from .service import Service

logger = logging.getLogger("uvicorn.error")
RESULT_BYTES = 64 << 20   # of the newest results of a key that are kept, and of what its samples were recorded with
DATA_BYTES = 1 << 30    # of data of a key that are kept: of requests that wait, and of gradients that no step has used


# A stop.


async def keep(services: "Sequence[Service]", unsure: Collection[str]) -> None:
    """Writes what the services of all keys know, once their workers have ended; says how much that is. unsure: models of which a
    client was told that a request had failed while it went on, which are left out."""
    for service in services:
        if not service.sessions:
            continue
        try:
            leaving = _Leaving(service, unsure)
            await asyncio.to_thread(leaving.write)
        except Exception as error:
            say(f"espalier serve: kept nothing for the next start: {_reason(error)}")
        else:
            say(f"espalier serve: kept for the next start: {leaving.count}")


@dataclass
class _Leaving:
    """What one service leaves. It is made on the thread of the event loop, and written on another one."""

    service: "Service"
    unsure: Collection[str]
    arrays: records.Arrays = field(default_factory=records.Arrays)
    count: str = ""

    def __post_init__(self) -> None:
        now, service = time.monotonic(), self.service
        self.pending = [each for each in service.futures.pending_ids() if each.startswith(service.prefix)]
        self.models: dict[str, tuple[training.Model, records.ModelRecord]] = {}
        self.samplers: dict[str, tuple[Sampler, records.SamplerRecord]] = {}
        for session in service.sessions.values():
            for model in session.models.values():
                if model.model_id not in self.unsure:
                    self.models[model.model_id] = (model, self._model(model))
            for sampler in session.samplers.values():
                self.samplers[sampler.sampler_id] = (sampler, self._sampler(sampler))
        self.sessions = [(session, now - session.seen) for session in service.sessions.values()]
        self.results = [self._result(each, now) for each in service.futures.newest(service.prefix, RESULT_BYTES)]
        self.sampled = [records.SampledRecord(request_id=request, logprobs=self.arrays.add(logprobs), ends=self.arrays.add(ends))
                        for request, logprobs, ends in service.records.newest(service.prefix, RESULT_BYTES)]  # fmt: skip

    def _model(self, model: training.Model) -> records.ModelRecord:
        weights, waiting = model.weights, model.waiting
        number, forests = len(self.models), weights.passes
        if forests is not None and not self._has_room([each for passes in forests for each in passes]):
            forests = None
        if not self._has_room([each.passes for each in waiting.values() if each.passes is not None]):
            model.fail_all("the server stops, and has no room to keep this request; send it again once the server is back")
            waiting = {}
        return records.ModelRecord(
            model_id=model.model_id, base=model.worker.name, lora=_lora_record(weights.lora), next_seq_id=model.next_seq_id,
            weights=f"weights-{number}", published=None if model.published is None else f"published-{number}",
            forests=None if forests is None else [
                [records.passes_record(each, self.arrays) for each in passes] for passes in forests],
            waiting=[self._operation(seq_id, each) for seq_id, each in waiting.items()])  # fmt: skip

    def _has_room(self, passes: list[training.Passes]) -> bool:
        return self.arrays.nbytes + sum(each.nbytes for each in passes) <= DATA_BYTES

    def _operation(self, seq_id: int, operation: training.Operation) -> records.OperationRecord:
        record, request = records.OperationRecord, operation.request
        if operation.passes is not None:
            return record(seq_id=seq_id, kind="passes", passes=records.passes_record(operation.passes, self.arrays))
        if isinstance(request, str):
            return record(seq_id=seq_id, kind="refused", reason=request)
        return record(seq_id=seq_id, kind=type(request).__name__, body=request.model_dump())

    def _sampler(self, sampler: Sampler) -> records.SamplerRecord:
        lost: dict[int, list[str]] = {}
        for request_id in self.pending:  # clients that are told of it ask again
            sampler_id, _, number = request_id.rpartition(":")
            if sampler_id == sampler.sampler_id:
                lost.setdefault(int(number) // CLIENT_NUMBERS, []).append(request_id)
        completions = []
        for client in sampler.completions.keys() | lost.keys():
            known, failed = sampler.completions.get(client) or Completions(), lost.get(client, [])
            completions.append(records.CompletionsRecord(
                client=client, count=known.count + len(failed),
                kept=[*known.since(0), *({"state": "failed", "request_id": each} for each in failed)]))  # fmt: skip
        owned, model = sampler.owned, sampler.model
        return records.SamplerRecord(
            sampler_id=sampler.sampler_id, base=sampler.worker.name, model_path=sampler.model_path,
            weights=None if owned is None else f"snapshot-{len(self.samplers)}",
            lora=None if owned is None else _lora_record(owned.lora), model_id=None if model is None else model.model_id,
            clients=sampler.clients, completions=completions)  # fmt: skip

    def _result(self, future: Future, now: float) -> records.ResultRecord:
        payload = future.payload
        kind, array, body = "json", "", payload
        if isinstance(payload, bytes):
            kind, array, body = "protobuf", self.arrays.add(np.frombuffer(payload, np.uint8)), {}
        elif isinstance(payload, Failure):
            kind, body = "failure", vars(payload)
        return records.ResultRecord.model_validate({
            "request_id": future.request_id, "extra": future.extra, "sequences": future.sequences,
            "age_seconds": now - future.done_at, "kind": kind, "array": array, "body": body})  # fmt: skip

    def write(self) -> None:
        """Raises OSError or Refused, and then there is nothing."""
        store = self.service.store
        with disk.naming_full_disk(store.folder), store.writing_restart() as folder:
            for model_id, (model, record) in list(self.models.items()):
                parts = [(record.weights, model.weights), (record.published, model.published)]
                if not self._has_written(folder, model_id, parts):
                    del self.models[model_id]
            for sampler_id, (sampler, known) in list(self.samplers.items()):
                has_model = sampler.model is None or sampler.model.model_id in self.models
                if not has_model or not self._has_written(folder, sampler_id, [(known.weights, sampler.owned)]):
                    del self.samplers[sampler_id]
            sessions = [records.SessionRecord(
                session_id=session.session_id, display_name=session.display_name, idle_seconds=idle,
                models=[record for model_id, (_, record) in self.models.items() if model_id in session.models],
                samplers=[record for sampler_id, (_, record) in self.samplers.items() if sampler_id in session.samplers])
                for session, idle in self.sessions]  # fmt: skip
            fingerprints = {name: base.fingerprint for name, base in self.service.bases.items()}
            records.write_record(folder, records.RestartRecord(
                arrays_sha256=self.arrays.write(folder), fingerprints=fingerprints, sessions=sessions, results=self.results,
                sampled=self.sampled))  # fmt: skip
        self.count = _counts(len(sessions), len(self.models), len(self.samplers))

    def _has_written(self, folder: Path, owner: str, parts: list[tuple[str | None, Weights | None]]) -> bool:
        """Writes weights of a model or a sampler. Where they cannot be written, as they are not finite, it stays behind."""
        for name, weights in parts:
            if name is not None and weights is not None:
                try:
                    weights.worker.write(weights, folder / name)
                except (InputError, Refused) as error:
                    say(f"espalier serve: {owner} is not kept for the next start: {_reason(error)}")
                    return False
        return True


# A start.


def check(service: "Service") -> None:
    """Raises InputError where models that the last server kept could not come back, as this server has other settings. Reads no
    weights. Damaged files are left to `bring_back`."""
    folder = service.store.restart_folder()
    try:
        record = None if folder is None else records.read_record(folder)
    except Refused:
        return
    if record is None:
        return
    otherwise = f"or remove {folder}, which has what its clients did not save"
    models = [model for session in record.sessions for model in session.models]
    samplers = [sampler for session in record.sessions for sampler in session.samplers]
    for name in sorted({model.base for model in models} | {sampler.base for sampler in samplers}):
        if name not in service.bases:
            raise InputError(f"--model: expected {name}, over which clients of the last server train or sample, received other "
                             f"models: name it, {otherwise}")  # fmt: skip
        if service.bases[name].fingerprint != record.fingerprints.get(name):
            raise InputError(f"--model {name}: expected the weights and the --dtype that the last server had, received others: "
                             f"start with those, {otherwise}")  # fmt: skip
    whole = sum(model.lora.rank == 0 for model in models)
    if whole > service.max_full_models:
        raise InputError(f"--full-models: expected at least {whole}, as the last server kept, received "
                         f"{service.max_full_models}: give that number, {otherwise}")  # fmt: skip


async def bring_back(service: "Service") -> None:
    """What the last server has left comes back, and its files go; says how much that was. Before the workers begin."""
    folder = service.store.restart_folder()
    if folder is None:
        return
    try:
        arriving = _Arriving(service, folder, *await asyncio.to_thread(records.read, folder))
        await arriving.make()
    except Exception as error:
        service.sessions.clear()
        await asyncio.to_thread(service.store.remove_restart)
        say(f"espalier serve: nothing came back of what the last server kept: {_reason(error)}")
        return
    await asyncio.to_thread(service.store.remove_restart)
    arriving.submit()
    say(f"espalier serve: came back from the last server: {arriving.count}")


@dataclass
class _Arriving:
    """What the last server left for a service."""

    service: "Service"
    folder: Path
    record: records.RestartRecord
    arrays: records.Arrays
    count: str = ""
    _waiting: list[Callable[[], object]] = field(default_factory=list)

    async def make(self) -> None:
        """Sessions with all they have, results, and what was recorded."""
        now, service = time.monotonic(), self.service
        for each in self.record.sessions:
            session = Session(each.session_id, each.display_name, seen=now - each.idle_seconds)
            service.sessions[each.session_id] = session
            for model in each.models:
                await self._try(model.model_id, self._make_model(session, model))
            for sampler in each.samplers:
                await self._try(sampler.sampler_id, self._make_sampler(session, sampler))
        for result in self.record.results:
            service.futures.restore(self._result(result, now))
        for sampled in self.record.sampled:
            ends = self.arrays[sampled.ends]
            service.records.add(sampled.request_id, np.split(self.arrays[sampled.logprobs], ends[:-1]))
        sessions = service.sessions.values()
        self.count = _counts(len(sessions), sum(len(each.models) for each in sessions),
                             sum(len(each.samplers) for each in sessions))  # fmt: skip

    async def _try(self, owner: str, work: Any) -> None:
        try:
            await work
        except Exception as error:
            say(f"espalier serve: {owner} did not come back: {_reason(error)}")

    def submit(self) -> None:
        """What had not begun, in its order."""
        for submit in self._waiting:
            try:
                submit()
            except Refused as error:
                logger.warning("a request that the last server kept was refused: %s", error)

    def _weights_folder(self, worker: Worker, name: str, owner: str) -> Path:
        """Among the weights in no use. Raises Refused where they are damaged."""
        place = worker.store.parked()
        try:
            disk.link_tree(self.folder / name, place)
            check_files(place, owner)
        except BaseException:
            disk.remove_tree(place)
            raise
        return place

    async def _make_model(self, session: Session, record: records.ModelRecord) -> None:
        base, lora, service = self.service.bases[record.base], _lora_of(record.lora), self.service
        sampled_by, published = service.snapshot_worker(base, lora), None
        if record.published is not None:
            place = await asyncio.to_thread(self._weights_folder, sampled_by, record.published, record.model_id)
            published = Weights(sampled_by, lora, folder=place, is_snapshot=True)
        passes = None if record.forests is None else [
            [records.passes_of(each, self.arrays) for each in forest] for forest in record.forests]
        waiting = [self._submission(record.model_id, each) for each in record.waiting]
        folder = await asyncio.to_thread(self._weights_folder, base, record.weights, record.model_id)
        worker: TrainingWorker
        if lora.rank > 0:
            worker, weights = base, Weights(base, lora, folder=folder)
        else:
            try:
                full = await asyncio.to_thread(service.new_full_weights, record.model_id, base, lora, folder)
            finally:
                disk.remove_tree(folder)
            worker, weights = full, full.weights
        model = training.Model(record.model_id, worker, weights, service.futures, service.counter, record.next_seq_id)
        model.published, weights.passes = published, passes
        weights.has_gradients = weights.lacks_gradients = weights.passes != []
        session.models[record.model_id] = model
        if isinstance(worker, FullWeights):
            worker.start()
        worker.add(model)
        self._waiting += waiting

    def _submission(self, model_id: str, record: records.OperationRecord) -> Callable[[], object]:
        service = self.service
        if record.passes is not None:
            passes = records.passes_of(record.passes, self.arrays)
            return lambda: service.submit_passes(model_id, record.seq_id, passes)
        calls: dict[type[requests.Request], Callable[[Any], Future]] = {
            requests.OptimStep: service.optim_step, requests.SaveWeights: service.save_weights,
            requests.SaveExternal: service.save_external, requests.SaveForSampler: service.save_for_sampler,
            requests.LoadWeights: service.load_weights}  # fmt: skip
        for kind, call in calls.items():
            if record.kind == kind.__name__:
                return partial(call, kind.model_validate(record.body))
        return lambda: service.refuse(model_id, record.seq_id, Refused(record.reason))

    async def _make_sampler(self, session: Session, record: records.SamplerRecord) -> None:
        base = self.service.bases[record.base]
        sampler = await self._sampler(session, base, record)
        sampler.clients = record.clients
        sampler.completions = {each.client: Completions(each.count, each.kept) for each in record.completions}
        session.samplers[record.sampler_id] = sampler

    async def _sampler(self, session: Session, base: Any, record: records.SamplerRecord) -> Sampler:
        if record.weights is not None and record.lora is not None:
            worker = self.service.snapshot_worker(base, lora := _lora_of(record.lora))
            place = await asyncio.to_thread(self._weights_folder, worker, record.weights, record.sampler_id)
            snapshot = Weights(worker, lora, folder=place, is_snapshot=True)
            return Sampler(record.sampler_id, session, worker, lambda: snapshot, record.model_path, snapshot)
        if record.model_id is None:
            plain = await self.service.plain_weights(base)
            return Sampler(record.sampler_id, session, base, lambda: plain)
        model = session.models.get(record.model_id)
        if model is None or model.published is None:
            raise InputError(f"expected its model {record.model_id}, which did not come back")
        return Sampler(record.sampler_id, session, model.published.worker, lambda: model.published, model=model)

    def _result(self, record: records.ResultRecord, now: float) -> Future:
        payload: bytes | dict[str, Any] | Failure = record.body
        if record.kind == "protobuf":
            payload = self.arrays[record.array].tobytes()
        elif record.kind == "failure":
            payload = Failure(**record.body)
        return Future(record.request_id, record.extra, record.sequences, payload, done_at=now - record.age_seconds)


def _lora_record(lora: LoraSettings) -> LoraRecord:
    return LoraRecord.model_validate(vars(lora))


def _lora_of(record: LoraRecord) -> LoraSettings:
    return LoraSettings(**record.model_dump())


def _counts(sessions: int, models: int, samplers: int) -> str:
    return f"{count_of(sessions, 'session')}, {count_of(models, 'model')}, {count_of(samplers, 'sampler')}"


def _reason(error: Exception) -> str:
    return failure_of(error).error
