# SPDX-License-Identifier: Apache-2.0
"""Several keys of one server: clients of one key see and change nothing of those of another."""

import asyncio

import httpx
import numpy as np
import pytest

pytest.importorskip("starlette", reason="the routes of `espalier serve`")

from espalier.server import access, requests, schema, service
from espalier.server.access import Access
from espalier.server.app import App
from espalier.server.arguments import parse_arguments
from espalier.server.service import Service
from espalier.server.store import CheckpointPath, Store

from conftest import seed_of
from engines import init_model
from servers import Local


class Callers:
    """Clients of a server without a model, one for each key."""

    def __init__(self, state):
        self.root = Service({}, Store(state))
        self.services = {"": self.root}
        for name in ("ann", "bob"):
            self.services[name] = self.root.for_key(name, Store(state / "keys" / name))
        self.apps = {name: App(each) for name, each in self.services.items()}
        self.access = Access([app.door(f"tml-{name}") for name, app in self.apps.items()], ())

    def __call__(self, name, method, path, body=None):
        async def send():
            async with httpx.AsyncClient(transport=httpx.ASGITransport(self.access), base_url="http://localhost/api/v1/") as client:
                return await client.request(method, path, json=body, headers={"X-API-Key": f"tml-{name}"})

        return asyncio.run(send())


@pytest.fixture
def callers(tmp_path):
    return Callers(tmp_path)


@pytest.mark.parametrize(("owner", "other"), [("ann", "bob"), ("ann", ""), ("", "bob")])
def test_sessions_of_another_key_are_not_there(callers, owner, other):
    session = callers(owner, "POST", "create_session", {}).json()["session_id"]
    unknown = session[:-1] + ("0" if session[-1] != "0" else "1")
    assert callers(owner, "GET", "sessions").json() == {"sessions": [session]} and callers(other, "GET", "sessions").json() == {"sessions": []}
    for method, path, body in (
            ("GET", "sessions/{}", None), ("POST", "sessions/{}/finish", {}), ("POST", "session_heartbeat", {"session_id": "{}"}),
            ("POST", "create_model", {"session_id": "{}", "model_seq_id": 0, "base_model": "tiny"}),
            ("POST", "create_sampling_session", {"session_id": "{}", "sampling_session_seq_id": 0, "base_model": "tiny"}),
            ("POST", "get_info", {"model_id": "{}:train:0"}), ("POST", "unload_model", {"model_id": "{}:train:0"}),
            ("POST", "optim_step", {"model_id": "{}:train:0", "seq_id": 1, "adam_params": {}}), ("GET", "samplers/{}:sample:0", None),
            ("POST", "retrieve_future", {"request_id": "{}:train:0:1"}), ("POST", "join_sampling_session", {"sampling_session_id": "{}:sample:0"}),
    ):  # fmt: skip
        fill = lambda session: (path.format(session), body and {key: each.format(session) if isinstance(each, str) else each
                                                                for key, each in body.items()})  # fmt: skip
        theirs, none = (callers(other, method, *fill(each)) for each in (session, unknown))
        assert theirs.status_code == none.status_code and theirs.status_code in (404, 410), (path, theirs.text)
        assert theirs.text.replace(session, unknown) == none.text  # as one that never was
    assert callers(owner, "GET", f"sessions/{session}").status_code == 200


def test_results_of_another_key_are_not_there(callers):
    """Also once the session that they were for has ended."""
    futures = callers.root.futures
    for prefix, owner in (("s-1", ""), ("k-ann-1", "ann"), ("k-bob-1", "bob")):
        future = futures.create(f"{prefix}:train:0:1")
        futures.finish(future, {"of": owner})
        futures.finish(futures.create(f"{prefix}:train:0:unload"), {"of": owner})
        for name in callers.services:
            answer = callers(name, "POST", "retrieve_future", {"request_id": future.request_id})
            assert (answer.status_code, answer.json().get("of")) == ((200, owner) if name == owner else (410, None))
            assert (callers(name, "POST", "unload_model", {"model_id": f"{prefix}:train:0"}).status_code == 200) == (name == owner)


