# SPDX-License-Identifier: Apache-2.0
"""Requests to samplers as clients send them: checked, handed to what samples, and told of when they are done."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from . import requests, sampling, scoring
from .errors import Refused
from .futures import Failure, Future, Futures, failure_of
from .sessions import Completions, Sampler
from .tasks import start
from .worker import Worker

CLIENT_NUMBERS = 1_000_000_000  # seq_id of samples: those of the client N of a sampler begin at N times this
SAMPLE_BYTES = 4096             # of a request that waits, besides its tokens


class SampleRequests:
    """All of a server. samplers: what samples for each worker. Used on the thread of the event loop alone."""

    def __init__(self, futures: Futures, samplers: Mapping[Worker, sampling.Samplers]) -> None:
        self._futures = futures
        self._samplers = samplers

    def begin(self, sampler: Sampler, request: requests.Sample, seq_id: int) -> Future:
        """A repeated seq_id gets the future of the first. Raises Refused."""
        request_id = f"{sampler.sampler_id}:{seq_id}"
        if (known := self._futures.get(request_id)) is not None:
            return known
        client = seq_id // CLIENT_NUMBERS
        if client > sampler.clients:
            raise Refused(f"seq_id: expected a number below {(sampler.clients + 1) * CLIENT_NUMBERS}, as the sampler was joined "
                          f"{sampler.clients} times, received {seq_id}")  # fmt: skip
        worker = sampler.worker
        prompt, max_tokens = _prompt(request, worker)
        scoring.check_size(request, len(prompt), max_tokens)
        targets = None
        if request.target_prompt_logprobs is not None:
            targets = scoring.target_table(request.target_prompt_logprobs, len(prompt), worker.vocab_size)
        future = self._futures.create(request_id, sequences=request.num_samples)
        # Tokens wait as arrays, not as objects of Python.
        request.prompt, request.target_prompt_logprobs = requests.Prompt(chunks=[]), None
        self._futures.add_body(future, SAMPLE_BYTES + prompt.nbytes + (0 if targets is None else targets.nbytes))
        start(self._tell(sampler, client, future))
        self.submit(sampling.Request(future, request, prompt, max_tokens, sampler.weights, sampler.session.number, targets),
                    worker)  # fmt: skip
        return future

    def submit(self, request: sampling.Request, worker: Worker) -> None:
        """Has a request sampled. Where it cannot be, it fails."""
        if sampling.stop_texts(request.sample):
            start(self._submit_with_tokenizer(request, worker))
        else:
            self._submit(request, worker)

    def _submit(self, request: sampling.Request, worker: Worker) -> None:
        try:
            self._samplers[worker].submit(request)
        except Refused as error:
            self._futures.finish(request.future, Failure(str(error), "user"))

    async def _submit_with_tokenizer(self, request: sampling.Request, worker: Worker) -> None:
        """Loading it for the first time takes seconds."""
        try:
            await asyncio.to_thread(self._samplers[worker].tokenizer)
        except Exception as error:
            self._futures.finish(request.future, failure_of(error))
            return
        self._submit(request, worker)

    async def _tell(self, sampler: Sampler, client: int, future: Future) -> None:
        """Adds the end of a request to what `retrieve_futures` tells."""
        await future.news.wait()
        failed = isinstance(future.payload, Failure)
        told: dict[str, Any] = {"state": "failed" if failed else "finished", "request_id": future.request_id}
        if not failed:
            told["response_payload_uncompressed_size"] = future.size
        sampler.completions.setdefault(client, Completions()).add(told)
        sampler.news.set()

    async def completions(self, sampler: Sampler, request: requests.RetrieveFutures) -> dict[str, Any]:
        """Those of a sampler since a cursor; waits for one."""
        until = time.monotonic() + (30.0 if request.timeout is None else min(request.timeout, 30.0))
        while True:
            known = sampler.completions.get(request.target.cloned_sampler_id) or Completions()
            left = until - time.monotonic()
            if known.count > request.prev_cursor or left <= 0 or self._futures.is_closed:
                return {"completions": known.since(request.prev_cursor), "cursor": max(known.count, request.prev_cursor)}
            sampler.news.clear()
            try:
                await asyncio.wait_for(sampler.news.wait(), left)
            except TimeoutError:
                continue


def check_prompt(ids: list[int], worker: Worker) -> None:
    """Raises Refused where there is no room behind these tokens, or there are none."""
    if not 1 <= len(ids) < worker.max_context:
        raise Refused(f"prompt: expected 1 to {worker.max_context - 1} tokens, received {len(ids)}")
    if min(ids) < 0 or max(ids) >= worker.vocab_size:
        raise Refused(f"prompt: expected token ids from 0 and below {worker.vocab_size}, received {min(ids)} to {max(ids)}")


def _prompt(request: requests.Sample, worker: Worker) -> tuple[Any, int]:
    """Tokens of a prompt, and how many may be sampled."""
    for chunk in request.prompt.chunks:
        if chunk.type != "encoded_text":
            raise Refused(f"prompt: expected chunks of tokens alone, received one of type {chunk.type[:100]!r}")
    ids = [token for chunk in request.prompt.chunks for token in chunk.tokens]
    check_prompt(ids, worker)
    room = worker.max_context - len(ids)
    return np.array(ids, np.int32), min(request.sampling_params.max_tokens or room, room)
