# SPDX-License-Identifier: Apache-2.0
"""Samplers: what clients ask of the weights that they saved, or of the base.

All requests are sampled side by side; they join and leave between tokens (espalier.Sampling). Those of different adapters share
the products with the weights of the base. Prefixes that prompts of one adapter share are encoded once, for all samples of all of
them, and kept for later ones. Each has the tokens that it would have alone, so a `seed` gives the same tokens whatever else is
asked.

Clients have equal shares of the places and the time, whatever each asks for. A request that cannot be sampled fails alone.
"""

import collections
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import espalier

from . import schema, scoring
from .base import Counter
from .errors import Refused
from .futures import Failure, Future, Futures, failure_of
from .requests import Sample
from .stop_texts import StopTexts
from .worker import Weights, Worker

MAX_WAITING = 8192    # requests of a worker whose samples are not done
SLICE_SECONDS = 0.05  # of sampling, before models in training have their turn

CurrentWeights = Callable[[], Weights | None]  # None: those of the model


@dataclass
class Request:
    """One `asample`, or one like it of another API. `client`: a number of the one for whom it is sampled."""

    future: Future
    sample: Sample
    prompt: NDArray[np.int32]
    max_tokens: int
    weights: CurrentWeights
    client: int = 0
    targets: NDArray[np.int64] | None = None  # [len(prompt) - 1, K], -1: none
    end_ids: list[int] = field(default_factory=list)  # end a sample, too, whatever else does
    listener: Callable[[int, int], None] | None = None  # is called with sample and token, on the worker's thread
    adapter: espalier.Adapter | None = None  # once it joins; stays, though it be dropped or lie on disk meanwhile
    sequences: dict[int, espalier.Completion] = field(default_factory=dict)  # by number
    draws: scoring.Draws | None = None
    kept_tokens: int = 0  # of the prompt: were not encoded for it
    prompt_logprobs: NDArray[np.float64] | None = None  # once a sequence is done
    result: bytes | Failure | None = None
    is_alone: bool = False  # a step with it has failed: it is sampled by itself
    _sampled: collections.Counter[int] = field(default_factory=collections.Counter)  # tokens since it began, by number
    _heard: collections.Counter[int] = field(default_factory=collections.Counter)  # tokens that the listener has

    def __post_init__(self) -> None:
        given = self.sample.sampling_params.seed
        self.seed = secrets.randbits(62) if given is None else given & ((1 << 62) - 1)

    def params(self, stop_ids: list[int]) -> espalier.SamplingParams:
        """Those of the engine. stop_ids: those of the model, for requests without any."""
        given = self.sample.sampling_params
        stop = [given.stop] if isinstance(given.stop, str) else given.stop
        ids = stop_ids if stop is None else [each for each in stop if isinstance(each, int)]
        ids = ids + [each for each in self.end_ids if each not in ids]
        return espalier.SamplingParams(samples=self.sample.num_samples, max_new_tokens=self.max_tokens, seed=self.seed,
                                       temperature=given.temperature, top_k=max(given.top_k, 0), top_p=given.top_p,
                                       stop_ids=ids, prompt_logprobs=bool(self.sample.prompt_logprobs))  # fmt: skip

    def restart(self) -> None:
        """Forgets what was sampled; what comes in its place has the same random numbers."""
        self.sequences.clear()
        self.draws = None
        self._sampled.clear()

    def hear(self, sample: int, token: int) -> None:
        """Hands a new token to the listener, unless it was there before `restart`."""
        if self.listener is None:
            return
        self._sampled[sample] += 1
        if self._sampled[sample] > self._heard[sample]:
            self._heard[sample] += 1
            self.listener(sample, token)


def stop_texts(sample: Sample) -> list[str]:
    """Stop strings of a request."""
    stop = sample.sampling_params.stop
    return [stop] if isinstance(stop, str) else [each for each in stop or [] if isinstance(each, str)]