def test_what_was_sampled_for_another_key_is_not_trained_on(callers):
    callers.root.records.add("k-ann-1:sample:0:1", [np.zeros(3)])
    assert {name: each._recorded("k-ann-1:sample:0:1:0") is not None for name, each in callers.services.items()} == {
        "": False, "ann": True, "bob": False}  # fmt: skip


def test_a_request_of_another_key_is_not_cancelled(callers):
    cancelled = []
    callers.root._samplers["worker"] = type("Samplers", (), {"cancel": lambda self, request_id: cancelled.append(request_id)})()
    callers.root.futures.create("k-ann-1:sample:0:1")
    for name in ("bob", "", "ann"):
        assert callers(name, "POST", "cancel_future", {"request_id": "k-ann-1:sample:0:1"}).status_code == 204
        assert len(cancelled) == (name == "ann")


def test_checkpoints_of_another_key_are_not_there(callers, tmp_path):
    path = CheckpointPath("k-ann-1:train:0", "weights", "a")
    store = callers.services["ann"].store
    store.add_run(path.run, {"base_model": "tiny", "lora": {"rank": 1, "seed": 1}, "user_metadata": None})
    with store.writing(path) as folder:
        folder.mkdir()
        (folder / "adapter.bin").write_bytes(b"abc")
    assert (tmp_path / "keys/ann/runs/k-ann-1.train.0/weights/a/adapter/adapter.bin").is_file()
    base = f"training_runs/{path.run}"
    urls = callers("ann", "GET", f"{base}/checkpoints/weights/a/external_weights_urls").json()["urls"]
    assert callers("bob", "GET", urls["adapter.bin"]).content == b"abc"  # a signed URL is for whoever has it
    for name in ("bob", ""):
        assert callers(name, "GET", "checkpoints").json()["checkpoints"] == [] and callers(name, "GET", "training_runs").json()["training_runs"] == []
        for method, url in (("GET", base), ("GET", f"{base}/checkpoints"), ("GET", f"{base}/checkpoints/weights/a/external_weights_urls"),
                            ("GET", f"{base}/checkpoints/weights/a/files/adapter.bin"), ("DELETE", f"{base}/checkpoints/weights/a")):
            assert callers(name, method, url).status_code == 404
        assert callers(name, "PUT", f"{base}/checkpoints/weights/a/ttl", {"ttl_seconds": 1}).status_code == 404
        for body, url in (({"tinker_path": str(path)}, "weights_info"), ({"source_path": str(path)}, "copy_weights")):
            assert callers(name, "POST", url, body).status_code == 404
    assert len(callers("ann", "GET", "checkpoints").json()["checkpoints"]) == 1


def test_the_url_of_an_upload_is_for_whoever_has_it(callers, monkeypatch):
    monkeypatch.setattr(access, "INCOMING_BYTES", 0)  # a file goes to disk as it comes
    asked = requests.StartUpload.model_validate({"base_model": "tiny", "lora_config": {"rank": 1}})
    upload, _ = callers.apps["ann"]._uploads.start(None, asked)
    url = f"uploads/{upload}/adapter_config.json"
    assert callers("carl", "PUT", url, {"r": 1}).status_code == 204
    assert len(list(callers.services["ann"].store.folder.glob("parked-weights/*/adapter_config.json"))) == 1
    for method, other in (("PUT", "uploads/unknown/adapter_config.json"), ("PUT", f"uploads/{upload}"), ("GET", url), ("PUT", f"x/{url}"),
                          ("POST", "external_weights_upload_finish")):  # fmt: skip
        assert callers("carl", method, other).status_code == 401, other
    finish = {"upload_id": upload}
    assert [callers(name, "POST", "external_weights_upload_finish", finish).status_code for name in ("bob", "ann")] == [404, 409]


