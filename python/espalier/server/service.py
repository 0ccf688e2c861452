# SPDX-License-Identifier: Apache-2.0
"""What the routes do: sessions, models, samplers and checkpoints of one server. Runs on the thread of the event loop."""

import asyncio
import contextlib
import copy
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from . import requests, sampling, stopping, training
from .base import Base, Counter
from .data import check_cells, datum_of
from .errors import Refused
from .futures import KEPT_SECONDS, Future, Futures, failure_of
from .losses import RequestLoss
from .full_weights import FullWeights, Snapshots
from .sample_requests import SampleRequests
from .sessions import Records, Sampler, Session
from .store import CheckpointPath, Store
from .tasks import start
from .texts import ModelTexts
from .wire import SMALL_BYTES
from .worker import LoraSettings, TrainingWorker, Weights, Worker

logger = logging.getLogger("uvicorn.error")
SESSION_SECONDS = 600.0    # without a heartbeat, until a session ends; clients send one every 10 seconds
MAX_SESSIONS = 1024
MAX_MODELS = 256           # of a session
MAX_SNAPSHOTS = 256        # of adapters, of a session; the one longest unused goes first
MAX_SAMPLERS = 256         # of other samplers, of a session: of bases, and inflight ones; likewise
MAX_FULL_SNAPSHOTS = 8     # of whole weights, likewise: each takes the disk of a model
MAX_DATA = 4096            # of a request


@dataclass(frozen=True)
class _NewModel:
    """A model that is to be made, for `create_model` or `load_weights`."""

    request: Any
    base: Base
    lora: LoraSettings
    kind: str
    checkpoint: CheckpointPath | None = None  # with whose weights it begins
    optimizer: bool = False                   # and with those of its optimiser

    @property
    def model_id(self) -> str:
        return f"{self.request.session_id}:train:{self.request.model_seq_id}"


