# SPDX-License-Identifier: Apache-2.0
"""A mutator of `espalier serve`: it sends every route of the application requests that no honest client sends."""

import asyncio
import random
import threading
from collections import Counter, deque
from contextlib import ExitStack
from dataclasses import dataclass
from unittest import mock

import httpx

from espalier.server import app as served
from espalier.server import bodies, openai_requests, wire
from espalier.server.app import App
from espalier.server.errors import Refused
from espalier.server.service import Service
from espalier.server.store import Store

from server_requests import FILE, PROTOBUF, Generator

SPOOL = "uploads"  # part of the path of a route whose body is a file
# Routes with a method that writes whose body is not read as JSON or protobuf.
WITHOUT_FIELDS = {
    "POST /api/v1/client/config", "POST /api/v1/client/dynamic_config", "POST /api/v1/telemetry",
    "POST /api/v1/create_custom_loss", "POST /api/v1/sessions/{session}/finish", "POST /api/v1/sessions/search", "PUT /api/v1/sessions/{session}/project",
    "POST /api/v1/training_runs/{run}/checkpoints/{kind}/{name}/publish",
    "DELETE /api/v1/training_runs/{run}/checkpoints/{kind}/{name}/publish",
    "DELETE /api/v1/training_runs/{run}/checkpoints/{kind}/{name}",
    *(f"{method} {prefix}/{{path:path}}" for method in ("POST", "PUT", "PATCH", "DELETE")
      for prefix in ("/v1", "/oai/api/v1"))}  # fmt: skip
PATH_FIELDS = {"session", "sampler", "run", "kind", "name", "file:path", "file", "upload", "path:path", "model:path"}
# Nothing of a request can be wrong for these, and nothing right for those.
NEVER_REFUSED = {"GET /api/v1/get_server_capabilities", "GET /metrics", "GET /v1/models", "GET /oai/api/v1/models"}
HOSTED_ONLY = ("publish", "search", "project", "path:path", "custom")
NOT_SERVED = {route for route in WITHOUT_FIELDS if any(word in route for word in HOSTED_ONLY)} | {
    "GET /v1/{path:path}", "GET /oai/api/v1/{path:path}", "GET /api/v1/sessions/{session}/trace_export"}  # fmt: skip
# What a client waits for, so that the mutator goes away instead.
WAITS = ("retrieve_future", "completions")
ENDINGS = ("unload_model", "finish")  # routes that come last in a round, as others need what they end
SECONDS = 300  # until a request that waits for nothing is answered
DOCUMENTED = {503: ("no file descriptors left", "no memory left", "connections")}  # statuses of faults, and what they say


@dataclass(frozen=True)
class RouteReader:
    """One route, and what it reads: a request of JSON, PROTOBUF, FILE, or None."""

    method: str
    path: str
    kind: object

    @property
    def name(self):
        return f"{self.method} {self.path}"

    @property
    def fields(self):
        """The parts of its path that a client chooses."""
        return [part.split("}")[0] for part in self.path.split("{")[1:]]


class Fault(Exception):
    """An answer of the server that is its fault."""


def routes(folder):
    """All routes of the application. What each reads is learnt by sending it a body. folder: for an empty state."""
    with mock.patch("espalier.server.service.Snapshots"):
        app = App(Service({}, Store(folder)))
    application = app.door("").app
    return [RouteReader(method, route.path, asyncio.run(_kind(application, method, route.path)))
            for route in application.routes for method in sorted(route.methods - {"HEAD"})]  # fmt: skip


async def _kind(application, method, path):
    kinds = [FILE] if SPOOL in path.split("/") else []

    def record(kind):
        kinds.append(kind)
        raise Refused("the test reads no body")

    with ExitStack() as stack:
        for place in (bodies, served):
            stack.enter_context(mock.patch.object(place, "parsed", lambda body, kind: record(kind)))
        stack.enter_context(mock.patch.object(openai_requests, "read", lambda body, kind: record(kind)))
        stack.enter_context(mock.patch.object(wire, "forward_backward_request", lambda body: record(PROTOBUF)))
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await client.request(method, "".join(part.split("}")[-1] if number == 0 else "x" + part.split("}")[-1]
                                                 for number, part in enumerate(path.split("{"))), content=b"{}")  # fmt: skip
    return kinds[0] if kinds else None


