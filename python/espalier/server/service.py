# SPDX-License-Identifier: Apache-2.0
"""What the routes do: sessions, models, samplers and checkpoints of one server. Runs on the thread of the event loop."""

import asyncio
import collections
import hashlib
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from . import requests, sampling, training
from .base import Adapter, Base, Counter, LoraSettings, refused_as_user
from .data import datum_of
from .errors import Refused
from .futures import Failure, Future, Futures
from .losses import RequestLoss
from .store import CheckpointPath, Store

SESSION_SECONDS = 600.0    # without a heartbeat, until a session ends; clients send one every 10 seconds
RECORD_SECONDS = 86400.0   # that sampled sequences are remembered for stable_reinforce
RECORDED_TOKENS = 1 << 27  # of all of them; the oldest go first
MAX_SESSIONS = 1024
MAX_DATA = 4096            # of a request


@dataclass
class Session:
    """A client."""

    session_id: str
    user_metadata: dict[str, Any] | None
    display_name: str | None
    seen: float = field(default_factory=time.monotonic)
    models: dict[str, training.Model] = field(default_factory=dict)
    samplers: dict[str, "Sampler"] = field(default_factory=dict)


@dataclass
class Sampler:
    """A sampling session: weights that a client samples from."""

    sampler_id: str
    session: Session
    base: Base
    weights: sampling.Weights
    model_path: str | None = None
    owned: Adapter | None = None  # goes with the sampler
    clients: int = 0
    completions: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # by client, in order
    news: asyncio.Event = field(default_factory=asyncio.Event)


class Records:
    """Log-probabilities of sampled sequences, by their ids, as they were when they were sampled."""

    def __init__(self) -> None:
        self._kept: collections.OrderedDict[str, tuple[float, Any]] = collections.OrderedDict()
        self._tokens = 0

    def add(self, sequence_id: str, logprobs: Any) -> None:
        self._kept[sequence_id] = (time.monotonic(), np.asarray(logprobs, np.float32))
        self._tokens += len(logprobs)
        oldest = time.monotonic() - RECORD_SECONDS
        while self._kept:
            first = next(iter(self._kept))
            if self._kept[first][0] >= oldest and self._tokens <= RECORDED_TOKENS:
                return
            self._tokens -= len(self._kept.pop(first)[1])

    def get(self, sequence_id: str) -> Any:
        """None where there is none. Training on a sequence keeps it for another day."""
        if sequence_id not in self._kept:
            return None
        self._kept[sequence_id] = (time.monotonic(), self._kept.pop(sequence_id)[1])
        return self._kept[sequence_id][1]


