# SPDX-License-Identifier: Apache-2.0
"""Samplers: what clients ask of the weights that they saved, or of the base.

All requests are sampled side by side; they join and leave between tokens (espalier.Sampling). Those of different adapters share
the products with the weights of the base. Prefixes that prompts of one adapter share are encoded once, for all samples of all of
them, and kept for later ones. Each has the tokens that it would have alone, so a `seed` gives the same tokens whatever else is
asked.
"""

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import espalier

from . import schema
from .base import Counter
from .data import MAX_TARGETS, fits_csr
from .errors import Refused
from .futures import Failure, Future, Futures, failure_of
from .requests import JsonTensor, Sample
from .worker import Weights, Worker

MAX_WAITING = 8192    # requests of a worker whose samples are not done
SLICE_SECONDS = 0.05  # of sampling, before models in training have their turn

CurrentWeights = Callable[[], Weights | None]  # None: those of the model


@dataclass
class Request:
    """One `asample`."""

    future: Future
    sample: Sample
    prompt: NDArray[np.int32]
    max_tokens: int
    weights: CurrentWeights
    sequence_ids: list[str]
    targets: NDArray[np.int64] | None = None  # [len(prompt) - 1, K], -1: none
    end_ids: list[int] = field(default_factory=list)  # end a sample, too, whatever else does
    listener: Callable[[int, int], None] | None = None  # is called with sample and token, on the worker's thread
    adapter: espalier.Adapter | None = None  # once it joins; stays, though it be dropped or lie on disk meanwhile
    sequences: dict[int, espalier.Completion] = field(default_factory=dict)  # by number
    kept_tokens: int = 0  # of the prompt: were not encoded for it
    prompt_logprobs: NDArray[np.float64] | None = None  # once a sequence is done
    result: bytes | Failure | None = None

    def params(self, stop_ids: list[int]) -> espalier.SamplingParams:
        """Those of the engine. stop_ids: those of the model, for requests without any."""
        given = self.sample.sampling_params
        stop = [given.stop] if isinstance(given.stop, str) else given.stop
        ids = stop_ids if stop is None else [each for each in stop if isinstance(each, int)]
        ids = ids + [each for each in self.end_ids if each not in ids]
        seed = secrets.randbits(62) if given.seed is None else given.seed & ((1 << 62) - 1)
        return espalier.SamplingParams(samples=self.sample.num_samples, max_new_tokens=self.max_tokens, seed=seed,
                                       temperature=given.temperature, top_k=max(given.top_k, 0), top_p=given.top_p,
                                       stop_ids=ids, prompt_logprobs=bool(self.sample.prompt_logprobs))  # fmt: skip

    def stop_texts(self) -> list[str]:
        """Stop strings."""
        stop = self.sample.sampling_params.stop
        return [stop] if isinstance(stop, str) else [each for each in stop or [] if isinstance(each, str)]


def check_prompt(ids: list[int], worker: Worker) -> None:
    """Raises Refused where there is no room behind these tokens, or there are none."""
    if not 1 <= len(ids) < worker.max_context:
        raise Refused(f"prompt: expected 1 to {worker.max_context - 1} tokens, received {len(ids)}")
    if min(ids) < 0 or max(ids) >= worker.vocab_size:
        raise Refused(f"prompt: expected token ids from 0 and below {worker.vocab_size}, received {min(ids)} to {max(ids)}")


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
    """All samplers of a worker, whose engine samples. record(sequence_id, logprobs) is called for sequences that are to be
    trained on later; tokenizer makes that of the model, for stop strings."""

    def __init__(self, worker: Worker, futures: Futures, counter: Counter,
                 record: Callable[[str, NDArray[np.floating[Any]]], None], tokenizer: Callable[[], Any]) -> None:  # fmt: skip
        self.worker = worker
        self._futures = futures
        self._counter = counter
        self._record = record
        self._tokenizer = tokenizer
        self._waiting: list[Request] = []
        self._held: list[Request] = []   # until what is sampled from other weights is done
        self._open: _Open | None = None  # while something is sampled
        self._cached = 0  # bytes of prefixes

    def submit(self, request: Request) -> None:
        """Raises Refused where too many wait."""
        if len(self._waiting) + len(self._going_on()) >= MAX_WAITING:
            raise Refused(f"expected at most {MAX_WAITING} waiting requests to samplers, received one more", 429)
        self._waiting.append(request)
        self.worker.wake()

    def cancel(self, request_id: str) -> None:
        """Drops a request; one that is sampled ends with its next token."""
        for request in [*self._waiting, *self._held, *self._going_on()]:
            if request.future.request_id == request_id:
                self._futures.finish(request.future, Failure("cancelled by the client", "user"))
        self._waiting = [request for request in self._waiting if request.future.payload is None]

    def next_job(self) -> "_Job | None":
        """Requests that have come join, and all go on."""
        taken: list[Request] = []
        if not self.worker.is_stopped:
            taken, self._waiting = self._waiting, taken
        return _Job(self, taken) if taken or self._open else None

    def _going_on(self) -> "list[Request]":
        joined = self._open
        return [] if joined is None else list(joined.requests.values())

    @property
    def has_begun(self) -> bool:
        """Whether requests are sampled."""
        return self._open is not None

    def _count(self, new: dict[str, int]) -> None:
        cached = new["prefix_cache_bytes"]  # in all, by the engine that there is now
        self._counter.add(**{**new, "prefix_cache_bytes": cached - self._cached})
        self._cached = cached


