# SPDX-License-Identifier: Apache-2.0
"""Samplers: what clients ask of the weights that they saved, or of the base.

Requests that wait when the engine becomes free, and sample from one set of weights, are one call: prefixes that their prompts
share are encoded once, for all samples of all of them. Each has the tokens that it would have alone (Engine.sample with a list
of SamplingParams), so a `seed` gives the same tokens whatever else is asked.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import espalier

from ..native import core
from . import schema
from .base import Adapter, Base, Counter
from .data import MAX_TARGETS, fits_csr
from .errors import Refused
from .futures import Failure, Future, Futures, failure_of
from .requests import JsonTensor, Sample

MAX_WAITING = 8192         # requests to a sampler
TOKENS_AT_ONCE = 1 << 20   # new tokens of one call, before the next requests have their turn

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

    def params(self, stop_ids: list[int]) -> espalier.SamplingParams:
        """Those of the engine. stop_ids: those of the model, for requests without any."""
        given = self.sample.sampling_params
        stop = [given.stop] if isinstance(given.stop, str) else given.stop
        ids = stop_ids if stop is None else [each for each in stop if isinstance(each, int)]
        seed = secrets.randbits(62) if given.seed is None else given.seed & ((1 << 62) - 1)
        return espalier.SamplingParams(samples=self.sample.num_samples, max_new_tokens=self.max_tokens, seed=seed,
                                       temperature=given.temperature, top_k=max(given.top_k, 0), top_p=given.top_p,
                                       stop_ids=ids)  # fmt: skip

    def stop_texts(self) -> list[str]:
        """Stop strings."""
        stop = self.sample.sampling_params.stop
        return [stop] if isinstance(stop, str) else [each for each in stop or [] if isinstance(each, str)]


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
        """The first request that waits, and others of its weights."""
        if not self._waiting:
            return None
        weights = self._waiting[0].weights()
        taken: list[Request] = []
        tokens = 0
        for request in self._waiting:
            if request.weights() is weights and (not taken or tokens < TOKENS_AT_ONCE):
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
        self._samplers.base.use(self._requests[0].weights())
        self._sample()
        self._score_prompts()
        for request in self._requests:
            try:
                request.result = self._response(request)
            except Exception as error:
                request.result = failure_of(error)

    def finish(self) -> None:
        for request in self._requests:
            assert request.result is not None
            if isinstance(request.result, bytes) and request.sample.record_stability_info:
                for sequence_id, sequence in zip(request.sequence_ids, request.sequences):
                    self._samplers._record(sequence_id, sequence.logprobs)
            self._samplers._futures.finish(request.future, request.result)

    def fail(self, failure: Failure) -> None:
        for request in self._requests:
            self._samplers._futures.finish(request.future, failure)

    def _sample(self) -> None:
        requests, samplers = self._requests, self._samplers
        prompts = [request.prompt for request in requests]
        params = [request.params(samplers.base.stop_ids) for request in requests]
        watch = StopTexts(requests, samplers._tokenizer) if any(request.stop_texts() for request in requests) else None
        rows = iter(self._engine.sample(prompts, params, watch=watch))
        for number, (request, each) in enumerate(zip(requests, params)):
            for sample in range(each.samples):
                row = next(rows)
                tokens = np.asarray(row["input_ids"][len(request.prompt) :], np.int32)
                stopped = int(tokens[-1]) in (each.stop_ids or ()) or (watch is not None and (number, sample) in watch.ended)
                logprobs = np.asarray(row["logprobs"][len(request.prompt) :], np.float32)
                request.sequences.append(Sequence(tokens, logprobs, stopped))
        forest = core.build_forest(np.cumsum([0, *map(len, prompts)]), np.concatenate(prompts).astype(np.int32))
        samplers._counter.add(
            prompt_tokens=sum(len(each.prompt) * each.sample.num_samples for each in requests),
            encoded_prompt_tokens=forest.tree_tokens,
            sampled_tokens=sum(len(sequence.tokens) for each in requests for sequence in each.sequences))  # fmt: skip

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
        if sample.topk_prompt_logprobs > 0:
            self._set_topk(message.topk_prompt_logprobs, prompt, sample.topk_prompt_logprobs, 0)
        if sample.topk_sample_logprobs > 0:
            for sequence, each in zip(request.sequences, message.sequences):
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
        k = min(k, self._samplers.base.vocab_size)
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


class StopTexts:
    """Ends completions at the token with which their text has a stop string: `watch` of Engine.sample.

    Args:
        requests: In the order of the prompts.
        tokenizer: Makes that of the model.
    """

    def __init__(self, requests: list[Request], tokenizer: Callable[[], Any]) -> None:
        self.ended: set[tuple[int, int]] = set()
        self._texts = [request.stop_texts() for request in requests]
        self._decode = tokenizer().decode
        self._tokens: dict[tuple[int, int], list[int]] = {}

    def __call__(self, new: NDArray[np.int64]) -> list[bool]:
        ends = []
        for prompt, sample, token in new.tolist():
            texts, key = self._texts[prompt], (prompt, sample)
            tokens = self._tokens.setdefault(key, [])
            tokens.append(token)
            # A character is at most four tokens of a byte each, and the string ends with the new token.
            tail = tokens[-4 * max(map(len, texts), default=0) - 4 :]
            has_text = bool(texts) and any(text in self._decode(tail) for text in texts)
            if has_text:
                self.ended.add(key)
            ends.append(has_text)
        return ends
