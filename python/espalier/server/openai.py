# SPDX-License-Identifier: Apache-2.0
"""The OpenAI API for sampling: models, completions and chats, of bases and of checkpoints.

A request is sampled as one of the Tinker API is, beside all others: the same prompt and seed give the same tokens.
"""

import asyncio
import contextlib
import json
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from . import bodies, openai_requests, requests, sampling, scoring, schema
from .errors import Refused
from .futures import Failure, Future
from .openai_answers import Answer, Choice, tops_of
from .openai_errors import error_json
from .sample_requests import SAMPLE_BYTES, check_prompt
from .service import Service
from .sessions import new_client
from .tasks import start
from .texts import ModelTexts, TextStream
from .worker import Weights, Worker

MAX_ANSWERS = 4096  # of a request, over all its prompts
MAX_OPENED = 16     # checkpoints that are kept for the next request; the one longest unused goes first

Handler = Callable[[Request], Awaitable[Response]]
Value = TypeVar("Value")


@dataclass
class _OpenedCheckpoint:
    """A checkpoint that is opened for sampling, or is being opened."""

    worker: Worker
    weights: asyncio.Task[Weights]
    users: int = 0


class OpenedCheckpoints:
    """Checkpoints that are opened for sampling. One that is written anew is opened anew."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._opened: OrderedDict[tuple[str, int, int], _OpenedCheckpoint] = OrderedDict()  # the last used one last

    @contextlib.asynccontextmanager
    async def using(self, path: str) -> AsyncIterator[tuple[Worker, Weights]]:
        """The weights of a checkpoint, which stay as long as they are used. Raises Refused or InputError."""
        folder, worker, load = self._service.snapshot_of(path)
        about = folder.stat()
        key = (path, about.st_ino, about.st_mtime_ns)
        if key not in self._opened:
            self._opened[key] = _OpenedCheckpoint(worker, asyncio.get_running_loop().create_task(worker.do(load)))
        opened = self._opened[key]
        self._opened.move_to_end(key)
        opened.users += 1
        try:
            try:
                weights = await asyncio.shield(opened.weights)
            except Exception:
                self._opened.pop(key, None)
                raise
            yield worker, weights
        finally:
            opened.users -= 1
            self._make_room()

    def _make_room(self) -> None:
        for key, opened in list(self._opened.items()):
            if len(self._opened) <= MAX_OPENED:
                return
            if opened.users == 0 and opened.weights.done():
                del self._opened[key]
                if opened.weights.exception() is None:
                    start(opened.worker.do(partial(opened.worker.drop, opened.weights.result())))


@dataclass
class _Model:
    """What samples: a base, or a checkpoint on it."""

    name: str
    worker: Worker
    weights: Weights | None
    texts: ModelTexts


@dataclass
class _Prompt:
    """A prompt of a request, and what comes of it."""

    tokens: list[int]
    future: Future
    arrived: list[tuple[int, int]] = field(default_factory=list)  # number of the sample and token, as they are sampled


class OpenAI:
    """The handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._checkpoints = OpenedCheckpoints(service)

    def handlers(self) -> dict[str, tuple[str, Handler]]:
        """Methods and handlers by paths below the prefix."""
        return {"models": ("GET", self._models), "models/{model:path}": ("GET", self._one_model),
                "completions": ("POST", self._completions), "chat/completions": ("POST", self._chat)}  # fmt: skip

    async def _models(self, request: Request) -> Response:
        models = [_model_json(base.name, base.folder.stat().st_mtime) for base in self._service.bases.values()]
        return JSONResponse({"object": "list", "data": models})

    async def _one_model(self, request: Request) -> Response:
        name = request.path_params["model"]
        is_checkpoint = name.startswith("tinker://")
        folder = self._service.snapshot_of(name)[0] if is_checkpoint else self._service.base(name).folder
        return JSONResponse(_model_json(name, folder.stat().st_mtime))

    async def not_served(self, request: Request) -> Response:
        """Of other paths."""
        raise Refused(f"{request.url.path[:200]}: expected one of {', '.join(self.handlers())}, which this server has of the "
                      "OpenAI API", 404)  # fmt: skip

    async def _completions(self, request: Request) -> Response:
        body = await bodies.read_body(request, bodies.SAMPLE_BODY_BYTES)
        asked = await bodies.apart(body, lambda body: openai_requests.read(body, openai_requests.Completions))

        def encode(texts: ModelTexts) -> list[list[int]]:
            return [texts.prompt_tokens(each) if isinstance(each, str) else each for each in asked.prompts()]

        return await self._answer(request, Answer(asked, "text_completion"), encode, len(body))

    async def _chat(self, request: Request) -> Response:
        body = await bodies.read_body(request, bodies.SAMPLE_BODY_BYTES)
        asked = await bodies.apart(body, lambda body: openai_requests.read(body, openai_requests.Chat))
        messages, variables = openai_requests.checked_messages(asked.messages), asked.variables()

        def encode(texts: ModelTexts) -> list[list[int]]:
            return [texts.chat_tokens(messages, asked.tools or None, variables)]

        return await self._answer(request, Answer(asked, "chat.completion"), encode, len(body))

    async def _answer(self, request: Request, answer: Answer, encode: Callable[[ModelTexts], list[list[int]]],
                      body_bytes: int) -> Response:  # fmt: skip
        stack = contextlib.AsyncExitStack()
        try:
            run = _Run(self._service, answer, await stack.enter_async_context(self._model(answer.asked.model)))
            prompts = await asyncio.to_thread(run.prepared, encode)
            stack.callback(run.end)
            run.begin(prompts, body_bytes)
            if answer.asked.stream:
                return _Stream(run.events(), stack)
            await _unless_disconnected(request, run.wait())
            done = JSONResponse(await asyncio.to_thread(run.whole))
        except BaseException:
            await stack.aclose()
            raise
        await stack.aclose()
        return done

    @contextlib.asynccontextmanager
    async def _model(self, name: str) -> AsyncIterator[_Model]:
        """By the name of a base, the path of a checkpoint, or both with `;` between them. Raises Refused."""
        base_name, separator, path = name.partition(";")
        if not separator and name.startswith("tinker://"):
            base_name, path = "", name
        if not path:
            base = self._service.base(name)
            yield _Model(name, base, await self._service.plain_weights(base), self._service.texts[base.name])
            return
        async with self._checkpoints.using(path) as (worker, weights):
            if base_name and self._service.base(base_name).name != worker.name:
                raise Refused(f"model: expected {worker.name}, on which {path} was trained, received {base_name[:100]!r}")
            yield _Model(name, worker, weights, self._service.texts[worker.name])