def test_refusals_have_the_form_of_their_api(callers):
    for prefix in ("/v1", "/oai/api/v1"):
        answer = callers("carl", "GET", f"http://localhost{prefix}/models")
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert callers("ann", "GET", f"http://localhost{prefix}/models").json() == {"object": "list", "data": []}
    assert "detail" in callers("carl", "GET", "sessions").json()


def test_sessions_are_bounded_for_each_key(callers, monkeypatch):
    monkeypatch.setattr(service, "MAX_SESSIONS", 2)
    assert [callers("ann", "POST", "create_session", {}).status_code for _ in range(3)] == [200, 200, 429]
    assert callers("bob", "POST", "create_session", {}).status_code == 200


def test_a_wrong_key_opens_nothing(callers):
    assert [callers(name, "GET", "sessions").status_code for name in ("ann", "bob", "", "ann2", "carl")] == [200, 200, 200, 401, 401]


def test_keys_in_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("ESPALIER_API_KEY", raising=False)
    file = tmp_path / "keys"
    file.write_text("# team\nann tml-1\n\nbob\ttml-2\n")
    assert parse_arguments(["--model", str(tmp_path), "--api-key-file", str(file)]).api_keys == {"ann": "tml-1", "bob": "tml-2"}
    found = parse_arguments(["--model", str(tmp_path), "--api-key-file", str(file), "--api-key", "tml-3"])
    assert found.api_keys == {"": "tml-3", "ann": "tml-1", "bob": "tml-2"}
    for text in ("", "ann\n", "ann tml-1 more\n", "../x tml-1\n", "ann tml-1\nann tml-2\n", "ann tml-1\nbob tml-1\n", "ann schlüssel\n", "a-b tml-1\n"):
        file.write_text(text)
        with pytest.raises(SystemExit):
            parse_arguments(["--model", str(tmp_path), "--api-key-file", str(file)])
        said = capsys.readouterr().err
        assert "--api-key-file" in said and said.count("\n") == 1 and "tml-" not in said
    with pytest.raises(SystemExit):
        parse_arguments(["--model", str(tmp_path), "--api-key-file", str(tmp_path / "none")])


@pytest.fixture(scope="module")
def folder(tmp_path_factory, espalier):
    return init_model(espalier, tmp_path_factory.mktemp("qwen3"))


def test_kept_prefixes_tell_nothing_of_other_keys(folder, tmp_path):
    prompt = np.random.default_rng(seed_of(5)).integers(1, 50, 30).tolist()
    with Local(folder, tmp_path, api_key="tml-", keys={"ann": "tml-ann", "bob": "tml-bob"}, prefix_cache="64MiB") as local:
        def sampled(key):
            """What a new sampler of the base gives for the prompt: tokens, log-probabilities, and tokens of the prompt that were kept."""
            local.http.headers["X-API-Key"] = key
            session = local.post("create_session", {}).json()["session_id"]
            sampler = local.post("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"})
            body = {"sampling_session_id": sampler.json()["sampling_session_id"], "seq_id": 1, "prompt": {"chunks": [{"tokens": prompt}]},
                    "sampling_params": {"max_tokens": 5, "seed": 3, "stop": []}}  # fmt: skip
            found = schema.SampleResponse.FromString(local.result(local.post("asample", body)))
            (sequence,) = found.sequences
            return sequence.tokens, np.frombuffer(sequence.logprobs, "<f4"), found.prompt_cache_hit_tokens

        found = [sampled(f"tml-{name}") for name in ("", "ann", "bob", "ann", "")]
        assert [kept > 0 for *_, kept in found] == [False, False, False, True, True]
        assert all(tokens == found[0][0] and np.allclose(logprobs, found[0][1], atol=1e-6) for tokens, logprobs, _ in found)