class Samplers:
    """All samplers of a worker, whose engine samples. record(request_id, logprobs of its sequences) is called for sequences that
    are to be trained on later; tokenizer has that of the model, for stop strings."""

    def __init__(self, worker: Worker, futures: Futures, counter: Counter,
                 record: Callable[[str, list[NDArray[np.floating[Any]]]], None],
                 tokenizer: Callable[[], Any]) -> None:  # fmt: skip
        self.worker = worker
        self._futures = futures
        self._counter = counter
        self._record = record
        self.tokenizer = tokenizer
        self._waiting: list[Request] = []
        self._held: list[Request] = []   # until what is sampled from other weights is done
        self._open: _Open | None = None  # while something is sampled
        self._cached = 0  # bytes of prefixes
        self._has_cancelled = False  # requests that have joined

    def check_room(self, client: int) -> None:
        """Raises Refused where too many requests wait, unless this client has less than its share of them."""
        if len(self._waiting) + len(self._held) + (len(self._open.requests) if self._open else 0) >= MAX_WAITING:
            clients = collections.Counter(each.client for each in [*self._waiting, *self._held, *self._going_on()])
            if clients[client] >= MAX_WAITING // (len(clients) + 1):
                raise Refused(f"expected at most {MAX_WAITING} waiting requests to samplers, received one more", 429)

    def submit(self, request: Request) -> None:
        """Raises Refused as `check_room`."""
        self.check_room(request.client)
        self._waiting.append(request)
        self.worker.wake()

    def cancel(self, request_id: str) -> None:
        """Drops a request; one that is sampled ends with its next token."""
        for request in [*self._waiting, *self._held, *self._going_on()]:
            if request.future.request_id == request_id:
                self._futures.finish(request.future, Failure("cancelled by the client", "user"))
        self._waiting = [request for request in self._waiting if request.future.payload is None]
        self._has_cancelled = True

    def next_job(self) -> "_Job | None":
        """Requests that have come join, and all go on."""
        taken: list[Request] = []
        if not self.worker.is_stopped:
            taken, self._waiting = self._waiting, taken
        return _Job(self, taken) if taken or self._open else None

    def _going_on(self) -> "list[Request]":
        joined = self._open
        return [] if joined is None else list(joined.going_on())

    @property
    def has_begun(self) -> bool:
        """Whether requests are sampled."""
        return self._open is not None

    @property
    def clients(self) -> int:
        """How many have requests."""
        return max(1, len({request.client for request in [*self._waiting, *self._going_on()]}))

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
        samplers = self._samplers
        if samplers._has_cancelled and samplers._open is not None:
            samplers._has_cancelled = False
            samplers._open.remove_cancelled()
            if samplers._open.is_idle:
                samplers._open = None
        self._join()
        self._go_on()

    def _join(self) -> None:
        samplers = self._samplers
        for number, request in enumerate(self._requests):
            if samplers._open is not None and (request.is_alone or samplers._open.is_alone):
                samplers._held.append(request)
                continue
            weights = request.weights()
            if samplers.worker.holds_one and samplers._open is not None and weights is not samplers._open.weights:
                samplers._held += self._requests[number:]  # in their order, so that none waits for later ones
                break
            try:
                samplers.worker.use(weights)
                if samplers._open is None:
                    samplers._open = _Open(samplers, weights)
                samplers._open.add(request)
            except Exception as error:
                self._done += _failed([request], failure_of(error))
            if samplers._open is not None and samplers._open.is_idle:
                samplers._open = None

    def _go_on(self) -> None:
        samplers = self._samplers
        until = time.monotonic() + SLICE_SECONDS
        while samplers._open is not None:
            try:
                self._done += samplers._open.step()
                samplers._count(samplers._open.new_counts())
            except Exception as error:
                self._done += self._restart(error)
                break
            if samplers._open.is_idle:
                samplers._open = None
            if self._done or samplers._waiting or samplers._has_cancelled or time.monotonic() >= until:
                break

    def _restart(self, error: Exception) -> list[Request]:
        """After an error of the engine that names no request: each is tried again by itself. Returns those that were already."""
        samplers = self._samplers
        assert samplers._open is not None
        requests, samplers._open = list(samplers._open.going_on()), None
        alone = [request for request in requests if request.is_alone or len(requests) == 1]
        for request in requests:
            request.restart()
            request.is_alone = True
        samplers._held[:0] = [request for request in requests if request not in alone]
        return _failed(alone, samplers.worker.failure_of(error))

    def finish(self) -> None:
        held, self._samplers._held = self._samplers._held, []
        self._samplers._waiting[:0] = [request for request in held if request.future.payload is None]
        for request in self._done:
            assert request.result is not None
            if isinstance(request.result, bytes) and request.sample.record_stability_info:
                self._samplers._record(request.future.request_id, [
                    request.sequences[number].logprobs for number in range(request.sample.num_samples)])  # fmt: skip
            self._samplers._futures.finish(request.future, request.result)

    def fail(self, failure: Failure) -> None:
        self._samplers._held = []
        for request in [*self._requests, *self._done]:
            self._samplers._futures.finish(request.future, failure)


