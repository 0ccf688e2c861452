# SPDX-License-Identifier: Apache-2.0
"""python -m espalier.publish against stand-ins for vLLM 0.33.0 and SGLang 0.5.23 (vllm_stand_in.py, sglang_stand_in.py)."""

import http.client
import http.server
import json
import shutil
import subprocess
import sys
import threading
import time
import urllib.request

import pytest

from conftest import REPOSITORY
from espalier.publish import __main__ as publish, adapter_name, kinds, server as client
from http_stub import JsonHandler
from sampler_stand_in import CLOSE
from sglang_stand_in import SglangServer
from test_faults import checkpoint, data, flags, last_of_each, saved_steps  # noqa: F401
from vllm_stand_in import VllmServer

KINDS = ["vllm", "sglang"]
STAND_INS = {"vllm": VllmServer, "sglang": SglangServer}
SEQUENCE = {"vllm": ["/pause?mode=keep", "/collective_rpc", "/update_weight_version", "/reset_prefix_cache?reset_external=true", "/resume"],
            "sglang": ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]}  # fmt: skip
FIRST = {"vllm": ["/model_info", "/health"], "sglang": ["/model_info", "/model_info"]}
LOAD = {"vllm": "/v1/load_lora_adapter", "sglang": "/load_lora_adapter"}
UNLOAD = {"vllm": "/v1/unload_lora_adapter", "sglang": "/unload_lora_adapter"}


