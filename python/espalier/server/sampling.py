# SPDX-License-Identifier: Apache-2.0
"""Samplers: what clients ask of the weights that they saved, or of the base.

Requests that wait when the engine becomes free, of one set of weights and with equal settings, are one call: prefixes that
their prompts share are encoded once, for all samples of all of them. Requests with a `seed` are calls of their own, so that
what they sample does not depend on others.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import espalier

from ..errors import InputError
from ..native import core
from . import schema
from .base import Adapter, Base, Counter, refused_as_user
from .data import MAX_TARGETS, fits_csr
from .errors import Refused
from .futures import Failure, Future, Futures
from .requests import JsonTensor, Sample

MAX_WAITING = 8192         # requests to a sampler
TOKENS_AT_ONCE = 1 << 20   # new tokens of one call, before the next requests have their turn
FIRST_TOKENS = 32          # sampled before texts are searched for stop strings; doubles each time

Weights = Callable[[], Adapter | None]  # None: the base's own


@dataclass
class Request:
    """One `asample`."""

    future: Future
    sample: Sample
    prompt: NDArray[np.int32]
    max_tokens: int
    weights: Weights
    sequence_ids: list[str]
    targets: NDArray[np.int64] | None = None  # [len(prompt) - 1, K], -1: none
    sequences: list["Sequence"] = field(default_factory=list)
    prompt_logprobs: NDArray[np.floating[Any]] | None = None  # nan for the first token
    result: bytes | Failure | None = None

    def settings(self) -> tuple[Any, ...]:
        """Of the call that it can be part of."""
        params = self.sample.sampling_params
        stop = tuple(params.stop) if isinstance(params.stop, list) else params.stop
        return (self.weights(), params.temperature, params.top_k, params.top_p, stop, self.max_tokens, self.sample.num_samples,
                None if params.seed is None else self.future.request_id)  # fmt: skip


@dataclass
class Sequence:
    """What was sampled."""

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    is_stopped: bool


def target_table(given: JsonTensor, prompt_tokens: int, vocab_size: int) -> NDArray[np.int64]:
    """The ids to score at each prompt position after the first, [prompt_tokens - 1, K]; -1: none. Raises Refused."""
    shape = given.shape or []
    if len(shape) != 2 or shape[0] != prompt_tokens - 1 or not 1 <= shape[1] <= MAX_TARGETS:
        raise Refused(f"target_prompt_logprobs: expected shape [{prompt_tokens - 1}, K], K from 1 to {MAX_TARGETS}, received "
                      f"{shape}")  # fmt: skip
    table = np.full(shape, -1, np.int64)
    values = np.asarray(given.data, np.int64)
    if given.sparse_crow_indices is not None:
        rows, columns = np.asarray(given.sparse_crow_indices), np.asarray(given.sparse_col_indices or [], np.int64)
        if not fits_csr(rows, columns, len(values), (shape[0], shape[1])):
            raise Refused("target_prompt_logprobs: expected a sparse matrix (CSR), received indices that do not fit its shape")
        table[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    elif len(values) == table.size:
        table = values.reshape(shape)
    else:
        raise Refused(f"target_prompt_logprobs: expected {table.size} ids, received {len(values)}")
    if table.max() >= vocab_size or table.min() < -1 or (table == -1).all():
        raise Refused(f"target_prompt_logprobs: expected ids below {vocab_size}, at least one of them, and -1 elsewhere")
    return table


class Samplers:
    """All samplers of a base.

    Args:
        base: The model.
        futures: Of the server.
        counter: Of the server.
        record: Called as record(sequence_id, logprobs) for sequences that are to be trained on later.
        tokenizer: Makes that of the model, for stop strings.
    """

    def __init__(self, base: Base, futures: Futures, counter: Counter,
                 record: Callable[[str, NDArray[np.floating[Any]]], None], tokenizer: Callable[[], Any]) -> None:  # fmt: skip
        self.base = base
        self._futures = futures
        self._counter = counter
        self._record = record
        self._tokenizer = tokenizer
        self._waiting: list[Request] = []

    def submit(self, request: Request) -> None:
        """Raises Refused where too many wait."""
        if len(self._waiting) >= MAX_WAITING:
            raise Refused(f"expected at most {MAX_WAITING} waiting requests to samplers, received one more", 429)
        self._waiting.append(request)
        self.base.wake()

    def cancel(self, request_id: str) -> None:
        """Drops a request that has not begun."""
        for request in self._waiting:
            if request.future.request_id == request_id:
                self._waiting.remove(request)
                self._futures.finish(request.future, Failure("cancelled by the client", "user"))
                return

    def next_job(self) -> "_Job | None":
        """The first request that waits, and others that can be part of its call."""
        if not self._waiting:
            return None
        settings = self._waiting[0].settings()
        taken: list[Request] = []
        tokens = 0
        for request in self._waiting:
            if request.settings() == settings and (not taken or tokens < TOKENS_AT_ONCE):
                taken.append(request)
                tokens += request.max_tokens * request.sample.num_samples
        numbers = {id(request) for request in taken}
        self._waiting = [request for request in self._waiting if id(request) not in numbers]
        return _Job(self, taken)


class _Job:
    """Requests that are one call."""

    def __init__(self, samplers: Samplers, requests: list[Request]) -> None:
        self._samplers = samplers
        self._requests = requests
        self._engine = samplers.base.engine

    def run(self) -> None:
        try:
            self._samplers.base.use(self._requests[0].weights())
            self._sample()
            self._score_prompts()
        except Exception as error:
            message = str(error) if isinstance(error, InputError | Refused) else f"{type(error).__name__}: {error}"
            for request in self._requests:
                request.result = Failure(message, "user" if refused_as_user(error) else "server")
            return
        for request in self._requests:
            try:
                request.result = self._response(request)
            except Exception as error:
                request.result = Failure(str(error), "user" if refused_as_user(error) else "server")

    def finish(self) -> None:
        for request in self._requests:
            assert request.result is not None
            if isinstance(request.result, bytes) and request.sample.record_stability_info:
                for sequence_id, sequence in zip(request.sequence_ids, request.sequences):
                    self._samplers._record(sequence_id, sequence.logprobs)
            self._samplers._futures.finish(request.future, request.result)

    def _sample(self) -> None:
        first = self._requests[0]
        params = first.sample.sampling_params
        stop = [params.stop] if isinstance(params.stop, str) else params.stop
        texts = [each for each in stop or [] if isinstance(each, str)]
        stop_ids = self._samplers.base.stop_ids if stop is None else [each for each in stop if isinstance(each, int)]
        sampler = _Call(self._engine, first, stop_ids)
        prompts = [request.prompt for request in self._requests]
        if texts:
            sequences = sampler.until_texts(prompts, texts, self._samplers._tokenizer())
        else:
            sequences = sampler.sequences(prompts)
        for number, request in enumerate(self._requests):
            samples = request.sample.num_samples
            request.sequences = sequences[number * samples : (number + 1) * samples]
        forest = core.build_forest(np.cumsum([0, *map(len, prompts)]), np.concatenate(prompts).astype(np.int32))
        new = sum(len(each.tokens) for each in sequences)
        self._samplers._counter.add(
            prompt_tokens=sum(len(each.prompt) * each.sample.num_samples for each in self._requests),
            encoded_prompt_tokens=forest.tree_tokens, sampled_tokens=new)  # fmt: skip

    def _score_prompts(self) -> None:
        """In one call, in which prefixes that prompts share are encoded once."""
        asking = [request for request in self._requests if request.sample.prompt_logprobs]
        longer = [request.prompt for request in asking if len(request.prompt) > 1]
        scored = iter(self._engine.logprobs(longer) if longer else [])
        for request in asking:
            request.prompt_logprobs = np.full(len(request.prompt), np.nan, "<f4")
            if len(request.prompt) > 1:
                request.prompt_logprobs[1:] = next(scored)[1:]

    def _response(self, request: Request) -> bytes:
        message = schema.SampleResponse(prompt_cache_hit_tokens=0)
        for sequence in request.sequences:
            message.sequences.add(stop_reason=schema.STOP if sequence.is_stopped else schema.LENGTH,
                                  tokens=sequence.tokens.astype("<i4").tobytes(),
                                  logprobs=sequence.logprobs.astype("<f4").tobytes())  # fmt: skip
        sample, prompt = request.sample, request.prompt
        if (values := request.prompt_logprobs) is not None:
            if sample.prompt_logprobs_last_n is not None:
                values[: max(0, len(prompt) - sample.prompt_logprobs_last_n)] = np.nan
            message.prompt_logprobs = values.tobytes()
        if request.targets is not None:
            _set_tensor(message.target_prompt_logprobs, self._target_logprobs(prompt, request.targets))
        if sample.prompt_alt_tokens_k > 0:
            tokens, logprobs = self._alternatives(request)
            _set_tensor(message.prompt_alt_tokens.tokens, tokens)
            _set_tensor(message.prompt_alt_tokens.logprobs, logprobs)
        return bytes(message.SerializeToString())

    def _target_logprobs(self, prompt: NDArray[np.int32], targets: NDArray[np.int64]) -> NDArray[np.float32]:
        """Of ids [N - 1, K] at positions 1 to N - 1; nan where the id is -1."""
        width = targets.shape[1]
        named = np.where(targets < 0, prompt[1:, None], targets)
        columns = [np.append(prompt[:1], column) for column in named.T]
        rows = espalier.trajectories({"offsets": np.arange(width + 1) * len(prompt), "input_ids": np.tile(prompt, width),
                                      "target_ids": np.concatenate(columns).astype(np.int32)})  # fmt: skip
        values = np.stack([row[1:] for row in self._engine.logprobs(rows)], axis=1)
        return np.where(targets < 0, np.nan, values).astype(np.float32)

    def _alternatives(self, request: Request) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """K tokens drawn after each prefix of the prompt: prefixes are prompts of one call, which encodes them once."""
        k, prompt = request.sample.prompt_alt_tokens_k, request.prompt
        prefixes = [prompt[:size] for size in range(1, len(prompt))]
        if not prefixes:
            return np.empty((0, k), np.int64), np.empty((0, k), np.float32)
        drawn = self._engine.sample(prefixes, samples=k, max_new_tokens=1, stop_ids=[], seed=_seed(request),
                                    temperature=request.sample.sampling_params.temperature)  # fmt: skip
        tokens = np.array([row["input_ids"][-1] for row in drawn], np.int64)
        logprobs = np.array([row["logprobs"][-1] for row in drawn], np.float32)
        return tokens.reshape(-1, k), logprobs.reshape(-1, k)


def _seed(request: Request) -> int:
    seed = request.sample.sampling_params.seed
    return secrets.randbits(62) if seed is None else seed & ((1 << 62) - 1)


def _set_tensor(message: Any, values: NDArray[Any]) -> None:
    is_whole = values.dtype.kind == "i"
    message.dense = values.astype("<i8" if is_whole else "<f4").tobytes()
    message.dtype = schema.INT64 if is_whole else schema.FLOAT32
    message.shape.extend(values.shape)


class _Call:
    """Calls of Engine.sample with the settings of a request."""

    def __init__(self, engine: Any, request: Request, stop_ids: list[int]) -> None:
        params = request.sample.sampling_params
        self._engine = engine
        self._samples = request.sample.num_samples
        self._max_tokens = request.max_tokens
        self._stop_ids = stop_ids
        self._seed = _seed(request)
        self._options = {"temperature": params.temperature, "top_k": max(params.top_k, 0), "top_p": params.top_p}

    def sequences(self, prompts: list[NDArray[np.int32]]) -> list[Sequence]:
        """Completions, by prompt and then by sample."""
        return self._sampled(prompts, self._samples, self._max_tokens)

    def _sampled(self, prompts: list[NDArray[np.int32]], samples: int, max_tokens: int) -> list[Sequence]:
        rows = self._engine.sample(prompts, samples=samples, max_new_tokens=max_tokens, stop_ids=self._stop_ids, seed=self._seed,
                                   **self._options)  # fmt: skip
        self._seed += 1
        found = []
        for number, row in enumerate(rows):
            begin = len(prompts[number // samples])
            tokens = np.asarray(row["input_ids"][begin:], np.int32)
            stopped = len(tokens) > 0 and int(tokens[-1]) in self._stop_ids
            found.append(Sequence(tokens, np.asarray(row["logprobs"][begin:], np.float32), stopped))
        return found

    def until_texts(self, prompts: list[NDArray[np.int32]], texts: list[str], tokenizer: Any) -> list[Sequence]:
        """The same, each until its text has one of `texts`, which its last token completes."""
        starts = [prompt for prompt in prompts for _ in range(self._samples)]
        done = [Sequence(np.empty(0, np.int32), np.empty(0, np.float32), False) for _ in starts]
        going = list(range(len(starts)))
        size = 0
        while going and size < self._max_tokens:
            step = min(max(FIRST_TOKENS, size), self._max_tokens - size)
            if size == 0:  # samples of a prompt have random numbers of their own
                more = self._sampled(prompts, self._samples, step)
            else:
                more = self._sampled([np.concatenate([starts[k], done[k].tokens]) for k in going], 1, step)
            size += step
            for k, part in zip(going, more):
                before = done[k]
                done[k] = _cut(Sequence(np.concatenate([before.tokens, part.tokens]),
                                        np.concatenate([before.logprobs, part.logprobs]), part.is_stopped),
                               len(before.tokens), texts, tokenizer)  # fmt: skip
            going = [k for k in going if not done[k].is_stopped and len(done[k].tokens) == size]
        return done


def _cut(sequence: Sequence, begin: int, texts: list[str], tokenizer: Any) -> Sequence:
    """Without the tokens after the first one with which the text has a stop string. begin: tokens known to have none."""
    if not any(text in tokenizer.decode(sequence.tokens.tolist()) for text in texts):
        return sequence
    low, high = begin + 1, len(sequence.tokens)
    while low < high:  # texts grow with their tokens, so whether one has a stop string changes once
        middle = (low + high) // 2
        if any(text in tokenizer.decode(sequence.tokens[:middle].tolist()) for text in texts):
            high = middle
        else:
            low = middle + 1
    return Sequence(sequence.tokens[:low], sequence.logprobs[:low], True)