class Service:
    """One server.

    Args:
        bases: The models, by name.
        store: Checkpoints.
    """

    def __init__(self, bases: Mapping[str, Base], store: Store) -> None:
        self.bases = dict(bases)
        self.store = store
        self.futures = Futures()
        self.counter = Counter()
        self.records = Records()
        self.sessions: dict[str, Session] = {}
        self.is_stopping = False
        self._samplers: dict[str, sampling.Samplers] = {}
        for name, base in self.bases.items():
            self._samplers[name] = sampling.Samplers(base, self.futures, self.counter, self.records.add, _tokenizer(base.folder))
            base.add(self._samplers[name])

    def base(self, name: str | None) -> Base:
        """By name or folder. Raises Refused."""
        for base in self.bases.values():
            if name in (base.name, str(base.folder), base.folder.name):
                return base
        raise Refused(f"base_model: expected one of {', '.join(self.bases)}, received {name!r}", 404)

    # Sessions.

    def create_session(self, request: requests.CreateSession) -> Session:
        """Raises Refused where there are too many."""
        if len(self.sessions) >= MAX_SESSIONS:
            raise Refused(f"expected at most {MAX_SESSIONS} sessions, received one more", 429)
        session = Session(f"s-{secrets.token_hex(8)}", request.user_metadata, request.display_name)
        self.sessions[session.session_id] = session
        return session

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
        for sampler in session.samplers.values():
            if sampler.owned is not None:
                await sampler.base.do(_dropping(sampler.base, sampler.owned))
        for model in list(session.models.values()):
            await self._end_model(model, why)

    async def _end_model(self, model: training.Model, why: str) -> None:
        model.fail_all(why)
        model.base.remove(model)
        for adapter in (model.adapter, model.published):
            if adapter is not None:
                await model.base.do(_dropping(model.base, adapter))

    async def watch_sessions(self) -> None:
        """Ends sessions whose clients have gone."""
        while True:
            await asyncio.sleep(min(10.0, SESSION_SECONDS / 4))
            for session in list(self.sessions.values()):
                if time.monotonic() - session.seen > SESSION_SECONDS:
                    await self.end_session(session, "the session has ended: no heartbeat came from its client")

    # Models.

    def model(self, model_id: str) -> training.Model:
        """Raises Refused."""
        session = self.sessions.get(model_id.partition(":")[0])
        if session is None or model_id not in session.models:
            raise Refused(f"model_id: expected a model of a session that goes on, received {model_id[:100]!r}", 404)
        session.seen = time.monotonic()
        return session.models[model_id]

    def create_model(self, request: requests.CreateModel) -> Future:
        """A model with a new adapter."""
        _check_optimizer(request.optimizer_config)
        base = self.base(request.base_model)
        if request.lora_config is None:
            raise Refused("lora_config: expected the settings of an adapter, received none: whole weights are not trained here")
        given = request.lora_config
        seed = secrets.randbits(31) if given.seed is None else given.seed
        lora = LoraSettings(given.rank, seed, given.train_mlp, given.train_attn, given.train_unembed)
        return self._new_model(request.session_id, request.model_seq_id, base, lora, request.user_metadata,
                               lambda model: base.new_adapter(lora), "create_model")  # fmt: skip

    def _new_model(self, session_id: str, number: int, base: Base, lora: LoraSettings, metadata: Any,
                   make: Callable[[training.Model], Adapter], kind: str) -> Future:  # fmt: skip
        session = self.session(session_id)
        model_id = f"{session.session_id}:train:{number}"
        request_id = f"{model_id}:{kind}"
        if (known := self.futures.get(request_id)) is not None:
            return known
        model = training.Model(model_id, base, lora, self.futures, self.counter)
        future = self._future(request_id)

        async def work() -> None:
            try:
                model.adapter = await base.do(lambda: make(model))
            except Exception as error:
                self.futures.finish(future, _failure(error))
                return
            session.models[model_id] = model
            base.add(model)
            self.store.add_run(model_id, {"base_model": base.name, "lora": vars(lora), "user_metadata": _texts(metadata)})
            self.futures.finish(future, {"type": kind, "model_id": model_id})

        future.extra["model_id"] = model_id
        _start(work())
        return future

    def _future(self, request_id: str, **extra: Any) -> Future:
        if self.futures.is_full or self.is_stopping:
            raise Refused("the server is busy: too many requests wait" if not self.is_stopping else "the server stops", 429)
        return self.futures.create(request_id, **extra)

    def _submit(self, model_id: str, seq_id: int, make: Callable[[training.Model, Future], training.Operation]) -> Future:
        """An operation of a model. A repeated seq_id gets the future of the first."""
        model = self.model(model_id)
        request_id = f"{model_id}:{seq_id}"
        if (known := self.futures.get(request_id)) is not None:
            return known
        future = Future(request_id)
        operation = make(model, future)
        model.submit(seq_id, operation)
        operation.future = self._future(request_id)
        return operation.future

    def forward_backward(self, message: Any) -> Future:
        """A ForwardBackwardRequest."""
        if len(message.data) > MAX_DATA:
            raise Refused(f"data: expected at most {MAX_DATA} of a request, received {len(message.data)}")
        if not message.data:
            raise Refused("data: expected at least one datum, received none")
        config: dict[str, float | str] = dict(message.loss_fn_config)
        for name, value in message.loss_fn_config_v2.items():
            config[name] = value.text if value.HasField("text") else value.number

        def make(model: training.Model, future: Future) -> training.Operation:
            base = model.base
            data = [datum_of(datum, base.vocab_size, base.max_context) for datum in message.data]
            loss = RequestLoss(message.loss_fn, config, data, self.records.get)
            return training.Operation(future, passes=training.Passes(data, loss, message.forward_only))

        return self._submit(message.model_id, message.seq_id, _failing_later(make))

    def optim_step(self, request: requests.OptimStep) -> Future:
        work = training.optim_step(request.optim_params)
        return self._submit(request.model_id, request.seq_id, lambda model, future: training.Operation(future, work))

    def unload_model(self, model_id: str) -> Future:
        """Forgets a model; its checkpoints stay."""
        model = self.model(model_id)
        future = self._future(f"{model_id}:unload")

        async def work() -> None:
            self.session(model_id.partition(":")[0]).models.pop(model_id, None)
            await self._end_model(model, "the model was unloaded")
            self.futures.finish(future, {"type": "unload_model", "model_id": model_id})

        _start(work())
        return future

    # Checkpoints.

    def save_weights(self, request: requests.SaveWeights, kind: str = "weights") -> Future:
        """Writes a checkpoint."""
        name = request.path or f"{request.seq_id:06d}"
        path = CheckpointPath.of(request.model_id, f"{kind}/{name}")

        def work(model: training.Model) -> dict[str, Any]:
            folder = self.store.reserve(path, request.overwrite or kind != "weights")
            model.base.use(model.adapter)
            model.base.engine.save(folder)
            self.store.publish(path, folder, ttl_seconds=request.ttl_seconds, user_metadata=request.user_metadata)
            return {"type": {"weights": "save_weights", "sampler_weights": "save_weights_for_sampler"}.get(
                kind, "save_weights_external"), "path": str(path)}  # fmt: skip

        return self._submit(request.model_id, request.seq_id, lambda model, future: training.Operation(future, work))

    def save_for_sampler(self, request: requests.SaveForSampler) -> Future:
        """A checkpoint under a name, or a sampler of the weights as they are now."""
        if request.sampling_session_seq_id is None:
            return self.save_weights(request, "sampler_weights")
        session = self.session(request.model_id.partition(":")[0])
        sampler_id = f"{session.session_id}:sample:{request.sampling_session_seq_id}"

        def work(model: training.Model) -> dict[str, Any]:
            assert model.adapter is not None
            copy = model.base.snapshot(model.adapter)
            if request.kind == "inflight":
                before, model.published = model.published, copy
                if before is not None:
                    model.base.drop(before)
                sampler = Sampler(sampler_id, session, model.base, lambda: model.published)
            else:
                sampler = Sampler(sampler_id, session, model.base, lambda: copy, owned=copy)
            session.samplers[sampler_id] = sampler
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampler_id}

        return self._submit(request.model_id, request.seq_id, lambda model, future: training.Operation(future, work))

    def _checkpoint(self, text: str) -> tuple[Path, Base, LoraSettings, CheckpointPath]:
        path = CheckpointPath.parse(text)
        folder = self.store.find(path)
        run = self.store.run(path.run)
        if run is None:
            raise Refused(f"{path}: expected a checkpoint of a known training run", 404)
        return folder, self.base(run["base_model"]), LoraSettings(**run["about"]["lora"]), path

    def load_weights(self, request: requests.LoadWeights) -> Future:
        """Into a model, or into a new one."""
        if request.optimizer_config is not None:
            _check_optimizer(request.optimizer_config)
        folder, base, lora, path = self._checkpoint(request.path)
        if request.model_id is None:
            if request.session_id is None or request.model_seq_id is None:
                raise Refused("load_weights: expected model_id and seq_id, or session_id and model_seq_id, received neither")
            def make(model: training.Model) -> Adapter:
                return base.load(folder, lora, optimizer=request.optimizer)

            return self._new_model(request.session_id, request.model_seq_id, base, lora, request.user_metadata, make,
                                   "load_weights")  # fmt: skip

        def work(model: training.Model) -> dict[str, Any]:
            if model.base is not base or model.lora.rank != lora.rank:
                raise Refused(f"{path}: expected an adapter of {model.base.name} with rank {model.lora.rank}, received one of "
                              f"{base.name} with rank {lora.rank}")  # fmt: skip
            before, model.adapter = model.adapter, base.load(folder, lora, optimizer=request.optimizer)
            if before is not None:
                base.drop(before)
            return {"type": "load_weights", "path": str(path), "model_id": model.model_id}

        return self._submit(request.model_id, request.seq_id or 0, lambda model, future: training.Operation(future, work))

    def copy_weights(self, request: requests.CopyWeights) -> str:
        """A copy of a checkpoint under a run of its own. Returns its path."""
        import shutil

        folder, base, lora, path = self._checkpoint(request.source_path)
        run = f"copy-{secrets.token_hex(8)}:train:0"
        self.store.add_run(run, {"base_model": base.name, "lora": vars(lora), "user_metadata": None})
        copy = CheckpointPath(run, path.kind, path.name)
        place = self.store.reserve(copy, overwrite=False)
        shutil.copytree(folder, place)
        self.store.publish(copy, place, ttl_seconds=request.ttl_seconds)
        return str(copy)

    def weights_info(self, text: str) -> dict[str, Any]:
        _, base, lora, _ = self._checkpoint(text)
        return {"base_model": base.name, "is_lora": True, "lora_rank": lora.rank, "train_unembed": lora.train_unembed,
                "train_mlp": lora.train_mlp, "train_attn": lora.train_attn}  # fmt: skip

    # Samplers.

    async def create_sampling_session(self, request: requests.CreateSamplingSession) -> str:
        """Of a checkpoint, or of a base."""
        session = self.session(request.session_id)
        sampler_id = f"{session.session_id}:sample:{request.sampling_session_seq_id}"
        if sampler_id in session.samplers:
            return sampler_id
        if request.model_path is None:
            base = self.base(request.base_model)
            session.samplers[sampler_id] = Sampler(sampler_id, session, base, lambda: None)
            return sampler_id
        folder, base, lora, path = self._checkpoint(request.model_path)
        adapter = await base.do(lambda: base.load(folder, lora, optimizer=False, is_snapshot=True))
        session.samplers[sampler_id] = Sampler(sampler_id, session, base, lambda: adapter, str(path), adapter)
        return sampler_id

    def sampler(self, sampler_id: str) -> Sampler:
        """Raises Refused."""
        session = self.sessions.get(sampler_id.partition(":")[0])
        if session is None or sampler_id not in session.samplers:
            raise Refused(f"sampling_session_id: expected one of a session that goes on, received {sampler_id[:100]!r}", 404)
        session.seen = time.monotonic()
        return session.samplers[sampler_id]

    def sample(self, request: requests.Sample) -> Future:
        """Raises Refused."""
        if request.sampling_session_id is None or request.seq_id is None:
            raise Refused("asample: expected sampling_session_id and seq_id, received none: create_sampling_session gives one")
        sampler = self.sampler(request.sampling_session_id)
        request_id = f"{sampler.sampler_id}:{request.seq_id}"
        if (known := self.futures.get(request_id)) is not None:
            return known
        base = sampler.base
        prompt, max_tokens = _prompt(request, base)
        targets = None
        if request.target_prompt_logprobs is not None:
            targets = sampling.target_table(request.target_prompt_logprobs, len(prompt), base.vocab_size)
        ids = [f"{request_id}:{number}" for number in range(request.num_samples)]
        future = self._future(request_id, sample_sequence_ids=ids)
        try:
            self._samplers[base.name].submit(
                sampling.Request(future, request, prompt, max_tokens, sampler.weights, ids, targets))  # fmt: skip
        except Refused as error:
            self.futures.finish(future, Failure(str(error), "user"))
        _start(self._tell(sampler, request.seq_id // 1_000_000_000, future))
        return future

    async def _tell(self, sampler: Sampler, client: int, future: Future) -> None:
        """Adds the end of a request to what `retrieve_futures` tells."""
        await future.done.wait()
        failed = isinstance(future.payload, Failure)
        told: dict[str, Any] = {"state": "failed" if failed else "finished", "request_id": future.request_id}
        if not failed:
            told["response_payload_uncompressed_size"] = future.size
        sampler.completions.setdefault(client, []).append(told)
        sampler.news.set()

    async def completions(self, request: requests.RetrieveFutures) -> dict[str, Any]:
        """Those of a sampler since a cursor; waits for one."""
        sampler = self.sampler(request.target.sampling_session_id)
        until = time.monotonic() + (30.0 if request.timeout is None else min(request.timeout, 30.0))
        while True:
            known = sampler.completions.get(request.target.cloned_sampler_id, [])
            left = until - time.monotonic()
            if len(known) > request.prev_cursor or left <= 0:
                return {"completions": known[request.prev_cursor :], "cursor": max(len(known), request.prev_cursor)}
            sampler.news.clear()
            try:
                await asyncio.wait_for(sampler.news.wait(), left)
            except TimeoutError:
                continue

    def cancel(self, request_id: str) -> None:
        for samplers in self._samplers.values():
            samplers.cancel(request_id)


def _prompt(request: requests.Sample, base: Base) -> tuple[Any, int]:
    """Tokens of a prompt, and how many may be sampled."""
    for chunk in request.prompt.chunks:
        if chunk.type != "encoded_text":
            raise Refused(f"prompt: expected chunks of tokens alone, received one of type {chunk.type!r}")
    ids = [token for chunk in request.prompt.chunks for token in chunk.tokens]
    if not 1 <= len(ids) < base.max_context:
        raise Refused(f"prompt: expected 1 to {base.max_context - 1} tokens, received {len(ids)}")
    if min(ids) < 0 or max(ids) >= base.vocab_size:
        raise Refused(f"prompt: expected token ids from 0 and below {base.vocab_size}, received {min(ids)} to {max(ids)}")
    room = base.max_context - len(ids)
    return np.array(ids, np.int32), min(request.sampling_params.max_tokens or room, room)


def _failing_later(make: Callable[[training.Model, Future], training.Operation]) -> Callable[..., training.Operation]:
    """Data that cannot be used fail as the result of their request: its turn in the order of the model is taken."""

    def made(model: training.Model, future: Future) -> training.Operation:
        try:
            return make(model, future)
        except Refused as error:
            message = str(error)

        def fail(model: training.Model) -> dict[str, Any]:
            raise Refused(message)

        return training.Operation(future, fail)

    return made


def _dropping(base: Base, adapter: Adapter) -> Callable[[], None]:
    return lambda: base.drop(adapter)


def _failure(error: Exception) -> Failure:
    is_user = refused_as_user(error)
    return Failure(str(error) if is_user else f"{type(error).__name__}: {error}", "user" if is_user else "server")


def _check_optimizer(optimizer: requests.Optimizer) -> None:
    if optimizer.type != "adamw":
        raise Refused(f"optimizer_config: expected adamw, the optimiser of this server, received {optimizer.type!r}")


def _texts(metadata: Any) -> dict[str, str] | None:
    return None if metadata is None else {str(name): str(value) for name, value in metadata.items()}


_tasks: set[asyncio.Task[None]] = set()


def _start(work: Any) -> None:
    """Runs a coroutine beside; the loop itself would forget it."""
    task = asyncio.get_running_loop().create_task(work)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


def _tokenizer(folder: Path) -> Callable[[], Any]:
    @cache
    def load() -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder)

    return load


def digest(key: str) -> bytes:
    """Of an API key: compared in constant time, whatever its length."""
    return hashlib.sha256(key.encode()).digest()
