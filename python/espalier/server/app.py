# SPDX-License-Identifier: Apache-2.0
"""The routes of the Tinker API over HTTP: bodies, answers and errors. What they do is in service.py."""

import asyncio
import contextlib
import datetime
import hashlib
import hmac
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pydantic
import zstandard
from google.protobuf.message import DecodeError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from ..errors import InputError
from . import requests, schema
from .errors import Refused
from .futures import Failure, Future
from .openai import OpenAI, with_openai_errors
from .service import Service
from .search import search
from .store import CheckpointPath
from .uploads import FILES, Uploads

BODY_BYTES = 64 << 20      # of a request, after decompression
POLL_SECONDS = 30.0        # that retrieve_future waits; clients allow 45
METADATA_BYTES = 4 << 20   # results above it are announced first, where the client asks for that
CLIENT_CONFIG = {"pjwt_auth_enabled": False, "parallel_fwdbwd_chunks": True, "proto_compress_fwdbwd": True,
                 "sample_join_sampling_session": True, "use_pyqwest_transport": False,
                 "custom_loss_server_side": False}  # fmt: skip

Handler = Callable[[Request], Awaitable[Response]]
Body = TypeVar("Body", bound=requests.Request)
Step = TypeVar("Step", bound=requests.Turn | requests.LoadWeights)