def check_generators(all_routes):
    """Raises where a route is not known to the mutator."""
    for route in all_routes:
        assert set(route.fields) <= PATH_FIELDS, f"{route.name}: the mutator has no values for its path"
        writes = route.method != "GET"
        assert not writes or (route.kind is None) == (route.name in WITHOUT_FIELDS), (
            f"{route.name}: reads {route.kind}; WITHOUT_FIELDS says otherwise")  # fmt: skip
    names = {route.name for route in all_routes}
    assert names >= WITHOUT_FIELDS | NEVER_REFUSED | NOT_SERVED, "a route is no more"


class Party:
    """A client of one key with sessions, models and such, and ids of others, which it should not use. theirs: gives these; adapter:
    files of an upload, by name."""

    def __init__(self, address, key, seed, theirs, adapter):
        self.random = random.Random(seed)
        self.theirs = theirs
        self.adapter = adapter
        self.address, self.key = address, key
        self.connect()
        self.count = 0
        self.session = self.sampler = ""
        self.models, self.paths, self.samplers, self.uploads = [], [], [], []
        self.sent = "none"  # an upload
        self.numbers = {}  # of the operations of each model
        self.promises = deque(maxlen=400)

    def connect(self):
        self.http = httpx.Client(base_url=self.address, headers={"X-API-Key": self.key}, timeout=SECONDS)

    def call(self, method, path, body=None, **options):
        """A request that is answered as an honest client's."""
        answer = self.http.request(method, path if path.startswith("/") else f"/api/v1/{path}", json=body, **options)
        assert answer.status_code in (200, 204), f"{method} {path} {body}: {answer.status_code} {answer.text[:500]}"
        return answer.json() if answer.content else {}

    def result(self, promise):
        answer = {}
        while not answer or answer.get("type") == "try_again":
            reply = self.http.post("/api/v1/retrieve_future", json={"request_id": promise["request_id"]})
            assert reply.status_code in (200, 408), reply.text[:500]
            answer = reply.json() if "json" in reply.headers["content-type"] else {"type": "protobuf"}
        return answer

    def next(self):
        self.count += 1
        return self.count

    def number(self, model):
        """The first one that no operation of the model has."""
        return next(number for number in range(1, 1 << 30) if number not in self.numbers.setdefault(model, set()))

    def finish(self):
        """Ends its session, and with it all that waits for what never comes. Raises where a result blames the server."""
        if not self.session:
            return
        self.http.post(f"/api/v1/sessions/{self.session}/finish", json={})
        for request_id in self.promises:
            reply = self.http.post("/api/v1/retrieve_future", json={"request_id": request_id})
            faulty = "json" in reply.headers["content-type"] and reply.json().get("category") == "server"
            assert not faulty, f"{request_id}: {reply.text[:1000]}"
        self.promises.clear()

    def forget(self):
        """All that it has, as the server was started again."""
        self.session = ""
        for each in (self.models, self.paths, self.samplers, self.uploads, self.promises):
            each.clear()

    def renew(self):
        """Takes a new session with models, samplers and checkpoints, as mutated requests end or delete what there is."""
        self.finish()
        self.session = self.call("POST", "create_session", {})["session_id"]
        self.samplers, self.numbers, promises = [], {}, []
        made = [self.call("POST", "create_model", {"session_id": self.session, "model_seq_id": self.next(), "base_model": "tiny",
                                                   "lora_config": {"rank": 2, "seed": 1}}) for _ in range(2)]  # fmt: skip
        self.models = [self.result(promise)["model_id"] for promise in made]
        made = self.call("POST", "create_sampling_session", {"session_id": self.session, "sampling_session_seq_id": self.next(),
                                                             "base_model": "tiny"})  # fmt: skip
        self.samplers.append(made["sampling_session_id"])
        for route in ("save_weights", "save_weights", "save_weights_for_sampler", "save_weights_external"):
            body = {"model_id": self.models[0], "seq_id": self.number(self.models[0]), "path": f"c{self.next()}"}
            self.numbers[self.models[0]].add(body["seq_id"])
            promises.append(self.call("POST", route, body))
        self.paths += [self.result(promise)["path"] for promise in promises]
        for path in self.paths[:-20]:
            run, checkpoint = path.removeprefix("tinker://").split("/", 1)
            self.http.delete(f"/api/v1/training_runs/{run}/checkpoints/{checkpoint}")
        del self.paths[:-20]

    def upload(self):
        """The id of an upload whose files were sent, the one of before if that is not finished."""
        for _ in range(2):
            answers = [self.http.put(f"/api/v1/uploads/{self.sent}/{name}", content=data) for name, data in self.adapter.items()]
            if all(answer.status_code == 204 for answer in answers):
                break
            body = {"base_model": "tiny", "lora_config": {"rank": 2}}
            start = self.http.post("/api/v1/external_weights_upload_start", json=body)
            assert start.status_code in (200, 429), start.text[:500]  # 429: mutated requests began as many as may be open
            self.sent = start.json().get("upload_id", "none")
        return self.sent

    def learn(self, answer):
        """Ids that an answer to it has."""
        if not isinstance(answer, dict):
            return
        if isinstance(request_id := answer.get("request_id"), str) and "type" not in answer:
            self.promises.append(request_id)
            model, _, number = request_id.rpartition(":")
            if number.isdecimal() and model in self.numbers:
                self.numbers[model].add(int(number))
        for name, pool in (("sampling_session_id", self.samplers), ("tinker_path", self.paths), ("upload_id", self.uploads)):
            if isinstance(answer.get(name), str):
                pool.append(answer[name])