class _Run:
    """The prompts of a request while they are sampled."""

    def __init__(self, service: Service, answer: Answer, model: _Model) -> None:
        self._service = service
        self._answer = answer
        self._model = model
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._ends: list[int] = []  # ids that end an answer
        self.prompts: list[_Prompt] = []

    def prepared(self, encode: Callable[[ModelTexts], list[list[int]]]) -> list[list[int]]:
        """The tokens of the prompts, checked. Takes long, beside the event loop. Raises Refused."""
        self._ends = sorted({*self._model.worker.stop_ids, *self._model.texts.end_ids})
        prompts = encode(self._model.texts)
        if len(prompts) * self._answer.asked.n > MAX_ANSWERS:
            raise Refused(f"n: expected at most {MAX_ANSWERS} answers of a request, received {len(prompts)} prompts and n "
                          f"{self._answer.asked.n}")  # fmt: skip
        for tokens in prompts:
            check_prompt(tokens, self._model.worker)
        return prompts

    def begin(self, prompts: list[list[int]], body_bytes: int) -> None:
        """Raises Refused where too many requests wait; then `end` cancels those that began."""
        asked, worker, weights = self._answer.asked, self._model.worker, self._model.weights
        self._service.futures.check_room(body_bytes)
        params = {"temperature": asked.temperature, "top_p": asked.top_p, "top_k": asked.top_k, "seed": asked.seed,
                  "stop": asked.stop_texts}  # fmt: skip
        sample = requests.Sample.model_validate({
            "prompt": {"chunks": []}, "num_samples": asked.n, "topk_sample_logprobs": asked.top or 0, "sampling_params": params})
        client = new_client()
        for tokens in prompts:
            room = worker.max_context - len(tokens)
            max_tokens = min(asked.token_limit or room, room)
            scoring.check_size(sample, len(tokens), max_tokens)
            prompt = _Prompt(tokens, self._service.futures.create(f"{self._service.prefix}openai:{secrets.token_hex(16)}"))
            self.prompts.append(prompt)
            ids = np.array(tokens, np.int32)
            body = body_bytes if len(self.prompts) == 1 else 0
            self._service.futures.add_body(prompt.future, SAMPLE_BYTES + ids.nbytes + body)
            self._service.submit(sampling.Request(prompt.future, sample, ids, max_tokens, lambda: weights, client,
                                                  end_ids=self._ends, listener=self._listener(prompt)), worker)  # fmt: skip

    def _listener(self, prompt: _Prompt) -> Callable[[int, int], None] | None:
        if not self._answer.is_sent_by_token:
            return None

        def arrive(sample: int, token: int) -> None:
            prompt.arrived.append((sample, token))
            self._news.set()

        def listen(sample: int, token: int) -> None:
            self._loop.call_soon_threadsafe(arrive, sample, token)

        return listen

    def end(self) -> None:
        """Cancels what is not done, and forgets the results."""
        for prompt in self.prompts:
            if prompt.future.payload is None:
                self._service.cancel(prompt.future.request_id)
                self._service.futures.finish(prompt.future, Failure("the client has closed the connection", "user"))
            self._service.futures.forget(prompt.future)

    async def wait(self) -> None:
        """Until all is sampled. Raises Refused where something failed."""
        for prompt in self.prompts:
            await prompt.future.news.wait()
            if prompt.future.payload is None:
                raise Refused("the server stops", 503)
            if isinstance(prompt.future.payload, Failure):
                raise Refused(prompt.future.payload.error, 400 if prompt.future.payload.category == "user" else 500)

    def _choices(self) -> list[Choice]:
        choices = []
        for number, prompt in enumerate(self.prompts):
            message = schema.SampleResponse.FromString(prompt.future.payload)
            for sample, sequence in enumerate(message.sequences):
                tokens, logprobs = np.frombuffer(sequence.tokens, "<i4"), np.frombuffer(sequence.logprobs, "<f4")
                choices.append(Choice(number * self._answer.asked.n + sample, tokens.tolist(), logprobs.tolist(),
                                       tops_of(sequence.topk_sampled_logprobs), sequence.stop_reason == schema.STOP))  # fmt: skip
        return choices

    def _usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        kept = sum(schema.SampleResponse.FromString(prompt.future.payload).prompt_cache_hit_tokens for prompt in self.prompts)
        prompt_tokens = sum(len(each.tokens) for each in self.prompts)
        completion_tokens = sum(len(each.tokens) for each in choices)
        return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens,
                "total_tokens": prompt_tokens + completion_tokens, "prompt_tokens_details": {"cached_tokens": kept}}  # fmt: skip

    def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        choices, answer = self._choices(), self._answer
        found = []
        for choice in choices:
            stream = TextStream(self._model.texts.text, answer.asked.stop_texts)
            found.append(answer.choice(choice, stream.add(choice.tokens, is_last=True), stream.is_stopped, self._model.texts))
        return {**answer.head(self._model.name), "choices": found, "usage": self._usage(choices)}

    async def events(self) -> AsyncGenerator[str, None]:
        """The answer as server-sent events."""
        answer = self._answer
        head = answer.head(self._model.name, is_chunk=True)
        with_usage = answer.asked.stream_options.include_usage

        def event(choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> str:
            body = {**head, "choices": choices, **({"usage": usage} if with_usage else {})}
            return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"

        streams = [TextStream(self._model.texts.text, answer.asked.stop_texts) for _ in range(len(self.prompts) * answer.asked.n)]
        counts = [0] * len(streams)  # tokens that went into them
        for number in range(len(streams)):
            if first := answer.first_chunk(number):
                yield event([first])
        done = self._loop.create_task(self.wait())
        done.add_done_callback(lambda task: self._news.set())
        try:
            while not done.done():
                await self._news.wait()
                self._news.clear()
                for number, tokens in self._arrived().items():
                    counts[number] += len(tokens)
                    if text := streams[number].add(tokens):
                        yield event([answer.chunk(number, text)])
            await done
            last, usage = await asyncio.to_thread(self._last_chunks, streams, counts)
            for chunk in last:
                yield event([chunk])
            if with_usage:
                yield event([], usage)
            yield "data: [DONE]\n\n"
        except Refused as error:
            yield f"data: {json.dumps(error_json(str(error), error.status))}\n\n"
        finally:
            done.cancel()

    def _last_chunks(self, streams: list[TextStream], counts: list[int]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The ends of all answers, of whose tokens so many were added to their streams, and the usage."""
        choices, chunks = self._choices(), []
        for choice in choices:
            stream = streams[choice.index]
            text = stream.add(choice.tokens[counts[choice.index] :], is_last=True)
            chunks.append(self._answer.last_chunk(choice, text, stream.is_stopped, self._model.texts))
        return chunks, self._usage(choices)

    def _arrived(self) -> dict[int, list[int]]:
        """New tokens by number of the choice."""
        tokens: dict[int, list[int]] = {}
        for number, prompt in enumerate(self.prompts):
            arrived, prompt.arrived = prompt.arrived, []
            for sample, token in arrived:
                tokens.setdefault(number * self._answer.asked.n + sample, []).append(token)
        return tokens


class _Stream(StreamingResponse):
    """Events, after which, or when the client has gone, what they need is closed."""

    def __init__(self, events: AsyncGenerator[str, None], stack: contextlib.AsyncExitStack) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._events = events
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
            await self._stack.aclose()


async def _unless_disconnected(request: Request, work: Awaitable[Value]) -> Value:
    """The result of the work, which ends if the client goes. Raises Refused then, which nobody reads."""
    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise Refused("the client has closed the connection", 499)
        return tasks[0].result()  # type: ignore[return-value]
    finally:
        for task in tasks:
            task.cancel()


def _model_json(name: str, created: float) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(created), "owned_by": "espalier"}