async def _body(request: Request) -> bytes:
    """Raises Refused where it is too long."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > BODY_BYTES:
            raise Refused(f"expected a body of at most {BODY_BYTES} bytes, received more", 413)
        parts.append(part)
    body = b"".join(parts)
    encoding = request.headers.get("content-encoding", "identity")
    if encoding == "identity":
        return body
    if encoding != "zstd":
        raise Refused(f"content-encoding: expected zstd or none, received {encoding!r}", 415)
    try:
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(body) as reader:
            body = reader.read(BODY_BYTES + 1)
    except zstandard.ZstdError as error:
        raise Refused(f"expected a body in zstd, received something else: {error}") from None
    if len(body) > BODY_BYTES:
        raise Refused(f"expected a body of at most {BODY_BYTES} bytes after decompression, received more", 413)
    return body


async def _read(request: Request, kind: type[Body]) -> Body:
    """The body as a request of this kind. Raises Refused."""
    return _parsed(await _body(request), kind)


def _parsed(body: bytes, kind: type[Body]) -> Body:
    try:
        return kind.model_validate_json(body or b"{}")
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "body"
        raise Refused(f"{place}: {first['msg']}") from None


def _page(found: list[Any], request: Request, name: str) -> dict[str, Any]:
    def number(key: str, default: int) -> int:
        text = request.query_params.get(key, str(default))
        if not re.fullmatch(r"[0-9]{1,9}", text):
            raise Refused(f"{key}: expected a whole number from 0 on, received {text[:100]!r}")
        return int(text)

    limit, offset = number("limit", 20), number("offset", 0)
    return {name: found[offset : offset + limit], "cursor": {"offset": offset, "limit": limit, "total_count": len(found)}}


class App:
    """The handlers of all routes. api_key: that clients have to send; "": none."""

    def __init__(self, service: Service, api_key: str) -> None:
        self.service = service
        self._key = _digest(api_key) if api_key else b""
        self._uploads = Uploads(service.store)

    def _promise(self, future: Future, body: bytes = b"") -> Response:
        self.service.futures.add_body(future, len(body))
        return JSONResponse({"request_id": future.request_id, **future.extra})

    def _operation(self, kind: type[Step], do: Callable[[Step], Future]) -> Handler:
        """Promises an operation of a model. Where fields are wrong, the operation fails in its turn."""
        async def promise(request: Request) -> Response:
            body = await _body(request)
            try:
                asked = _parsed(body, kind)
            except Refused as error:
                try:
                    turn = _parsed(body, requests.Turn)
                except Refused:
                    raise error from None
                return self._promise(self.service.refuse(turn.model_id, turn.seq_id, error))
            self.service.check_room(len(body), asked.model_id, asked.seq_id)
            return self._promise(do(asked), body)

        return promise

    def starlette(self) -> Starlette:
        """The application for a server of ASGI."""
        def post(path: str, handler: Handler) -> Route:
            return Route(f"/api/v1/{path}", self._safe(handler), methods=["POST"])

        def get(path: str, handler: Handler) -> Route:
            return Route(f"/api/v1/{path}", self._safe(handler), methods=["GET"])

        service, operation = self.service, self._operation
        run = "training_runs/{run}"
        checkpoint = run + "/checkpoints/{kind}/{name}"
        routes = [
            get("healthz", _answering({"status": "ok"})), get("get_server_capabilities", self._capabilities),
            post("client/config", _answering(CLIENT_CONFIG)),
            post("client/dynamic_config", _answering({"sample_cancel_enabled": True})),
            post("telemetry", _answering({"status": "accepted"})), post("create_session", self._create_session),
            post("session_heartbeat", self._heartbeat), post("sessions/{session}/finish", self._finish_session),
            get("sessions", self._list_sessions), get("sessions/{session}", self._get_session),
            post("create_model", self._create_model), post("get_info", self._get_info),
            post("unload_model", self._unload_model), post("forward_backward", self._forward_backward),
            post("optim_step", operation(requests.OptimStep, service.optim_step)),
            post("save_weights", operation(requests.SaveWeights, service.save_weights)),
            post("save_weights_for_sampler", operation(requests.SaveForSampler, service.save_for_sampler)),
            post("load_weights", operation(requests.LoadWeights, service.load_weights)),
            post("save_weights_external", operation(requests.SaveExternal, service.save_external)),
            post("copy_weights", self._copy_weights),
            post("weights_info", self._weights_info), post("create_custom_loss", self._custom_loss),
            post("create_sampling_session", self._create_sampling_session),
            post("join_sampling_session", self._join_sampling_session), post("asample", self._sample),
            post("retrieve_future", self._retrieve), post("retrieve_futures", self._retrieve_many),
            post("cancel_future", self._cancel), get("samplers/{sampler}", self._get_sampler),
            get("training_runs", self._list_runs), get(run, self._get_run), get(run + "/checkpoints", self._list_of_run),
            post("external_weights_upload_start", self._start_upload),
            post("external_weights_upload_finish", self._finish_upload),
            Route("/api/v1/uploads/{upload}/{file}", self._safe(self._upload), methods=["PUT"]),
            get("checkpoints", self._list_checkpoints), post("checkpoints/search", self._search_checkpoints),
            get(checkpoint + "/external_weights_urls", self._urls),
            get(checkpoint + "/files/{file:path}", self._file),
            Route(f"/api/v1/{checkpoint}", self._safe(self._delete), methods=["DELETE"]),
            Route(f"/api/v1/{checkpoint}/ttl", self._safe(self._ttl), methods=["PUT"]),
            post(checkpoint + "/publish", self._not_served), post("sessions/search", self._not_served),
            Route(f"/api/v1/{checkpoint}/publish", self._safe(self._not_served), methods=["DELETE"]),
            Route("/api/v1/sessions/{session}/project", self._safe(self._not_served), methods=["PUT"]),
            get("sessions/{session}/trace_export", self._not_served),
            Route("/metrics", self._safe(self._metrics), methods=["GET"]), *self._openai_routes()]  # fmt: skip
        return Starlette(routes=routes, lifespan=self._lifespan)

    def _openai_routes(self) -> list[Route]:
        openai = OpenAI(self.service, _body)
        found = []
        for prefix in ("/v1", "/oai/api/v1"):  # the second one as the hosted service has it
            for path, (method, handler) in openai.handlers().items():
                found.append(Route(f"{prefix}/{path}", with_openai_errors(self._safe(handler)), methods=[method]))
            found.append(Route(prefix + "/{path:path}", with_openai_errors(self._safe(openai.not_served)),
                               methods=["GET", "POST", "PUT", "PATCH", "DELETE"]))  # fmt: skip
        return found

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.service.start()
        watch = asyncio.get_running_loop().create_task(self.service.watch_sessions())
        try:
            yield
        finally:
            watch.cancel()
            await self.service.stop()

    def _safe(self, handler: Handler) -> Handler:
        """With the key checked, and with errors as answers."""
        async def answer(request: Request) -> Response:
            # The URLs of uploads have a secret of their own.
            open_to_all = request.url.path == "/api/v1/healthz" or request.url.path.startswith("/api/v1/uploads/")
            key = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
            if self._key and not open_to_all and not hmac.compare_digest(self._key, _digest(key)):
                return JSONResponse({"detail": "expected the API key of this server (TINKER_API_KEY, header X-API-Key)"}, 401)
            try:
                return await handler(request)
            except Refused as error:
                return JSONResponse({"detail": str(error)}, error.status)
            except InputError as error:
                return JSONResponse({"detail": str(error)}, 400)
            except ClientDisconnect:
                return Response(status_code=400)

        return answer

    # Server and sessions.

    async def _capabilities(self, request: Request) -> Response:
        models = [{"model_name": base.name, "max_context_length": base.max_context, "trainable": True, "sampleable": True}
                  for base in self.service.bases.values()]  # fmt: skip
        return JSONResponse({"supported_models": models})

    async def _not_served(self, request: Request) -> Response:
        raise Refused(f"{request.url.path}: expected a call that a local server serves; publishing, projects, traces and "
                      "the search of sessions are those of the hosted service", 404)  # fmt: skip

    async def _create_session(self, request: Request) -> Response:
        session = self.service.create_session(await _read(request, requests.CreateSession))
        return JSONResponse({"type": "create_session", "session_id": session.session_id})

    async def _heartbeat(self, request: Request) -> Response:
        self.service.session((await _read(request, requests.OfSession)).session_id)
        return JSONResponse({"type": "session_heartbeat"})

    async def _finish_session(self, request: Request) -> Response:
        await _body(request)
        session = self.service.session(request.path_params["session"])
        await self.service.end_session(session, "the session has ended: its client finished it")
        return Response(status_code=204)

    async def _list_sessions(self, request: Request) -> Response:
        return JSONResponse({"sessions": _page(list(self.service.sessions), request, "sessions")["sessions"]})

    async def _get_session(self, request: Request) -> Response:
        session = self.service.sessions.get(request.path_params["session"])
        if session is None:
            raise Refused("session_id: expected a session that goes on", 404)
        return JSONResponse({"training_run_ids": list(session.models), "sampler_ids": list(session.samplers),
                             "display_name": session.display_name})  # fmt: skip

    async def _metrics(self, request: Request) -> Response:
        """Tokens and waiting requests, as Prometheus reads them."""
        counts = {**self.service.counter.counts(), "waiting_requests": self.service.futures.pending,
                  "sessions": len(self.service.sessions)}  # fmt: skip
        return PlainTextResponse("".join(f"espalier_{name} {value:g}\n" for name, value in sorted(counts.items())))

    # Models.

    async def _create_model(self, request: Request) -> Response:
        return self._promise(self.service.create_model(await _read(request, requests.CreateModel)))

    async def _get_info(self, request: Request) -> Response:
        model = self.service.model((await _read(request, requests.OfModel)).model_id)
        return JSONResponse({"type": "get_info", "model_id": model.model_id, "model_name": model.worker.name,
                             "is_lora": model.lora.rank > 0, "lora_rank": model.lora.rank, "model_data": {
                                 "model_name": model.worker.name, "tokenizer_id": str(model.worker.folder)},
                             "espalier": self.service.counter.counts()})  # fmt: skip

    async def _unload_model(self, request: Request) -> Response:
        model_id = (await _read(request, requests.OfModel)).model_id
        return self._promise(self.service.unload_model(model_id))

    async def _forward_backward(self, request: Request) -> Response:
        body = await _body(request)
        try:
            message = schema.ForwardBackwardRequest.FromString(body)
        except DecodeError:
            raise Refused("expected a ForwardBackwardRequest in protobuf (SDK 0.38), received something else") from None
        return self._promise(self.service.forward_backward(message, len(body)), body)

    async def _custom_loss(self, request: Request) -> Response:
        await _body(request)
        raise Refused("create_custom_loss: expected custom losses to run in the client, as client/config says")

    # Weights.

    async def _copy_weights(self, request: Request) -> Response:
        return JSONResponse({"tinker_path": await self.service.copy_weights(await _read(request, requests.CopyWeights))})

    async def _weights_info(self, request: Request) -> Response:
        return JSONResponse(self.service.weights_info((await _read(request, requests.OfCheckpoint)).tinker_path))

    async def _list_runs(self, request: Request) -> Response:
        runs = [{key: value for key, value in run.items() if key != "about"} for run in self.service.store.runs()]
        return JSONResponse(_page(runs, request, "training_runs"))

    def _run(self, request: Request) -> dict[str, Any]:
        run = self.service.store.run(request.path_params["run"])
        if run is None:
            raise Refused("training_run_id: expected a known training run", 404)
        return run

    async def _get_run(self, request: Request) -> Response:
        run = self._run(request)
        del run["about"]
        return JSONResponse(run)

    async def _list_of_run(self, request: Request) -> Response:
        return JSONResponse({"checkpoints": self.service.store.checkpoints(self._run(request)["training_run_id"])})

    async def _list_checkpoints(self, request: Request) -> Response:
        return JSONResponse(_page(self.service.store.checkpoints(), request, "checkpoints"))

    async def _search_checkpoints(self, request: Request) -> Response:
        asked = await _read(request, requests.SearchCheckpoints)
        return JSONResponse(await asyncio.to_thread(lambda: search(self.service.store.checkpoints(), asked)))

    async def _start_upload(self, request: Request) -> Response:
        asked = await _read(request, requests.StartUpload)
        upload, expires = self._uploads.start(self.service.base(asked.base_model), asked)
        urls = {name: str(request.url.replace(path=f"/api/v1/uploads/{upload}/{name}")) for name in FILES}
        return JSONResponse({"upload_id": upload, "urls": urls,
                             "expires": datetime.datetime.fromtimestamp(expires, datetime.UTC).isoformat()})  # fmt: skip

    async def _upload(self, request: Request) -> Response:
        if request.headers.get("content-encoding", "identity") != "identity":
            raise Refused("content-encoding: expected none, as files are sent as they are", 415)
        await self._uploads.write(request.path_params["upload"], request.path_params["file"], request.stream())
        return Response(status_code=204)

    async def _finish_upload(self, request: Request) -> Response:
        return JSONResponse({"tinker_path": await self._uploads.finish((await _read(request, requests.FinishUpload)).upload_id)})

    async def _delete(self, request: Request) -> Response:
        self.service.store.delete(_path_of(request))
        return Response(status_code=204)

    async def _ttl(self, request: Request) -> Response:
        self.service.store.set_ttl(_path_of(request), (await _read(request, requests.TimeToLive)).ttl_seconds)
        return Response(status_code=204)

    async def _urls(self, request: Request) -> Response:
        folder = self.service.store.find(_path_of(request))
        prefix = str(request.url).split("/external_weights_urls")[0]
        urls = {name: f"{prefix}/files/{name}" for name in sorted(_files(folder))}
        return JSONResponse({"urls": urls, "expires": "9999-12-31T00:00:00Z"})

    async def _file(self, request: Request) -> Response:
        file = _files(self.service.store.find(_path_of(request))).get(request.path_params["file"])
        if file is None:
            raise Refused("expected a file of the checkpoint", 404)
        return FileResponse(file)

    # Samplers.

    async def _create_sampling_session(self, request: Request) -> Response:
        sampler = await self.service.create_sampling_session(await _read(request, requests.CreateSamplingSession))
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler})

    async def _join_sampling_session(self, request: Request) -> Response:
        sampler = self.service.sampler((await _read(request, requests.OfSamplingSession)).sampling_session_id)
        sampler.clients += 1
        return JSONResponse({"type": "join_sampling_session", "client_counter": sampler.clients})

    async def _get_sampler(self, request: Request) -> Response:
        sampler = self.service.sampler(request.path_params["sampler"])
        return JSONResponse({"sampler_id": sampler.sampler_id, "base_model": sampler.worker.name,
                             "model_path": sampler.model_path})  # fmt: skip

    async def _sample(self, request: Request) -> Response:
        body = await _body(request)
        self.service.futures.check_room(len(body))
        return self._promise(self.service.sample(_parsed(body, requests.Sample)), body)

    # Futures.

    async def _retrieve(self, request: Request) -> Response:
        asked = await _read(request, requests.RetrieveFuture)
        future = self.service.futures.get(asked.request_id)
        if future is None:
            raise Refused("request_id: expected a request of this server whose result has not expired", 410)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(future.news.wait(), POLL_SECONDS)
        if future.payload is None:
            state, reason = self.service.futures.queue_state(future)
            return JSONResponse({"type": "try_again", "request_id": future.request_id, "queue_state": state,
                                 "queue_state_reason": reason}, 408)  # fmt: skip
        if isinstance(future.payload, Failure):
            return JSONResponse({"error": future.payload.error, "category": future.payload.category})
        if asked.allow_metadata_only and future.size > METADATA_BYTES:
            return JSONResponse({"status": "complete_metadata", "response_payload_size": future.size})
        if isinstance(future.payload, bytes):
            return Response(future.payload, media_type="application/x-protobuf")
        return JSONResponse(future.payload)

    async def _retrieve_many(self, request: Request) -> Response:
        return JSONResponse(await self.service.completions(await _read(request, requests.RetrieveFutures)))

    async def _cancel(self, request: Request) -> Response:
        self.service.cancel((await _read(request, requests.CancelFuture)).request_id)
        return Response(status_code=204)


def _answering(answer: dict[str, Any]) -> Handler:
    """A handler that gives every request this answer."""
    async def handle(request: Request) -> Response:
        await _body(request)
        return JSONResponse(answer)

    return handle


def _digest(key: str) -> bytes:
    """Of an API key: compared in constant time, whatever its length."""
    return hashlib.sha256(key.encode()).digest()


def _files(folder: Path) -> dict[str, Path]:
    """All below a folder, by their paths from there."""
    return {str(file.relative_to(folder)): file for file in folder.rglob("*") if file.is_file()}


def _path_of(request: Request) -> CheckpointPath:
    given = request.path_params
    return CheckpointPath.of(given["run"], f"{given['kind']}/{given['name']}")


