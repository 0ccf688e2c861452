# SPDX-License-Identifier: Apache-2.0
"""The routes of the Tinker API over HTTP: bodies, answers and errors. What they do is in service.py."""

import asyncio
import contextlib
import datetime
import errno
import logging
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from ..commands.console import clipped, printable
from ..errors import InputError, in_one_line
from . import bodies, disk, requests, wire
from .access import UPLOADS_PATH, Door
from .bodies import apart, parsed, read_body, read_json
from .errors import Refused
from .futures import Failure, Future
from .openai import OpenAI
from .openai_errors import PREFIXES, error_response
from .restart import bring_back
from .service import Service
from .search import search
from .signing import Signer
from .store import CheckpointPath
from .uploads import FILES, Uploads

logger = logging.getLogger("uvicorn.error")
POLL_SECONDS = 30.0        # that retrieve_future waits; clients allow 45
PAGE_ROWS = 1000           # of a list, in one answer
METADATA_BYTES = 4 << 20   # results above it are announced first, where the client asks for that
CLIENT_CONFIG = {"pjwt_auth_enabled": False, "parallel_fwdbwd_chunks": True, "proto_compress_fwdbwd": True,
                 "sample_join_sampling_session": True, "use_pyqwest_transport": False,
                 "custom_loss_server_side": False}  # fmt: skip

Handler = Callable[[Request], Awaitable[Response]]
Step = TypeVar("Step", bound=requests.Turn | requests.LoadWeights)


def _page(found: Sequence[Any], request: Request, name: str) -> dict[str, Any]:
    def number(key: str, default: int) -> int:
        text = request.query_params.get(key, str(default))
        if not re.fullmatch(r"[0-9]{1,9}", text):
            raise Refused(f"{key}: expected a whole number from 0 on, received {text[:100]!r}")
        return int(text)

    limit, offset = min(number("limit", 20), PAGE_ROWS), number("offset", 0)
    return {name: found[offset : offset + limit], "cursor": {"offset": offset, "limit": limit, "total_count": len(found)}}