class Service:
    """One server. bases: the models, by name; max_full_models: how many may train their whole weights at a time; result_seconds:
    how long results are kept."""

    def __init__(self, bases: Mapping[str, Base], store: Store, max_full_models: int = 0,
                 result_seconds: float = KEPT_SECONDS) -> None:  # fmt: skip
        self.bases = dict(bases)
        self.store = store
        self.futures = Futures(result_seconds)
        self.counter = Counter()
        self.records = Records()
        self.sessions: dict[str, Session] = {}
        self.prefix = "s-"  # of the ids of sessions, with which all other ids begin
        self._plain: dict[str, Weights] | None = None  # adapters of zeros, by base; None: the bases themselves are sampled
        self.services = [self]  # with those of other keys
        self.max_full_models = max_full_models
        self._full_models: set[str] = set()  # their ids, from the request for them on
        self.beside: set[asyncio.Task[None]] = set()  # work of `_begin`, of all keys
        self._snapshots = {name: Snapshots(base) for name, base in self.bases.items()}
        self.texts = {name: ModelTexts(name, base.folder) for name, base in self.bases.items()}
        self._samplers: dict[Worker, sampling.Samplers] = {}
        for worker in (*self.bases.values(), *self._snapshots.values()):
            tokenizer = self.texts[worker.name].stop_tokenizer
            samplers = sampling.Samplers(worker, self.futures, self.counter, self.records.add, tokenizer)
            self._samplers[worker] = samplers
            worker.add(samplers)
        self._sample_requests = SampleRequests(self.futures, self._samplers)

    def for_key(self, name: str, store: Store) -> "Service":
        """That of clients with another key. It shares the models, their threads and the bounds of what waits; sessions, and what
        they have, checkpoints and kept prefixes are its own."""
        other = copy.copy(self)
        other.store, other.sessions, other._plain, other.prefix = store, {}, {}, f"k-{name}-"
        self.services.append(other)
        return other

    def future(self, request_id: str) -> Future | None:
        """As Futures.get, unless the request is that of another key."""
        return self.futures.get(request_id) if request_id.startswith(self.prefix) else None

    def _recorded(self, sequence_id: str) -> Any:
        return self.records.get(sequence_id) if sequence_id.startswith(self.prefix) else None

    def start(self) -> None:
        """Once the event loop runs."""
        for worker in self._samplers:
            worker.start()

    def base(self, name: str | None) -> Base:
        """By name or folder. Raises Refused."""
        for base in self.bases.values():
            if name in (base.name, str(base.folder), base.folder.name):
                return base
        raise Refused(f"base_model: expected one of {', '.join(self.bases)}, received {(name or '')[:100]!r}", 404)

    # Sessions.

    def create_session(self, request: requests.CreateSession) -> Session:
        """Raises Refused where there are too many, or the server stops."""
        self.check_open()
        if len(self.sessions) >= MAX_SESSIONS:
            raise Refused(f"expected at most {MAX_SESSIONS} sessions, received one more", 429)
        session = Session(f"{self.prefix}{secrets.token_hex(8)}", request.display_name)
        self.sessions[session.session_id] = session
        return session

    def check_open(self) -> None:
        """Raises Refused (429) where the server stops: clients then try again, and find what comes after it."""
        if self.futures.is_closed:
            raise Refused("the server stops", 429)

    def session(self, session_id: str) -> Session:
        """Raises Refused (410) where it has ended: clients then stop their heartbeat."""
        session = self.sessions.get(session_id)
        if session is None:
            raise Refused(f"session_id: expected a session that goes on, received {session_id[:100]!r}", 410)
        session.seen = time.monotonic()
        return session

    async def end_session(self, session: Session, why: str) -> None:
        """Ends what it has. Checkpoints stay."""
        self.sessions.pop(session.session_id, None)
        for model in session.models.values():
            _retire(model, why)
        for model in list(session.models.values()):  # after the job that runs, which may add to what the session has
            await self._drop(model)
        for worker in self._samplers:
            await worker.do(_dropping(worker, session))

    async def watch_sessions(self) -> None:
        """Ends sessions whose clients have gone, and requests that wait for one that never comes."""
        while True:
            await asyncio.sleep(min(10.0, SESSION_SECONDS / 4))
            try:
                await self.end_what_is_over()
            except Exception:
                logger.exception("a session could not be ended")
            try:
                await asyncio.to_thread(self.store.tidy, [model for each in self.sessions.values() for model in each.models])
            except Exception:
                logger.exception("an expired checkpoint could not be removed")

    async def end_what_is_over(self) -> None:
        """As `watch_sessions` does now and then."""
        for session in list(self.sessions.values()):
            if time.monotonic() - session.seen > SESSION_SECONDS:
                await self.end_session(session, "the session has ended: no heartbeat came from its client")
            for model in session.models.values():
                model.fail_stalled()

    async def stop(self, seconds: float | None = None, *, keeps: bool = False) -> None:
        """Takes no more requests, and waits so many seconds for those that run; then these fail. None: as long as it takes. Later
        calls do nothing. keeps: what the next start brings back is written, with requests that have not begun."""
        await stopping.stop(self, seconds, keeps=keeps)

    def models(self) -> list[training.Model]:
        """Those of all keys."""
        sessions = [session for service in self.services for session in service.sessions.values()]
        return [model for session in sessions for model in session.models.values()]

    def workers(self) -> list[Worker]:
        """Those of all models."""
        return list({model.worker: None for model in self.models()} | dict.fromkeys(self._samplers))

    # Models.

    def model(self, model_id: str) -> training.Model:
        """Raises Refused."""
        session = self.sessions.get(model_id.partition(":")[0])
        if session is None or model_id not in session.models:
            raise Refused(f"model_id: expected a model of a session that goes on, received {model_id[:100]!r}", 404)
        session.seen = time.monotonic()
        return session.models[model_id]

    def create_model(self, request: requests.CreateModel) -> Future:
        """A model with a new adapter, or with whole weights."""
        _check_optimizer(request.optimizer_config)
        base = self.base(request.base_model)
        given = request.lora_config or requests.Lora(rank=0)
        seed = secrets.randbits(31) if given.seed is None else given.seed
        lora = LoraSettings(given.rank, seed, given.train_mlp, given.train_attn, given.train_unembed)
        if lora.rank == 0 and not (lora.train_mlp and lora.train_attn and lora.train_unembed):
            raise Refused("lora_config: expected train_mlp, train_attn and train_unembed with rank 0, which trains all weights, "
                          "received one that is false")  # fmt: skip
        return self._new_model(_NewModel(request, base, lora, "create_model"))

    def _new_model(self, new: "_NewModel") -> Future:
        session = self.session(new.request.session_id)
        request_id = f"{new.model_id}:{new.kind}"
        if (known := self.futures.get(request_id)) is not None:
            return known
        if new.model_id in session.models or len(session.models) >= MAX_MODELS:
            raise Refused(f"model_seq_id: expected a new number, and at most {MAX_MODELS} models of a session, received "
                          f"{new.request.model_seq_id}")  # fmt: skip
        if new.lora.rank == 0:
            self._check_full_models()
        future = self.futures.create(request_id, model_id=new.model_id)  # may refuse
        if new.lora.rank == 0:
            self._full_models.add(new.model_id)

        async def work() -> dict[str, Any]:
            model = training.Model(new.model_id, *await self._new_weights(new), self.futures, self.counter)
            try:
                given = new.request.user_metadata
                texts = None if given is None else {str(name): str(value) for name, value in given.items()}
                about = {"base_model": new.base.name, "lora": vars(new.lora), "user_metadata": texts}
                await asyncio.to_thread(self.store.add_run, new.model_id, about)
                if self.sessions.get(session.session_id) is not session:
                    raise Refused("session_id: expected a session that goes on; it has ended")
            except Exception:
                await self._drop(model)
                raise
            session.models[new.model_id] = model
            model.worker.add(model)
            return {"type": new.kind, "model_id": new.model_id}

        return self._begin(future, work())

    async def _new_weights(self, new: "_NewModel") -> tuple[TrainingWorker, Weights]:
        base = new.base

        def make() -> Weights:
            if new.checkpoint is None:
                return base.new_weights(new.lora)
            with self.store.reading(new.checkpoint, optimizer=new.optimizer) as folder:
                return base.load(folder, new.lora, optimizer=new.optimizer)

        def make_full() -> FullWeights:
            reading = None if new.checkpoint is None else self.store.reading(new.checkpoint, optimizer=new.optimizer)
            with reading or contextlib.nullcontext() as folder:
                return FullWeights(base, new.lora, self._snapshots[base.name], folder, optimizer=new.optimizer)

        if new.lora.rank > 0:
            return base, await base.do(make)
        try:
            full = await asyncio.to_thread(make_full)
        except BaseException:
            self._full_models.discard(new.model_id)
            raise
        full.start()
        return full, full.weights

    def new_full_weights(self, model_id: str, base: Base, lora: LoraSettings, folder: Path) -> FullWeights:
        """Of a model that comes back, as they lie in a folder. Raises InputError, Refused where there are too many."""
        self._check_full_models()
        full = FullWeights(base, lora, self._snapshots[base.name], folder, optimizer=True)
        self._full_models.add(model_id)
        return full

    def snapshot_worker(self, base: Base, lora: LoraSettings) -> Worker:
        """What samples snapshots."""
        return base if lora.rank > 0 else self._snapshots[base.name]

    def _check_full_models(self) -> None:
        if len(self._full_models) >= self.max_full_models:
            raise Refused(f"lora_config: expected at most {self.max_full_models} models with whole weights (--full-models), "
                          "received one more")  # fmt: skip

    async def _drop(self, model: training.Model) -> None:
        """After its last job."""
        worker = model.worker

        def drop() -> None:
            for weights in (model.weights, model.published):
                if weights is not None:
                    weights.worker.drop(weights)

        await worker.do(drop)
        if isinstance(worker, FullWeights):
            await worker.stop()
            self._full_models.discard(model.model_id)

    def _begin(self, future: Future, work: Awaitable[dict[str, Any]]) -> Future:
        """Work beside that of the models; its result or error is that of the future."""
        async def ending() -> None:
            try:
                self.futures.finish(future, await work)
            except Exception as error:
                self.futures.finish(future, failure_of(error))

        task = start(ending())
        self.beside.add(task)
        task.add_done_callback(self.beside.discard)
        return future

    def _submit(self, model_id: str, seq_id: int, make: Callable[[training.Model], training.Work | training.Passes],
                request: requests.Request | str = "") -> Future:  # fmt: skip
        """An operation of a model. A repeated seq_id gets the future of the first. request: as of training.Operation.

        Where `make` cannot read the request, it fails in its turn: a number that is left out would stop all later ones.
        """
        request_id = f"{model_id}:{seq_id}"
        model = self.model(model_id)
        if (known := self.futures.get(request_id)) is not None:
            return known
        model.check(seq_id)
        future = self.futures.create(request_id, others_wait=model.is_next(seq_id))
        try:
            work = make(model)
        except Exception as error:
            work, request = _failing(error), str(error)
        model.submit(seq_id, training.Operation(future, work, request))
        return future

    def check_room(self, body_bytes: int, model_id: str | None, seq_id: int | None) -> None:
        """Raises Refused where too many bytes of requests wait, unless they wait for this operation of their model."""
        if model_id is None or seq_id is None or not self.model(model_id).is_next(seq_id):
            self.futures.check_room(body_bytes)

    def refuse(self, model_id: str, seq_id: int, error: Exception) -> Future:
        """A request that cannot be read, in its turn."""
        return self._submit(model_id, seq_id, lambda model: _failing(error), str(error))

    async def forward_backward(self, message: Any, body_bytes: int) -> Future:
        """A ForwardBackwardRequest that came in so many bytes. A large one is read beside the event loop."""
        if (many := len(message.data)) > MAX_DATA:
            error = Refused(f"data: expected 1 to {MAX_DATA} of a request, received {many}")
            if isinstance(message.model_id, bytes):
                raise error
            return self.refuse(message.model_id, message.seq_id, error)
        config: dict[str, float | str] = dict(message.loss_fn_config)
        for name, value in message.loss_fn_config_v2.items():
            config[name] = value.text if value.HasField("text") else value.number
        # Protobuf gives bytes where a text is not UTF-8.
        texts = [message.loss_fn, *config, *config.values(), *(name for datum in message.data for name in datum.loss_fn_inputs)]
        if isinstance(message.model_id, bytes) or any(isinstance(text, bytes) for text in texts):
            raise Refused("expected texts in UTF-8, received others")
        self.check_room(body_bytes, message.model_id, message.seq_id)

        worker = self.model(message.model_id).worker
        if (known := self.futures.get(f"{message.model_id}:{message.seq_id}")) is not None:
            return known

        def make() -> training.Passes:
            if not message.data:
                raise Refused(f"data: expected 1 to {MAX_DATA} of a request, received none")
            check_cells(message.data)
            data = [datum_of(datum, worker.vocab_size, worker.max_context) for datum in message.data]
            loss = RequestLoss(message.loss_fn, config, data, self._recorded)
            return training.Passes(data, loss, message.forward_only)

        try:
            passes = make() if body_bytes <= SMALL_BYTES else await asyncio.to_thread(make)
        except Exception as error:
            return self.refuse(message.model_id, message.seq_id, error)
        self.check_room(passes.nbytes, message.model_id, message.seq_id)
        return self.submit_passes(message.model_id, message.seq_id, passes, body_bytes)

    def submit_passes(self, model_id: str, seq_id: int, passes: training.Passes, body_bytes: int = 0) -> Future:
        """Passes that are read."""
        future = self._submit(model_id, seq_id, lambda model: passes)
        self.futures.add_body(future, max(body_bytes, passes.nbytes))
        return future

    def optim_step(self, request: requests.OptimStep) -> Future:
        return self._submit(request.model_id, request.seq_id, lambda model: training.optim_step(request.optim_params), request)

    def unload_model(self, model_id: str) -> Future:
        """Forgets a model; its checkpoints stay."""
        if (known := self.future(f"{model_id}:unload")) is not None:
            return known
        model = self.model(model_id)
        future = self.futures.create(f"{model_id}:unload")
        del self.sessions[model_id.partition(":")[0]].models[model_id]
        _retire(model, "the model was unloaded")

        async def work() -> dict[str, Any]:
            await self._drop(model)
            return {"type": "unload_model", "model_id": model_id}

        return self._begin(future, work())

    # Checkpoints.

    def save_weights(self, request: requests.SaveWeights, kind: str = "weights") -> Future:
        """Writes a checkpoint."""
        def work(model: training.Model) -> dict[str, Any]:
            path = CheckpointPath.of(request.model_id, f"{kind}/{request.path or f'{request.seq_id:06d}'}")
            with self.store.writing(path, overwrite=request.overwrite or kind != "weights", ttl_seconds=request.ttl_seconds,
                                    user_metadata=request.user_metadata) as folder:  # fmt: skip
                model.worker.save(model.weights, folder, optimizer=kind == "weights")
            return {"type": {"weights": "save_weights", "sampler_weights": "save_weights_for_sampler"}.get(
                kind, "save_weights_external"), "path": str(path)}  # fmt: skip

        return self._submit(request.model_id, request.seq_id, lambda model: work, request)

    def save_external(self, request: requests.SaveExternal) -> Future:
        """A folder of PEFT for use elsewhere."""
        if request.age_encryption_recipients:
            return self.refuse(request.model_id, request.seq_id,
                               Refused("age_encryption_recipients: expected none, files are not encrypted here"))
        return self.save_weights(request, "external_weights")

    def save_for_sampler(self, request: requests.SaveForSampler) -> Future:
        """A checkpoint under a name, or a sampler of the weights as they are now."""
        if request.sampling_session_seq_id is None:
            return self.save_weights(request, "sampler_weights")
        session = self.session(request.model_id.partition(":")[0])
        self._make_room(session, None if request.kind == "inflight" else self.model(request.model_id).lora)
        sampler_id = f"{session.session_id}:sample:{request.sampling_session_seq_id}"

        def work(model: training.Model) -> dict[str, Any]:
            copy = model.worker.snapshot(model.weights)
            if request.kind == "inflight":
                before, model.published = model.published, copy
                if before is not None:
                    before.worker.drop(before)
                sampler = Sampler(sampler_id, session, copy.worker, lambda: model.published, model=model)
            else:
                sampler = Sampler(sampler_id, session, copy.worker, lambda: copy, owned=copy)
            replaced = session.samplers.pop(sampler_id, None)
            session.samplers[sampler_id] = sampler
            if replaced is not None:  # its weights go
                replaced.worker.do_later(replaced.drop)
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampler_id}

        return self._submit(request.model_id, request.seq_id, lambda model: work, request)

    def _checkpoint(self, text: str) -> tuple[CheckpointPath, Base, LoraSettings]:
        path = CheckpointPath.parse(text)
        run = self.store.run_of(path)
        return path, self.base(run.base_model), LoraSettings(**run.lora.model_dump())

    def load_weights(self, request: requests.LoadWeights) -> Future:
        """Into a model, or into a new one."""
        if request.model_id is None:
            if request.session_id is None or request.model_seq_id is None:
                raise Refused("load_weights: expected model_id and seq_id, or session_id and model_seq_id, received neither")
            if request.optimizer_config is not None:
                _check_optimizer(request.optimizer_config)
            path, base, lora = self._checkpoint(request.path)
            return self._new_model(_NewModel(request, base, lora, "load_weights", path, request.optimizer))

        def work(model: training.Model) -> dict[str, Any]:
            path, base, lora = self._checkpoint(request.path)
            if model.worker.served is not base or model.lora != lora:
                raise Refused(f"{path}: expected weights of {model.worker.name} with {model.lora}, received those of {base.name} "
                              f"with {lora}")  # fmt: skip
            with self.store.reading(path, optimizer=request.optimizer) as folder:
                model.weights = model.worker.replaced(model.weights, folder, optimizer=request.optimizer)
            return {"type": "load_weights", "path": str(path), "model_id": model.model_id}

        return self._submit(request.model_id, request.seq_id or 0, lambda model: work, request)

    async def copy_weights(self, request: requests.CopyWeights) -> str:
        """A copy of a checkpoint under a new run. Returns its path."""
        path, base, lora = self._checkpoint(request.source_path)
        run = f"copy-{secrets.token_hex(8)}:train:0"
        about = {"base_model": base.name, "lora": vars(lora), "user_metadata": None}
        return str(await asyncio.to_thread(self.store.copy, path, run, about, request.ttl_seconds))

    def weights_info(self, text: str) -> dict[str, Any]:
        _, base, lora = self._checkpoint(text)
        return {"base_model": base.name, "is_lora": lora.rank > 0, "lora_rank": lora.rank, "train_unembed": lora.train_unembed,
                "train_mlp": lora.train_mlp, "train_attn": lora.train_attn}  # fmt: skip

    # Samplers.

    async def create_sampling_session(self, request: requests.CreateSamplingSession) -> str:
        """Of a checkpoint, or of a base."""
        self.check_open()
        session = self.session(request.session_id)
        sampler_id = f"{session.session_id}:sample:{request.sampling_session_seq_id}"
        if sampler_id in session.samplers:
            return sampler_id
        if request.model_path is None:
            base = self.base(request.base_model)
            plain = await self.plain_weights(base)
            self._make_room(session, None)
            session.samplers[sampler_id] = Sampler(sampler_id, session, base, lambda: plain)
            return sampler_id
        path, base, lora = self._checkpoint(request.model_path)
        worker, read = self._reader(path, base, lora)
        self._make_room(session, lora)

        def load() -> None:
            if sampler_id not in session.samplers:  # else a repeated request was faster
                weights = read()
                session.samplers[sampler_id] = Sampler(sampler_id, session, worker, lambda: weights, str(path), weights)

        await worker.do(load)
        if self.sessions.get(session.session_id) is not session:
            await worker.do(_dropping(worker, session))
        return sampler_id

    def _reader(self, path: CheckpointPath, base: Base, lora: LoraSettings) -> tuple[Worker, Callable[[], Weights]]:
        """What samples a checkpoint, and what reads it on the thread of that."""
        if lora.rank == 0:
            snapshots = self._snapshots[base.name]
            return snapshots, partial(snapshots.load, self.store, path, lora)

        def read() -> Weights:
            with self.store.reading(path) as folder:
                return base.load(folder, lora, optimizer=False, is_snapshot=True)

        return base, read

    def snapshot_of(self, text: str) -> tuple[Path, Worker, Callable[[], Weights]]:
        """The folder of a checkpoint, what samples it, and what reads it on the thread of that. Raises Refused."""
        path, base, lora = self._checkpoint(text)
        return self.store.find(path), *self._reader(path, base, lora)

    async def plain_weights(self, base: Base) -> Weights | None:
        """What is sampled for a base. Weights of its own keep the prefixes of a key apart from those of others."""
        if self._plain is None:
            return None
        if base.name not in self._plain:
            made = await base.do(base.zeros)
            if self._plain.setdefault(base.name, made) is not made:  # another request was faster
                await base.do(partial(base.drop, made))
        return self._plain[base.name]

    def submit(self, request: sampling.Request, worker: Worker) -> None:
        """Has a request of another API sampled. Raises Refused where too many wait."""
        self._samplers[worker].check_room(request.client)
        self._sample_requests.submit(request, worker)

    def _make_room(self, session: Session, lora: LoraSettings | None) -> None:
        """For one more sampler with a snapshot of this kind, or without one."""
        kind = _snapshot_kind(lora)
        most = {"none": MAX_SAMPLERS, "adapter": MAX_SNAPSHOTS, "whole weights": MAX_FULL_SNAPSHOTS}[kind]
        same = [sampler for sampler in list(session.samplers.values())
                if _snapshot_kind(sampler.owned.lora if sampler.owned else None) == kind]  # fmt: skip
        for sampler in same[: max(0, len(same) - most + 1)]:
            del session.samplers[sampler.sampler_id]
            start(sampler.worker.do(sampler.drop))

    def sampler(self, sampler_id: str) -> Sampler:
        """Raises Refused."""
        session = self.sessions.get(sampler_id.partition(":")[0])
        if session is None or sampler_id not in session.samplers:
            raise Refused(f"sampling_session_id: expected one of a session that goes on, received {sampler_id[:100]!r}", 404)
        session.seen = time.monotonic()
        session.samplers[sampler_id] = session.samplers.pop(sampler_id)
        return session.samplers[sampler_id]

    def sample(self, request: requests.Sample) -> Future:
        """Raises Refused."""
        if request.sampling_session_id is None or request.seq_id is None:
            raise Refused("asample: expected sampling_session_id and seq_id, received none: create_sampling_session gives one")
        return self._sample_requests.begin(self.sampler(request.sampling_session_id), request, request.seq_id)

    async def completions(self, request: requests.RetrieveFutures) -> dict[str, Any]:
        """Those of a sampler since a cursor; waits for one."""
        return await self._sample_requests.completions(self.sampler(request.target.sampling_session_id), request)

    def cancel(self, request_id: str) -> None:
        if request_id and self.future(request_id) is None:
            return
        for samplers in self._samplers.values():
            samplers.cancel(request_id)


def _snapshot_kind(lora: LoraSettings | None) -> str:
    return "none" if lora is None else "adapter" if lora.rank > 0 else "whole weights"


def _failing(error: Exception) -> training.Work:
    if isinstance(error, Refused):
        error.__traceback__ = None  # whose frames hold the request

    def fail(model: training.Model) -> dict[str, Any]:
        raise error

    return fail


def _retire(model: training.Model, why: str) -> None:
    """No more of its jobs begin."""
    model.fail_all(why)
    model.worker.remove(model)


def _dropping(worker: Worker, session: Session) -> Callable[[], None]:
    """Forgets what samplers of a session that has ended have of a worker."""
    def drop() -> None:
        for sampler in session.samplers.values():
            if sampler.worker is worker:
                sampler.drop()

    return drop


def _check_optimizer(optimizer: requests.Optimizer) -> None:
    if optimizer.type != "adamw":
        raise Refused(f"optimizer_config: expected adamw, the optimiser of this server, received {optimizer.type[:100]!r}")