class _Job:
    """A slice of sampling: until a request is done or comes, or other jobs may have their turn."""

    def __init__(self, samplers: Samplers, requests: list[Request]) -> None:
        self._samplers = samplers
        self._requests = requests
        self._done: list[Request] = []

    def run(self) -> None:
        self._join()
        self._go_on()

    def _join(self) -> None:
        samplers = self._samplers
        by_weights: dict[Weights | None, list[Request]] = {}
        for number, request in enumerate(self._requests):
            weights = request.weights()
            if samplers.worker.holds_one:
                held = samplers._open.weights if samplers._open else next(iter(by_weights), weights)
                if weights is not held:
                    samplers._held = self._requests[number:]  # in their order, so that none waits for later ones
                    break
            try:
                if request.stop_texts():
                    samplers._tokenizer()
                by_weights.setdefault(weights, []).append(request)
            except Exception as error:  # there is no tokenizer
                self._done += _failed([request], failure_of(error))
        for weights, requests in by_weights.items():
            try:
                samplers.worker.use(weights)
                if samplers._open is None:
                    samplers._open = _Open(samplers, weights)
                samplers._open.add(requests)
            except Exception as error:
                self._done += _failed(requests, failure_of(error))

    def _go_on(self) -> None:
        samplers = self._samplers
        until = time.monotonic() + SLICE_SECONDS
        while samplers._open is not None:
            self._done += samplers._open.step()
            samplers._count(samplers._open.new_counts())
            if not samplers._open.requests:
                samplers._open = None
            if self._done or samplers._waiting or time.monotonic() >= until:
                break

    def finish(self) -> None:
        held, self._samplers._held = self._samplers._held, []
        self._samplers._waiting[:0] = [request for request in held if request.future.payload is None]
        for request in self._done:
            assert request.result is not None
            if isinstance(request.result, bytes) and request.sample.record_stability_info:
                for number, sequence_id in enumerate(request.sequence_ids):
                    self._samplers._record(sequence_id, request.sequences[number].logprobs)
            self._samplers._futures.finish(request.future, request.result)

    def fail(self, failure: Failure) -> None:
        self._samplers._held = []
        for request in [*self._requests, *self._done]:
            self._samplers._futures.finish(request.future, failure)