@pytest.fixture(scope="module")
def espalier(espalier):
    return lambda *arguments, **options: espalier(*last_of_each(arguments), **options)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "python"))
    for name in ("VLLM_API_KEY", "SGLANG_API_KEY", "SGLANG_ADMIN_API_KEY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def started():
    """Makes stand-ins, which end with the test."""
    servers = []

    def start(kind, **options):
        servers.append(STAND_INS[kind](**options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture(params=KINDS)
def server(started, request):
    server = started(request.param)
    server.kind = request.param
    return server


def weights_in(folder, content):
    """A published folder of full weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)
    return folder


def adapter_in(folder, content):
    """A published folder of an adapter, in place of what was there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder


def run(url, folder, *words):
    return subprocess.run([sys.executable, "-m", "espalier.publish", *words, url, str(folder)], capture_output=True, text=True)


def published(server, folder, *words):
    """The name that the program says it has loaded."""
    done = run(server.url, folder, *words)
    assert done.returncode == 0 and not done.stderr, done.stderr
    start, name = done.stdout.rstrip("\n").split(": loaded ")
    assert start == server.url
    return name


def refused(url, folder, *words):
    """The one line of an error, after the URL."""
    done = run(url, folder, "--wait", "0", *words)
    assert done.returncode == 1 and not done.stdout, (done.stdout, done.stderr)
    line, rest = done.stderr.split("\n", 1)
    assert not rest and line.startswith(f"{url}: "), done.stderr
    return line.removeprefix(f"{url}: ")


def sampled(server, adapter=None, tokens=1):
    """What a request was computed with: {"prefix": weights, "tokens": weights of each}."""
    if isinstance(server, VllmServer):
        path, body = "/v1/completions", {"model": adapter or "base", "prompt": "A", "max_tokens": tokens}
    else:
        path, body = "/generate", {"text": "A", "sampling_params": {"max_new_tokens": tokens}, "lora_path": adapter}
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


# ---- Runs that publish ---------------------------------------------------------------------------------------------


def publishing(server, folder, *more):
    return ["--publish", folder, "--publish-command", f"{sys.executable} -m espalier.publish {server.url}", *more]


def test_a_server_has_the_full_weights_of_a_run(espalier, flags, server, tmp_path):
    espalier("train", *flags, "--out", tmp_path / "run", "--steps", 3, *publishing(server, tmp_path / "out", "--publish-every", 2))
    assert server.weights == (checkpoint(tmp_path / "run", 3) / "model.safetensors").read_bytes()
    assert server.version == "step_3" and not server.paused
    assert server.requests == 2 * (FIRST[server.kind] + SEQUENCE[server.kind])
    paths = [each for _, body in server.bodies for each in (body.get("model_path"), body.get("kwargs", {}).get("weights_path")) if each]
    assert paths == [str(tmp_path / "out/step_2"), str(tmp_path / "out/step_3")]


def test_a_server_has_the_adapters_of_a_run_and_forgets_old_ones(espalier, flags, server, tmp_path):
    words = ["train", *flags, "--out", tmp_path / "run", "--lora-rank", 2, *publishing(server, tmp_path / "out")]
    espalier(*words, "--steps", 5)
    weights = lambda step: (checkpoint(tmp_path / "run", step) / "adapter_model.safetensors").read_bytes()
    there = {adapter_name(tmp_path / f"out/step_{step}"): weights(step) for step in (4, 5)}
    assert {name: each.weights for name, each in server.adapters.items()} == there
    assert server.requests.count(LOAD[server.kind]) == 5 and server.requests.count(UNLOAD[server.kind]) == 3
    # A run that has lost its last steps publishes the same adapter again, which is there.
    shutil.rmtree(checkpoint(tmp_path / "run", 5))
    server.requests.clear()
    espalier(*words, "--steps", 5, "--resume")
    assert {name: each.weights for name, each in server.adapters.items()} == there
    assert server.requests == [*FIRST[server.kind], "/v1/models"]


def test_a_server_that_fails_is_one_warning_and_ends_no_run(espalier, flags, server, tmp_path):
    warning = "could not be published: --publish-command: "
    server.fails = {SEQUENCE[server.kind][1]: (400, {"detail": "Missing\n'method'"})}
    words = ["train", *flags, "--steps", 2]
    said = espalier(*words, "--out", tmp_path / "one", *publishing(server, tmp_path / "out")).stderr
    assert said.count(warning) == 2 and said.count("expected status 200, received 400 Bad Request") == 2, said
    assert said.count("Missing\\n'method'") == 2 and not server.paused  # requests go on
    assert saved_steps(tmp_path / "one") == [1, 2]


# ---- Names of adapters ---------------------------------------------------------------------------------------------


def test_another_run_in_the_same_folder_reuses_no_prefix(server, tmp_path):
    first = published(server, adapter_in(tmp_path / "out/step_1", b"one"))
    assert sampled(server, first) == {"prefix": "one", "tokens": ["one"]}
    second = published(server, adapter_in(tmp_path / "out/step_1", b"two"))
    assert sampled(server, second) == {"prefix": "two", "tokens": ["two"]}
    assert list(server.adapters) == [second] and second.startswith("out-step_1-")


def test_under_one_name_vllm_reuses_the_prefixes_of_another_run(started, tmp_path):
    """What the names are for: unloading an adapter leaves its blocks."""
    server = started("vllm")
    folder = tmp_path / "out/step_1"
    for content in (b"one", b"two"):
        adapter_in(folder, content)
        server.post("/v1/load_lora_adapter", {"lora_name": "out-step_1", "lora_path": str(folder)})
        answer = sampled(server, "out-step_1")
        server.post("/v1/unload_lora_adapter", {"lora_name": "out-step_1"})
    assert answer == {"prefix": "one", "tokens": ["two"]}


def test_names_are_those_of_path_and_content(tmp_path):
    name = adapter_name(adapter_in(tmp_path / "a/out/step_1", b"one"))
    assert name == adapter_name(str(tmp_path / "a/out/../out/step_1"))
    names = {name, adapter_name(adapter_in(tmp_path / "b/out/step_1", b"one")), adapter_name(adapter_in(tmp_path / "a/out/step_2", b"one"))}
    (tmp_path / "a/out/step_1/manifest.json").touch()
    assert adapter_name(tmp_path / "a/out/step_1") == name
    (tmp_path / "a/out/step_1/adapter_config.json").write_text('{"lora_alpha": 1}')
    names.add(adapter_name(tmp_path / "a/out/step_1"))
    assert len(names) == 4 and all(each.startswith("out-step_") for each in names)


def test_adapters_of_others_stay(server, tmp_path):
    """Those of a run in a folder with the same last name, and those that somebody has loaded by hand."""
    other = published(server, adapter_in(tmp_path / "b/out/step_1", b"other"))
    mine = adapter_in(tmp_path / "a/out/step_1", b"mine")
    by_hand = [("mine", mine), ("out-step_1", tmp_path / "b/out/step_1"), ("out-step_9", mine)]
    for name, path in by_hand:
        server.post(LOAD[server.kind], {"lora_name": name, "lora_path": str(path)})
    shutil.rmtree(tmp_path / "b/out/step_1")
    name = published(server, mine)
    assert set(server.adapters) == {other, name, "mine", "out-step_1", "out-step_9"}


def test_an_adapter_under_a_name_of_earlier_versions_is_unloaded(server, tmp_path):
    folder = adapter_in(tmp_path / "out/step_1", b"one")
    server.post(LOAD[server.kind], {"lora_name": "out-step_1", "lora_path": str(folder)})
    assert [published(server, folder)] == list(server.adapters)


@pytest.mark.parametrize("at", ["load", "unload", "list"])
def test_a_failure_with_adapters_is_named(server, tmp_path, at):
    published(server, adapter_in(tmp_path / "out/step_1", b"one"))
    shutil.rmtree(tmp_path / "out/step_1")
    folder = adapter_in(tmp_path / "out/step_2", b"two")
    path = {"load": LOAD[server.kind], "unload": UNLOAD[server.kind], "list": "/v1/models"}[at]
    server.fails = {path: (200, {"success": False, "error_message": "no room"})}
    if at == "list":
        assert refused(server.url, folder) == (
            "/v1/models: expected a list of models as data, received {'success': False, 'error_message': 'no room'}")  # fmt: skip
    else:
        assert refused(server.url, folder) == (
            f'{path}: expected {{"success": true}}, received {{"success": false, "error_message": "no room"}}')  # fmt: skip
    server.fails = {path: (500, "Internal Server Error")}
    assert refused(server.url, folder) == f"{path}: expected status 200, received 500 Internal Server Error: Internal Server Error"


def test_sglang_says_why_it_takes_no_adapter(started, tmp_path):
    folder = adapter_in(tmp_path / "out/step_1", b"one")
    said = refused(started("sglang", enable_lora=False).url, folder)
    assert said.startswith("/load_lora_adapter: expected status 200, received 400 Bad Request: ") and "LoRA is not enabled" in said
    assert "500 Internal Server Error" in refused(started("sglang", data_parallel=2).url, folder)


def test_an_adapter_whose_folder_the_server_does_not_see(server, tmp_path):
    folder = adapter_in(tmp_path / "out/step_1", b"one")
    (folder / "adapter_model.safetensors").unlink()
    assert f"{LOAD[server.kind]}: expected status 200, received 40" in refused(server.url, folder)


# ---- Requests in flight --------------------------------------------------------------------------------------------


class InFlight:
    """A request that is being answered with tokens of the old weights."""

    def __init__(self, server, tokens=400):
        self.answer, self.thread = None, threading.Thread(target=self.run, args=(server, tokens))
        self.thread.start()
        while not (server.running and server.running[0].tokens):
            time.sleep(0.01)

    def run(self, server, tokens):
        self.answer = sampled(server, tokens=tokens)

    def result(self):
        self.thread.join(60)
        return self.answer


def test_requests_in_flight_go_on_with_the_new_weights(server, tmp_path):
    request = InFlight(server)
    published(server, weights_in(tmp_path / "out/step_1", b"new"))
    answer = request.result()
    assert answer["tokens"][0] == "base" and answer["tokens"][-1] == "new" and answer["prefix"] == "new"
    assert server.cached == {None: b"new"}


def test_sglang_has_to_retract_requests(started, tmp_path, monkeypatch):
    """Were they paused in place, their keys and values would stay, and the server says so."""
    server = started("sglang")
    monkeypatch.setattr(client, "WAIT_SECONDS", 0)
    in_place = kinds.Kind(**{**vars(kinds.SGLANG), "pause": ("/pause_generation", {"mode": "in_place"})})
    request = InFlight(server)
    with pytest.raises(client.Refused, match="Weights were updated, but the cache was not flushed"):
        publish.publish(client.Server(server.url, in_place, wait=0), weights_in(tmp_path / "out/step_1", b"new"))
    assert not server.paused and request.result()["prefix"] == "base"


def test_a_cache_that_is_copied_meanwhile_is_emptied_later(server, tmp_path):
    """Copies go on with requests alone, so these have to go on in between."""
    server.busy = 2
    server.cached = {None: b"base"}
    published(server, weights_in(tmp_path / "out/step_1", b"new"), "--wait", "30")
    assert sampled(server) == {"prefix": "new", "tokens": ["new"]} and not server.paused
    pause, *middle, resume = SEQUENCE[server.kind]
    whole = [pause, *middle, resume]
    failed = [pause, resume] if server.kind == "vllm" else whole
    assert server.requests[:-1] == FIRST[server.kind] + failed + failed + whole


def test_vllm_that_has_not_emptied_its_cache_is_asked_again(started, tmp_path):
    server = started("vllm")
    server.refusals = 2
    published(server, weights_in(tmp_path / "out/step_1", b"new"))
    pause, rpc, version, reset, resume = SEQUENCE["vllm"]
    assert server.requests[2:] == [pause, rpc, version, reset, resume, pause, reset, resume, pause, reset, resume]  # loaded once


def test_a_cache_that_keeps_old_prefixes_is_a_failure(server, tmp_path):
    folder = weights_in(tmp_path / "out/step_1", b"new")
    server.busy = 1000
    said = refused(server.url, folder, "--wait", "1")
    assert ("Failed to reset KV cache" if server.kind == "vllm" else "the cache was not flushed") in said and not server.paused
    assert server.requests.count(SEQUENCE[server.kind][0]) in (2, 3, 4)
    server.busy, server.refusals = 0, 1000
    if server.kind == "vllm":
        assert refused(server.url, folder) == '/reset_prefix_cache: expected {"success": true}, received {"success": false}'
        assert not server.paused


# ---- Failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [(500, {"detail": "no\nroom"}), (200, {"success": False, "message": "no\nroom"}), CLOSE])
@pytest.mark.parametrize("kind, at", [(kind, at) for kind in KINDS for at in range(len(SEQUENCE[kind]))])
def test_a_failure_of_any_request_is_named_and_requests_go_on(started, tmp_path, kind, at, fault):
    server, sequence, folder = started(kind), SEQUENCE[kind], weights_in(tmp_path / "out/step_1", b"new")
    path = sequence[at]
    server.fails = {path: fault}
    received = {500: 'status 200, received 500 Internal Server Error: {"detail": "no\\nroom"}',
                200: '{"success": true}, received {"success": false, "message": "no\\nroom"}',
                "c": "an answer, received Remote end closed connection without response"}[fault[0]]  # fmt: skip
    assert refused(server.url, folder) == f"{path.partition('?')[0]}: expected {received}"
    assert server.requests == FIRST[kind] + sequence[: at + 1] + ([] if at == len(sequence) - 1 else sequence[-1:])
    assert server.paused == (at == len(sequence) - 1)  # where the server does not go on itself
    server.fails = {}
    assert published(server, folder) == "step_1" and not server.paused and server.weights == b"new"


def test_a_server_that_cannot_go_on_at_once_is_asked_again(server, tmp_path):
    """Else it would rest until the next publication."""
    resume, answers = SEQUENCE[server.kind][-1], [(503, {"detail": "busy"}), CLOSE]

    def before(path):
        server.fails = {path: answers.pop()} if path == resume and answers else {}

    server.before = before
    published(server, weights_in(tmp_path / "out/step_1", b"new"))
    assert not server.paused and server.requests.count(resume) == 3


def test_the_first_failure_is_named_and_a_folder_in_full(server, tmp_path):
    """From another folder, and where the server cannot go on either."""
    weights_in(tmp_path / "out/step_1", b"weights")
    update = SEQUENCE[server.kind][1]
    run = lambda: subprocess.run([sys.executable, "-m", "espalier.publish", "--wait", "0", server.url, "out/step_1"], cwd=tmp_path,
                                 capture_output=True, text=True)  # fmt: skip
    assert run().returncode == 0 and server.weights == b"weights"
    server.fails = {update: (500, {"detail": "no room"}), SEQUENCE[server.kind][-1]: (503, {"detail": "gone"})}
    failed = run()
    assert failed.returncode == 1 and failed.stderr == (
        f'{server.url}: {update}: expected status 200, received 500 Internal Server Error: {{"detail": "no room"}}\n')


def test_what_waiting_does_not_mend_is_reported_at_once(server, tmp_path):
    update = SEQUENCE[server.kind][1]
    server.fails = {update: (400, {"success": False, "message": "Failed to get weights iterator"})}
    done = run(server.url, weights_in(tmp_path / "out/step_1", b"new"), "--wait", "5")
    assert done.returncode == 1 and "Failed to get weights iterator" in done.stderr and server.requests.count(update) == 1


def test_a_server_that_goes_away_in_the_middle(started, tmp_path):
    for kind in KINDS:
        server = started(kind)
        server.before = lambda path, server=server, update=SEQUENCE[kind][1]: path == update and server.socket.close()
        server.fails = {SEQUENCE[kind][1]: CLOSE}
        assert refused(server.url, weights_in(tmp_path / "out/step_1", b"new")) == (
            f"{SEQUENCE[kind][1]}: expected an answer, received Remote end closed connection without response")


def test_nobody_answers(tmp_path):
    server = http.server.HTTPServer(("127.0.0.1", 0), JsonHandler)
    url = f"http://127.0.0.1:{server.server_address[1]}"
    server.server_close()
    folder = weights_in(tmp_path / "out/step_1", b"new")
    for words in ([], ["--server", "vllm"], ["--server", "sglang"]):
        assert "expected an answer, received [Errno 111] Connection refused" in refused(url, folder, *words)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_server_that_starts_is_waited_for(server, tmp_path, is_known):
    starting = [(503, None)] * 3

    def before(path):
        server.fails = {path: starting.pop()} if starting else {}

    server.before = before
    published(server, weights_in(tmp_path / "out/step_1", b"new"), *(["--server", server.kind] if is_known else []))
    assert not starting and server.requests[3:] == FIRST[server.kind][is_known:] + SEQUENCE[server.kind]


def test_what_is_no_folder_is_refused_before_a_request_that_changes_something(server, tmp_path):
    assert refused(server.url, tmp_path / "none") == (
        f"expected a folder of published weights, received {tmp_path / 'none'}, which is none")
    assert not server.bodies
    assert refused(server.url, weights_in(tmp_path / "out/step_1", b""), "--weight-transfer", "nccl") == {
        "vllm": "cannot read " + str(tmp_path / "out/step_1/model.safetensors") + ": Error while deserializing header: header too small",
        "sglang": "--weight-transfer nccl: expected a vLLM server, received SGLang, which reads folders"}[server.kind]  # fmt: skip


# ---- Answers -------------------------------------------------------------------------------------------------------


class Anything(JsonHandler):
    """`bytes` of the server as they are, for every request."""

    def do_GET(self):
        self.wfile.write(self.server.bytes)
        self.close_connection = True


@pytest.fixture
def answering():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Anything)
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def body(content, status="200 OK"):
    return f"HTTP/1.0 {status}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


@pytest.mark.parametrize("content, received", [
    (body(b"<html>\x1b[31m\x07"), "JSON, received <html>?[31m?"),
    (body(b"[" * 100_000), "JSON, received " + "[" * 300),
    (body(b"[1]"), "a list of models as data, received [1]"),
    (body(b'{"data": [{"id": 1}]}'), "a list of models as data, received {'data': [{'id': 1}]}"),
    (body(b"")[:-4] + b"\r\n\r\n", "a list of models as data, received None"),
    (body(b"no\nroom\x1b[31m", "500 \x1b[1mno"), "status 200, received 500 ?[1mno: no room?[31m"),
    (body(b"{}")[:-1], "an answer, received a part of it"),
    (b"", "an answer, received Remote end closed connection without response"),
    (b"SSH-2.0\r\n", "an answer, received SSH-2.0"),
    (b"HTTP/1.0 200 OK\r\n\r\n" + b" " * 17 * 2**20, "an answer, received more than 16 MiB"),
])  # fmt: skip
def test_odd_answers_are_one_line(answering, content, received):
    answering.bytes = content
    with pytest.raises(client.FAILURES) as raised:
        publish._models(client.Server(answering.url, kinds.VLLM, wait=0))
    assert str(raised.value) == f"/v1/models: expected {received}"


def test_a_slow_answer_has_an_end(answering, monkeypatch):
    monkeypatch.setattr(client, "ALIVE_SECONDS", 0.3)
    answering.RequestHandlerClass = type("Slow", (Anything,), {"do_GET": lambda self: [
        (self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n" if first else b" "), time.sleep(0.1)) for first in [True] + [False] * 10]})  # fmt: skip
    with pytest.raises(OSError, match="/v1/models: expected an answer within 0.3 seconds, received none"):
        publish._models(client.Server(answering.url, kinds.VLLM, wait=0))
    answering.RequestHandlerClass = type("Silent", (Anything,), {"do_GET": lambda self: time.sleep(1)})
    with pytest.raises(OSError, match="/v1/models: expected an answer within 0.3 seconds, received none"):
        publish._models(client.Server(answering.url, kinds.VLLM, wait=0))


# ---- Kinds and keys ------------------------------------------------------------------------------------------------


def test_the_kind_of_a_server_is_seen(started, answering):
    assert client.kind_of(started("sglang").url) is kinds.SGLANG
    assert client.kind_of(started("sglang", key="a key").url) is kinds.SGLANG
    assert client.kind_of(started("vllm").url) is kinds.VLLM
    assert client.kind_of(started("vllm", key="a key").url) is kinds.VLLM
    for content in (b"{}", b"", b"[]", b"<html>"):
        answering.bytes = body(content)
        assert client.kind_of(answering.url) is kinds.VLLM


KEYS = {"VLLM_API_KEY": "of vllm", "SGLANG_API_KEY": "of sglang"}


@pytest.mark.parametrize("auto", [True, False])
@pytest.mark.parametrize("adapter", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_server_sees_its_key_alone(started, tmp_path, monkeypatch, kind, adapter, auto):
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    server = started(kind, key=f"of {kind}")
    folder = (adapter_in if adapter else weights_in)(tmp_path / "out/step_1", b"new")
    published(server, folder, *([] if auto else ["--server", kind]))
    probe = [("/model_info", None)] if auto else []
    assert server.keys[: len(probe)] == probe and {key for _, key in server.keys[len(probe) :]} == {f"of {kind}"}
    monkeypatch.setenv(f"{kind.upper()}_API_KEY", "another")
    if kind == "sglang" or adapter:  # what vLLM does with full weights takes no key
        assert 'received 401 Unauthorized: {"error": "Unauthorized"}' in refused(server.url, folder)


@pytest.mark.parametrize("adapter", [True, False])
def test_sglang_with_a_key_for_changes(started, tmp_path, monkeypatch, adapter):
    monkeypatch.setenv("SGLANG_API_KEY", "for all")
    monkeypatch.setenv("SGLANG_ADMIN_API_KEY", "for changes")
    folder = (adapter_in if adapter else weights_in)(tmp_path / "out/step_1", b"new")
    published(started("sglang", key="for all", admin_key="for changes"), folder)
    monkeypatch.delenv("SGLANG_API_KEY")
    published(started("sglang", admin_key="for changes"), folder)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("kind", KINDS)
def test_redirects_are_not_followed(started, tmp_path, monkeypatch, kind, status):
    """They would take the key elsewhere, and make a GET of a POST."""
    monkeypatch.setenv(f"{kind.upper()}_API_KEY", "a key")
    other = started(kind)

    class Redirects(JsonHandler):
        def do_GET(self):
            self.send_response(status)
            self.send_header("Location", other.url + self.path)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_GET

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Redirects)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    folder = weights_in(tmp_path / "out/step_1", b"new")
    for words in (["--server", kind], []):
        phrase = f"{status} {http.client.responses[status]}"
        said = refused(url, folder, *words)
        assert f"expected status 200, received {phrase} to {other.url}" in said and said.endswith(", which is not followed")
    with pytest.raises(client.Refused, match="which is not followed"):
        client.Server(url, kinds.KINDS[kind], wait=0).post("/pause")
    server.shutdown()
    server.server_close()
    assert other.requests == []


@pytest.mark.parametrize("url", ["ftp://sampler", "sampler:8000", "http://", "http://name:secret@sampler", "http://sampler?key=1", "http://s#a"])
def test_urls_that_are_none(tmp_path, url):
    failed = run(url, tmp_path)
    assert failed.returncode == 1 and "expected a URL such as http://HOST:PORT" in failed.stderr and "secret" not in failed.stderr


def test_help_teaches():
    said = subprocess.run([sys.executable, "-m", "espalier.publish", "--help"], capture_output=True, text=True, check=True).stdout
    for words in ("--server {vllm,sglang,auto}", "SGLANG_API_KEY", "VLLM_API_KEY", "--publish-command", "exit status is 1"):
        assert words in said