class App:
    """The handlers of all routes."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._signer = Signer()
        self._uploads = Uploads(service.store)

    def _promise(self, future: Future, body: bytes = b"") -> Response:
        self.service.futures.add_body(future, len(body))
        return JSONResponse(future.answer)

    def _operation(self, kind: type[Step], do: Callable[[Step], Future]) -> Handler:
        """Promises an operation of a model. Where fields are wrong, the operation fails in its turn."""
        async def promise(request: Request) -> Response:
            body = await read_body(request)
            try:
                asked = parsed(body, kind)
            except Refused as error:
                try:
                    turn = parsed(body, requests.Turn)
                except Refused:
                    raise error from None
                return self._promise(self.service.refuse(turn.model_id, turn.seq_id, error))
            self.service.check_room(len(body), asked.model_id, asked.seq_id)
            return self._promise(do(asked), body)

        return promise

    def door(self, api_key: str) -> Door:
        """Through which clients with this key come to it; "": all clients."""
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
            Route(UPLOADS_PATH + "{upload}/{file}", self._safe(self._upload), methods=["PUT"]),
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
        return Door(api_key, Starlette(routes=routes, lifespan=self._lifespan), self._signer, self._uploads.has_secret)

    def _openai_routes(self) -> list[Route]:
        openai = OpenAI(self.service)
        found = []
        for prefix in PREFIXES:
            for path, (method, handler) in openai.handlers().items():
                found.append(Route(f"{prefix}/{path}", self._safe(handler), methods=[method]))
            found.append(Route(prefix + "/{path:path}", self._safe(openai.not_served),
                               methods=["GET", "POST", "PUT", "PATCH", "DELETE"]))  # fmt: skip
        return found

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        for service in self.service.services:
            await bring_back(service)
        self.service.start()
        watches = [asyncio.get_running_loop().create_task(service.watch_sessions()) for service in self.service.services]
        try:
            yield
        finally:
            for watch in watches:
                watch.cancel()
            await self.service.stop()

    def _safe(self, handler: Handler) -> Handler:
        """With errors as answers."""
        async def answer(request: Request) -> Response:
            try:
                return await handler(request)
            except ClientDisconnect:
                return Response(status_code=400)
            except Exception as error:
                status, detail = _answer_to(error)
                if status >= 500:
                    logger.error("%s %s: %s", request.method, clipped(printable(request.url.path)), printable(in_one_line(error)),
                                 exc_info=os.environ.get("ESPALIER_TRACEBACK", "") not in ("", "0"))  # fmt: skip
                return error_response(request.url.path, detail, status)

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
        session = self.service.create_session(await read_json(request, requests.CreateSession))
        return JSONResponse({"type": "create_session", "session_id": session.session_id})

    async def _heartbeat(self, request: Request) -> Response:
        self.service.session((await read_json(request, requests.OfSession)).session_id)
        return JSONResponse({"type": "session_heartbeat"})

    async def _finish_session(self, request: Request) -> Response:
        await read_body(request)
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
        return self._promise(self.service.create_model(await read_json(request, requests.CreateModel)))

    async def _get_info(self, request: Request) -> Response:
        model = self.service.model((await read_json(request, requests.OfModel)).model_id)
        return JSONResponse({"type": "get_info", "model_id": model.model_id, "model_name": model.worker.name,
                             "is_lora": model.lora.rank > 0, "lora_rank": model.lora.rank, "model_data": {
                                 "model_name": model.worker.name, "tokenizer_id": str(model.worker.folder)},
                             "espalier": self.service.counter.counts()})  # fmt: skip

    async def _unload_model(self, request: Request) -> Response:
        model_id = (await read_json(request, requests.OfModel)).model_id
        return self._promise(self.service.unload_model(model_id))

    async def _forward_backward(self, request: Request) -> Response:
        body = await read_body(request, bodies.BODY_BYTES)
        message = await apart(body, wire.forward_backward_request)
        return self._promise(await self.service.forward_backward(message, len(body)), body)

    async def _custom_loss(self, request: Request) -> Response:
        await read_body(request)
        raise Refused("create_custom_loss: expected custom losses to run in the client, as client/config says")

    # Weights.

    async def _copy_weights(self, request: Request) -> Response:
        return JSONResponse({"tinker_path": await self.service.copy_weights(await read_json(request, requests.CopyWeights))})

    async def _weights_info(self, request: Request) -> Response:
        return JSONResponse(self.service.weights_info((await read_json(request, requests.OfCheckpoint)).tinker_path))

    async def _list_runs(self, request: Request) -> Response:
        return JSONResponse(_page(self.service.store.runs(), request, "training_runs"))

    async def _run(self, request: Request) -> dict[str, Any]:
        run = await asyncio.to_thread(self.service.store.run, request.path_params["run"])
        if run is None:
            raise Refused("training_run_id: expected a known training run", 404)
        return run

    async def _get_run(self, request: Request) -> Response:
        return JSONResponse(await self._run(request))

    async def _list_of_run(self, request: Request) -> Response:
        run = await self._run(request)
        found = self.service.store.checkpoints(run["training_run_id"])
        return await asyncio.to_thread(lambda: JSONResponse({"checkpoints": list(found)}))  # without a bound

    async def _list_checkpoints(self, request: Request) -> Response:
        return JSONResponse(_page(self.service.store.checkpoints(), request, "checkpoints"))

    async def _search_checkpoints(self, request: Request) -> Response:
        asked = await read_json(request, requests.SearchCheckpoints)
        return JSONResponse(await asyncio.to_thread(lambda: search(self.service.store.checkpoints(), asked)))

    async def _start_upload(self, request: Request) -> Response:
        asked = await read_json(request, requests.StartUpload)
        upload, expires = self._uploads.start(self.service.base(asked.base_model), asked)
        urls = {name: str(request.url.replace(path=f"{UPLOADS_PATH}{upload}/{name}")) for name in FILES}
        return JSONResponse({"upload_id": upload, "urls": urls,
                             "expires": datetime.datetime.fromtimestamp(expires, datetime.UTC).isoformat()})  # fmt: skip

    async def _upload(self, request: Request) -> Response:
        if request.headers.get("content-encoding", "identity") != "identity":
            raise Refused("content-encoding: expected none, as files are sent as they are", 415)
        await self._uploads.write(request.path_params["upload"], request.path_params["file"], request.stream())
        return Response(status_code=204)

    async def _finish_upload(self, request: Request) -> Response:
        upload = (await read_json(request, requests.FinishUpload)).upload_id
        return JSONResponse({"tinker_path": await self._uploads.finish(upload)})

    async def _delete(self, request: Request) -> Response:
        await asyncio.to_thread(self.service.store.delete, _path_of(request))
        return Response(status_code=204)

    async def _ttl(self, request: Request) -> Response:
        seconds = (await read_json(request, requests.TimeToLive)).ttl_seconds
        await asyncio.to_thread(self.service.store.set_ttl, _path_of(request), seconds)
        return Response(status_code=204)

    async def _urls(self, request: Request) -> Response:
        files = await asyncio.to_thread(self.service.store.files, _path_of(request))
        path = request.url.path.removesuffix("/external_weights_urls") + "/files/"
        urls, expires = {}, 0
        for name in sorted(files):
            query, expires = self._signer.query(path + name)
            urls[name] = str(request.url.replace(path=quote(path + name), query=query))
        return JSONResponse({"urls": urls, "expires": datetime.datetime.fromtimestamp(expires, datetime.UTC).isoformat()})

    async def _file(self, request: Request) -> Response:
        files = await asyncio.to_thread(self.service.store.files, _path_of(request))
        file = files.get(request.path_params["file"])
        if file is None:
            raise Refused("expected a file of the checkpoint", 404)
        return FileResponse(file)

    # Samplers.

    async def _create_sampling_session(self, request: Request) -> Response:
        sampler = await self.service.create_sampling_session(await read_json(request, requests.CreateSamplingSession))
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler})

    async def _join_sampling_session(self, request: Request) -> Response:
        joining = await read_json(request, requests.OfSamplingSession)
        self.service.check_open()
        sampler = self.service.sampler(joining.sampling_session_id)
        sampler.clients += 1
        return JSONResponse({"type": "join_sampling_session", "client_counter": sampler.clients})

    async def _get_sampler(self, request: Request) -> Response:
        sampler = self.service.sampler(request.path_params["sampler"])
        return JSONResponse({"sampler_id": sampler.sampler_id, "base_model": sampler.worker.name,
                             "model_path": sampler.model_path})  # fmt: skip

    async def _sample(self, request: Request) -> Response:
        body = await read_body(request, bodies.SAMPLE_BODY_BYTES)
        self.service.futures.check_room(len(body))
        return self._promise(self.service.sample(await apart(body, lambda body: parsed(body, requests.Sample))), body)

    # Futures.

    async def _retrieve(self, request: Request) -> Response:
        asked = await read_json(request, requests.RetrieveFuture)
        future = self.service.future(asked.request_id)
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
        return JSONResponse(await self.service.completions(await read_json(request, requests.RetrieveFutures)))

    async def _cancel(self, request: Request) -> Response:
        self.service.cancel((await read_json(request, requests.CancelFuture)).request_id)
        return Response(status_code=204)


def _answering(answer: dict[str, Any]) -> Handler:
    """A handler that gives every request this answer."""
    async def handle(request: Request) -> Response:
        await read_body(request)
        return JSONResponse(answer)

    return handle


def _answer_to(error: Exception) -> tuple[int, str]:
    """The status and text for a request that raised an error."""
    if isinstance(error, Refused):
        return error.status, str(error)
    if isinstance(error, InputError):
        return 400, str(error)
    if isinstance(error, OSError) and error.errno in disk.FULL:
        return 507, "the disk of --state is full: make room there, then send the request again"
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return 503, "the server has no file descriptors left: send the request again later, or raise `ulimit -n`"
    if isinstance(error, MemoryError):
        return 503, "the server has no memory left for this request: send less at a time, or send it again later"
    return 500, f"the server failed ({type(error).__name__}); its log says where"


def _path_of(request: Request) -> CheckpointPath:
    given = request.path_params
    return CheckpointPath.of(given["run"], f"{given['kind']}/{given['name']}")