class _Open:
    """Requests that are sampled side by side. `weights` are those of the first ones."""

    def __init__(self, samplers: Samplers, weights: Weights | None) -> None:
        self.weights = weights
        self.requests: dict[int, Request] = {}  # by number of the prompt
        self._samplers = samplers
        self._engine = samplers.worker.engine
        self._counted = self._engine.sampling_counts
        self._sampling = self._engine.sampling()
        self._texts = StopTexts(samplers._tokenizer)

    def new_counts(self) -> dict[str, int]:
        """What the engine has counted since the last time, and the bytes of its prefixes."""
        before, now = self._counted, self._engine.sampling_counts
        self._counted = now
        return {name: count if name == "prefix_cache_bytes" else count - before[name] for name, count in now.items()}

    def add(self, requests: list[Request]) -> None:
        """They join, with the weights in use."""
        params = [request.params(self._samplers.worker.stop_ids) for request in requests]
        for number, request in zip(self._sampling.add([request.prompt for request in requests], params), requests, strict=True):
            self.requests[number] = request
            request.adapter = self._engine.adapter
            if texts := request.stop_texts():
                self._texts.add(number, texts)

    def step(self) -> list[Request]:
        """Samples a token of each. Returns requests that are done, with results."""
        try:
            completions = self._sampling.step(self._watch)
        except Exception as error:
            failed = _failed(self.requests.values(), failure_of(error))
            self.requests = {}
            return failed
        done = []
        for each in completions:
            request = self.requests[each.prompt]
            request.sequences[each.sample] = each
            request.kept_tokens, request.prompt_logprobs = each.kept_tokens, each.prompt_logprobs
            if len(request.sequences) == request.sample.num_samples:
                done.append(self.requests.pop(each.prompt))
                self._texts.forget(each.prompt)
                try:
                    request.result = self._response(request)
                except Exception as error:
                    request.result = failure_of(error)
        return done

    def _watch(self, new: NDArray[np.int64]) -> list[bool]:
        """Ends what has its stop string, and what nobody waits for."""
        ended = self._texts(new)
        for prompt, sample, token in new.tolist():
            if (listener := self.requests[prompt].listener) is not None:
                listener(sample, token)
        return [end or self.requests[prompt].future.payload is not None for end, prompt in zip(ended, new[:, 0].tolist())]

    def _response(self, request: Request) -> bytes:
        self._engine.use(request.adapter)
        message = schema.SampleResponse(prompt_cache_hit_tokens=request.kept_tokens)
        sequences = [request.sequences[number] for number in range(request.sample.num_samples)]
        for sequence in sequences:
            message.sequences.add(stop_reason=schema.STOP if sequence.is_stopped else schema.LENGTH,
                                  tokens=sequence.tokens.astype("<i4").tobytes(),
                                  logprobs=sequence.logprobs.astype("<f4").tobytes())  # fmt: skip
        sample, prompt = request.sample, request.prompt
        if sample.prompt_logprobs:
            assert request.prompt_logprobs is not None
            values = request.prompt_logprobs.astype("<f4")
            values[: 1 if sample.prompt_logprobs_last_n is None else max(1, len(prompt) - sample.prompt_logprobs_last_n)] = np.nan
            message.prompt_logprobs = values.tobytes()
        if sample.topk_prompt_logprobs > 0:
            self._set_topk(message.topk_prompt_logprobs, prompt, sample.topk_prompt_logprobs, 0)
        if sample.topk_sample_logprobs > 0:
            for sequence, each in zip(sequences, message.sequences):
                whole = np.concatenate([prompt, sequence.tokens])
                self._set_topk(each.topk_sampled_logprobs, whole, sample.topk_sample_logprobs, len(prompt))
        if request.targets is not None:
            _set_tensor(message.target_prompt_logprobs, self._target_logprobs(prompt, request.targets))
        if sample.prompt_alt_tokens_k > 0:
            tokens, logprobs = self._alternatives(request)
            _set_tensor(message.prompt_alt_tokens.tokens, tokens)
            _set_tensor(message.prompt_alt_tokens.logprobs, logprobs)
        return bytes(message.SerializeToString())

    def _set_topk(self, message: Any, tokens: NDArray[np.int32], k: int, begin: int) -> None:
        """Of the positions from `begin` on. The first of a prompt, which nothing predicts, has -1 and nan."""
        k = min(k, self._samplers.worker.vocab_size)
        found = self._engine.topk_logprobs([tokens], k)[0]
        ids, values = found.ids.astype("<i4"), found.values.astype("<f4")
        values[0] = np.nan
        message.token_ids, message.logprobs = ids[begin:].tobytes(), values[begin:].tobytes()
        message.k, message.length = k, len(tokens) - begin

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
        drawn = self._engine.sample(prefixes, samples=k, max_new_tokens=1, stop_ids=[], seed=request.params([]).seed,
                                    temperature=request.sample.sampling_params.temperature)  # fmt: skip
        tokens = np.array([row["input_ids"][-1] for row in drawn], np.int64)
        logprobs = np.array([row["logprobs"][-1] for row in drawn], np.float32)
        return tokens.reshape(-1, k), logprobs.reshape(-1, k)


def _set_tensor(message: Any, values: NDArray[Any]) -> None:
    is_whole = values.dtype.kind == "i"
    message.dense = values.astype("<i8" if is_whole else "<f4").tobytes()
    message.dtype = schema.INT64 if is_whole else schema.FLOAT32
    message.shape.extend(values.shape)


def _failed(requests: Iterable[Request], failure: Failure) -> list[Request]:
    failed = list(requests)
    for request in failed:
        request.result = failure
    return failed


class StopTexts:
    """Finds the tokens with which the texts of completions have stop strings: a `watch` of Engine.sample."""

    def __init__(self, tokenizer: Callable[[], Any]) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, list[str]] = {}  # by prompt
        self._tokens: dict[int, dict[int, list[int]]] = {}  # by prompt and sample

    def add(self, prompt: int, texts: list[str]) -> None:
        """Stop strings of a prompt."""
        self._texts[prompt], self._tokens[prompt] = texts, {}

    def forget(self, prompt: int) -> None:
        self._texts.pop(prompt, None)
        self._tokens.pop(prompt, None)

    def __call__(self, new: NDArray[np.int64]) -> list[bool]:
        return [prompt in self._texts and self._has_text(prompt, sample, token) for prompt, sample, token in new.tolist()]

    def _has_text(self, prompt: int, sample: int, token: int) -> bool:
        tokens = self._tokens[prompt].setdefault(sample, [])
        tokens.append(token)
        texts = self._texts[prompt]
        # A character is at most four tokens of a byte each, and the string ends with the new token.
        tail = self._tokenizer().decode(tokens[-4 * max(map(len, texts)) - 4 :])
        return any(text in tail for text in texts)