class Mutator(threading.Thread):
    """Sends requests of one party to every route in turn, until there were `count` that are mutated, or `stop` is called. covers_all:
    begins with a round of valid requests, which each route accepts, and a round of requests that each route refuses.

    Of the answers none may be a fault of the server that is not documented. While `server` is killed, nothing is answered.
    """

    def __init__(self, server, all_routes, party, count, valid_share, *, covers_all=True):
        super().__init__(daemon=True)
        self.server, self.party, self.count, self.valid_share = server, party, count, valid_share
        self.routes = sorted(all_routes, key=lambda route: [route.path.endswith(ending) for ending in ENDINGS[::-1]])
        self.rounds = 0 if covers_all else 2
        self.mutated = 0
        self.statuses = {"valid": Counter(), "mutated": Counter()}  # by route and status; "left": the mutator went away
        self.error = None
        self._stops = threading.Event()

    def stop(self):
        self._stops.set()
        self.join()
        self.check()

    def check(self):
        if self.error is not None:
            raise self.error

    def run(self):
        try:
            while self.mutated < self.count and not self._stops.is_set():
                self._live()
        except BaseException as error:
            self.error = error

    def _live(self):
        """One life of the server."""
        life = self.server.life
        assert self.server.listens.wait(SECONDS), "the server does not start"
        try:
            self.party.forget()
            while self.mutated < self.count and not self._stops.is_set():
                self._round()
            self.party.finish()
        except (httpx.TransportError, AssertionError):
            if self.server.life == life:
                raise

    def _round(self):
        """One request to each route."""
        self.party.renew()
        generator = Generator(self.party)
        for route in self.routes:
            if self.mutated >= self.count or self._stops.is_set():
                return
            if self.rounds == 1:
                attempt = generator.unfit(route)
            elif self.rounds == 0 or self.party.random.random() < self.valid_share:
                attempt = generator.valid(route)
            else:
                attempt = generator.mutated(route)
            status = self._send(route, attempt)
            self.mutated += attempt.is_mutated
            if self.rounds == 1 and route.name not in NEVER_REFUSED:
                assert 400 <= status < 500, f"expected a refusal, received {status} for\n{attempt}"
        self.rounds += 1

    def _send(self, route, attempt):
        waits = any(name in attempt.url for name in WAITS)
        try:
            answer = self.party.http.request(attempt.method, attempt.url, content=attempt.content, headers=attempt.headers,
                                             timeout=1.0 if waits else SECONDS)  # fmt: skip
        except httpx.ReadTimeout:
            assert waits, f"no answer within {SECONDS} s to\n{attempt}"
            return self._count(route, attempt, "left")
        status = answer.status_code
        self._count(route, attempt, status)
        documented = any(text in answer.text for text in DOCUMENTED.get(status, ()))
        if status >= 500 and not documented:
            raise Fault(f"{status} {answer.text[:500]}\nto {attempt}")
        if status == 200 and "json" in answer.headers.get("content-type", "") and attempt.method == "POST":
            self.party.learn(answer.json())
        return status

    def _count(self, route, attempt, status):
        self.statuses["mutated" if attempt.is_mutated else "valid"][route.name, status] += 1
        return status


def accepted_and_refused(mutators):
    """How many requests to each route were, over all mutators."""
    accepted, refused = Counter(), Counter()
    for mutator in mutators:
        for counts in mutator.statuses.values():
            for (name, status), count in counts.items():
                if status in (200, 204, 206, 408, "left"):
                    accepted[name] += count
                elif status in (400, 404, 405, 409, 410, 413, 415, 416, 422, 429):
                    refused[name] += count
    return accepted, refused