class _Open:
    """Requests that are sampled side by side. `weights` are those of the first ones."""

    def __init__(self, samplers: Samplers, weights: Weights | None) -> None:
        self.weights = weights
        self.is_alone = False
        self.requests: dict[int, Request] = {}  # by number of the prompt
        self._drawing: dict[int, Request] = {}  # likewise, of prefixes
        self._scoring: collections.OrderedDict[int, list[tuple[Request, Iterator[None]]]] = collections.OrderedDict()  # by client
        self._sampled_seconds = self._scored_seconds = 0.0  # while clients wait for each other
        self._samplers = samplers
        self._engine = samplers.worker.engine
        self._counted = self._engine.sampling_counts
        self._sampling = self._engine.sampling()
        self._texts = StopTexts(samplers.tokenizer)

    def going_on(self) -> Iterator[Request]:
        """Requests that are not done."""
        yield from list(self.requests.values())
        yield from list({id(request): request for request in self._drawing.values()}.values())
        for scored in list(self._scoring.values()):
            yield from [request for request, _ in scored]

    @property
    def is_idle(self) -> bool:
        return not (self.requests or self._drawing or self._scoring)

    def new_counts(self) -> dict[str, int]:
        """What the engine has counted since the last time, and the bytes of its prefixes."""
        before, now = self._counted, self._engine.sampling_counts
        self._counted = now
        return {name: count if name == "prefix_cache_bytes" else count - before[name] for name, count in now.items()}

    def add(self, request: Request) -> None:
        """It joins, with the weights in use."""
        request.adapter = self._engine.adapter
        [number] = self._sampling.add([request.prompt], [request.params(self._samplers.worker.stop_ids)], client=request.client)
        self.requests[number] = request
        self.is_alone |= request.is_alone
        if texts := stop_texts(request.sample):
            self._texts.add(number, texts)

    def remove_cancelled(self) -> None:
        """Ends requests for which nobody waits; those that are scored end with their next slice."""
        for number, request in [*self.requests.items(), *self._drawing.items()]:
            if request.future.payload is not None:
                self._sampling.remove(number, client=request.client)
                self.requests.pop(number, None)
                self._drawing.pop(number, None)
                self._texts.forget(number)

    def step(self) -> list[Request]:
        """Samples a token of each, and makes a part of what else they want. Returns requests that are done, with results."""
        done = []
        begun = time.monotonic()
        if self.requests or self._drawing:
            for each in self._sampling.step(self._watch):
                done += self._take(each)
            self._sampled_seconds += time.monotonic() - begun
        if self._scores_now():
            begun = time.monotonic()
            done += self._score()
            self._scored_seconds += time.monotonic() - begun
        if not self._scoring:
            self._sampled_seconds = self._scored_seconds = 0.0
        return done

    def _watch(self, new: NDArray[np.int64]) -> list[bool]:
        """Hands new tokens to listeners, and ends what has its stop string."""
        for prompt, sample, token in new.tolist():
            if (request := self.requests.get(prompt)) is not None:
                request.hear(sample, token)
        return self._texts(new)

    def _take(self, each: espalier.Completion) -> list[Request]:
        """Of a completion. Returns its request if that is done."""
        if (request := self._drawing.get(each.prompt)) is not None:
            return self._take_draw(request, each)
        if (request := self.requests.get(each.prompt)) is None:  # it has failed
            return []
        if each.error is not None:
            self._forget(each.prompt)
            return _failed([request], self._samplers.worker.failure_of(each.error))
        request.sequences[each.sample] = each
        request.kept_tokens, request.prompt_logprobs = each.kept_tokens, each.prompt_logprobs
        if len(request.sequences) < request.sample.num_samples:
            return []
        self._forget(each.prompt)
        if request.sample.prompt_alt_tokens_k > 0 and len(request.prompt) > 1:
            request.draws = scoring.Draws(request.sample, request.prompt, request.seed)
            self._draw(request, request.draws)
            return []
        return self._begin_scoring(request)

    def _forget(self, number: int) -> None:
        del self.requests[number]
        self._texts.forget(number)

    def _draw(self, request: Request, draws: scoring.Draws) -> None:
        """Alternatives at the next places of a prompt."""
        self._engine.use(request.adapter)
        for place, prefix, params in draws.more():
            [number] = self._sampling.add([prefix], [params], client=request.client)
            draws.begin(number, place)
            self._drawing[number] = request

    def _take_draw(self, request: Request, each: espalier.Completion) -> list[Request]:
        draws = request.draws
        assert draws is not None
        failure = None if each.error is None else self._samplers.worker.failure_of(each.error)
        if failure is not None:
            for number in draws.numbers:
                del self._drawing[number]
                self._sampling.remove(number, client=request.client)
            return _failed([request], failure)
        if draws.add(each):
            del self._drawing[each.prompt]
            self._draw(request, draws)
        return self._begin_scoring(request) if draws.is_done else []

    def _begin_scoring(self, request: Request) -> list[Request]:
        """Returns the request if it is done."""
        message, scores = self._response(request)
        if not scores:
            request.result = bytes(message.SerializeToString())
            return [request]
        self._scoring.setdefault(request.client, []).append((request, self._parts(request, message, scores)))
        return []

    def _parts(self, request: Request, message: Any, scores: list[scoring.Score]) -> Iterator[None]:
        yield from scoring.slices(self._engine, scores, self._samplers.worker.vocab_size)
        request.result = bytes(message.SerializeToString())

    def _scores_now(self) -> bool:
        """Clients that are sampled get as much time as those for whom something is scored."""
        if not self._scoring:
            return False
        sampled = {request.client for request in [*self.requests.values(), *self._drawing.values()]} - self._scoring.keys()
        if not sampled:
            self._sampled_seconds = self._scored_seconds = 0.0
            return True
        return self._scored_seconds * len(sampled) <= self._sampled_seconds * len(self._scoring)

    def _score(self) -> list[Request]:
        """A slice for the client whose turn it is. Returns its request if that is done."""
        client, scored = next(iter(self._scoring.items()))
        self._scoring.move_to_end(client)
        request, parts = scored[0]
        failure = None
        try:
            self._engine.use(request.adapter)
            if request.future.payload is None:
                next(parts)
                return []
        except StopIteration:
            pass
        except Exception as error:
            failure = self._samplers.worker.failure_of(error)
        scored.pop(0)
        if not scored:
            del self._scoring[client]
        if failure is not None or request.result is None:
            return _failed([request], failure or Failure("cancelled", "user"))
        return [request]

    def _response(self, request: Request) -> tuple[Any, list[scoring.Score]]:
        """The response, and what of it is to be scored."""
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
        scores = []
        if sample.topk_prompt_logprobs > 0:
            scores.append(scoring.Score(message.topk_prompt_logprobs, prompt, k=sample.topk_prompt_logprobs))
        if sample.topk_sample_logprobs > 0:
            scores += [scoring.Score(each.topk_sampled_logprobs, np.concatenate([prompt, sequence.tokens]), len(prompt),
                                     sample.topk_sample_logprobs)
                       for sequence, each in zip(sequences, message.sequences)]  # fmt: skip
        if request.targets is not None:
            scores.append(scoring.Score(message.target_prompt_logprobs, prompt, targets=request.targets))
        if sample.prompt_alt_tokens_k > 0:
            draws = request.draws or scoring.Draws(sample, prompt, request.seed)
            scoring.set_tensor(message.prompt_alt_tokens.tokens, draws.tokens)
            scoring.set_tensor(message.prompt_alt_tokens.logprobs, draws.logprobs)
        return message, scores


def _failed(requests: Iterable[Request], failure: Failure) -> list[Request]:
    failed = list(requests)
    for request in failed:
        request.result = failure
    return failed
