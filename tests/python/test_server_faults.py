# SPDX-License-Identifier: Apache-2.0
"""Clients of `espalier serve` that vanish, repeat themselves, send what is broken or too much: others never notice."""

import asyncio
import json

import httpx
import numpy as np
import pytest
import zstandard

pytest.importorskip("tinker", reason="the client of the Tinker API")

import tinker

from espalier.server import access, app, bodies, futures, schema, service, training

from conftest import seed_of
from engines import init_model
from servers import Local, client, datum


@pytest.fixture(scope="module")
def folder(tmp_path_factory, espalier):
    return init_model(espalier, tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    return tmp_path_factory.mktemp("parent") / "state"


@pytest.fixture(scope="module")
def local(folder, state):
    with Local(folder, state, max_adapters=1000) as local:
        yield local


def message_of(model, number, tokens=(1, 2, 3, 4), forward_only=False, weight=1.0):
    message = schema.ForwardBackwardRequest(model_id=model, seq_id=number, loss_fn="cross_entropy", forward_only=forward_only)
    each = message.data.add()
    each.model_input.add().encoded_text.tokens = np.array(tokens[:-1], "<i4").tobytes()
    inputs = each.loss_fn_inputs
    inputs["target_tokens"].dense, inputs["target_tokens"].dtype = np.array(tokens[1:], "<i8").tobytes(), schema.INT64
    inputs["weights"].dense, inputs["weights"].dtype = np.full(len(tokens) - 1, weight, "<f4").tobytes(), schema.FLOAT32
    return message


def send(local, message, **headers):
    return local.http.post("forward_backward", content=message.SerializeToString(), headers=headers)


def step(local, model, number):
    return local.post("optim_step", {"model_id": model, "seq_id": number, "adam_params": {"learning_rate": 1e-2}})


def loss(local, model, number):
    output = schema.ForwardBackwardOutput.FromString(local.result(send(local, message_of(model, number, (5, 6, 7), True))))
    return output.metrics["loss:sum"]


def after_one_step(local, **options):
    """The loss of a new model after one step, with nothing gone wrong."""
    model = local.model(**options)
    local.result(send(local, message_of(model, 1)))
    local.result(step(local, model, 2))
    return loss(local, model, 3)


def test_a_repeated_request_is_done_once(local):
    expected = after_one_step(local)
    model = local.model()
    promises = [send(local, message_of(model, 1)) for _ in range(3)]  # before and after it is done
    local.result(promises[0])
    promises += [send(local, message_of(model, 1)), step(local, model, 2), step(local, model, 2)]
    assert len({each.json()["request_id"] for each in promises}) == 2
    results = [local.result(each) for each in promises]
    assert results[0] == results[1] == results[3] and results[4] == results[5]
    local.result(step(local, model, 2))
    assert loss(local, model, 3) == expected


def test_chunks_in_any_order_are_one_forest(local):
    model, other = local.model(), local.model()
    tokens = [(1, 2, 3, 4, 5), (1, 2, 3, 9), (1, 2, 8)]
    with local.held():
        late = step(local, model, 4)
        promises = [send(local, message_of(model, number, tokens[number - 1])) for number in (3, 1, 2)]
        forward = [send(local, message_of(other, number, tokens[number - 1])) for number in (1, 2, 3)]
        step(local, other, 4)
    metrics = [schema.ForwardBackwardOutput.FromString(local.result(promises[each])).metrics for each in (1, 2, 0)]
    encoded = [each["espalier/encoded_tokens:sum"] for each in metrics]
    assert encoded[1:] == [0, 0] and 0 < encoded[0] < sum(each["espalier/flat_tokens:sum"] for each in metrics)
    assert "metrics" in local.result(late) and isinstance(local.result(forward[2]), bytes)
    assert loss(local, model, 5) == loss(local, other, 5)


def test_a_number_that_never_comes(local, monkeypatch):
    model = local.model()
    late = [step(local, model, number) for number in (2, 3)]
    local.on_loop(local.service.end_what_is_over())
    assert local.service.futures.pending == 2
    monkeypatch.setattr(training, "GAP_SECONDS", -1.0)
    local.on_loop(local.service.end_what_is_over())
    assert all("expected 1 within" in local.result(each)["error"] for each in late)
    local.result(send(local, message_of(model, 4)))  # it goes on


@pytest.mark.parametrize("spoil", [
    lambda message: message.data[0].model_input[0].encoded_text.__setattr__("tokens", np.array([1, 2, 99999], "<i4").tobytes()),
    lambda message: message.data[0].loss_fn_inputs["weights"].__setattr__("dense", b"abc"),
    lambda message: message.data[0].loss_fn_inputs["weights"].shape.extend([1 << 62, 4]),
    lambda message: message.__setattr__("loss_fn", "nonsense"),
    lambda message: message.loss_fn_config.__setitem__("beta", 1.0),
    lambda message: message.ClearField("data"),
])  # fmt: skip
def test_a_bad_datum_fails_alone(local, spoil):
    expected = [after_one_step(local), after_one_step(local, seed=4)]
    first, second = local.model(), local.model(seed=4)
    bad = message_of(first, 2)
    spoil(bad)
    with local.held():
        promises = [send(local, message_of(first, 1)), send(local, message_of(second, 1)), send(local, bad)]
        steps = [step(local, first, 3), step(local, second, 2)]
    failed = local.result(promises[2])
    assert failed["category"] == "user" and "expected" in failed["error"]
    assert all(isinstance(local.result(each), bytes) for each in promises[:2]) and all("metrics" in local.result(each) for each in steps)
    assert [loss(local, first, 4), loss(local, second, 3)] == expected


def test_a_request_that_is_refused_takes_its_turn(local):
    """The official client goes on after it, and would wait for ever."""
    service = client(local.address)
    training = service.create_lora_training_client(base_model="tiny", rank=2, seed=1).result()
    for call in (lambda: training.save_state("no/such/name"), lambda: training.save_state("../../x"), lambda: training.save_weights_for_sampler(""),
                 lambda: training.optim_step(tinker.AdamParams(learning_rate=-1.0)), lambda: training.save_state("a", ttl_seconds=-5)):  # fmt: skip
        try:
            call().result(timeout=60)
        except tinker.RequestFailedError as error:
            assert error.category.name == "User", error
    training._load_state_impl("tinker://x", True, None).future().exception(timeout=60)
    assert training.forward([datum([1, 2], weights=[1.0])], "cross_entropy").result(timeout=60).metrics["loss:sum"] > 0


def test_a_client_that_vanishes(local, monkeypatch):
    gone, here = local.model(), local.model()
    sampler = local.result(local.post("save_weights_for_sampler", {"model_id": gone, "seq_id": 1, "sampling_session_seq_id": 0}))
    adapter = local.service.model(gone).weights
    session = local.service.sessions[gone.split(":")[0]]
    waiting = step(local, gone, 3)
    local.on_loop(local.service.end_what_is_over())
    assert session.session_id in local.service.sessions
    session.seen -= service.SESSION_SECONDS + 1
    running = step(local, here, 2)  # of another client
    local.on_loop(local.service.end_what_is_over())
    assert adapter.adapter is None and session.session_id not in local.service.sessions
    assert local.result(waiting)["category"] == "user" and "no heartbeat" in local.result(waiting)["error"]
    assert local.post("get_info", {"model_id": gone}).status_code == 404
    assert local.post("join_sampling_session", {"sampling_session_id": sampler["sampling_session_id"]}).status_code == 404
    assert local.post("session_heartbeat", {"session_id": session.session_id}).status_code == 410
    local.result(send(local, message_of(here, 1)))
    assert "metrics" in local.result(running)


def test_a_session_that_ends_while_its_request_runs(local):
    """A snapshot or a model that is made meanwhile goes, too."""
    model = local.model()
    session = model.split(":")[0]
    resident = len(local.base._resident)
    with local.held():
        local.post("save_weights_for_sampler", {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0})
        making = local.post("create_model", {"session_id": session, "model_seq_id": 1, "base_model": "tiny", "lora_config": {"rank": 1}})
        ending = asyncio.run_coroutine_threadsafe(
            local.service.end_session(local.service.session(session), "ended"), local.base._work.get_loop())
    ending.result()
    assert "has ended" in local.result(making)["error"]
    assert len(local.base._resident) == resident - 1


def test_the_engine_goes_on_after_an_error_of_its_own(local, monkeypatch):
    model = local.model()
    with monkeypatch.context() as patched:
        patched.setattr(local.base.engine, "optim_step", lambda *args, **options: 1 / 0)
        failed = local.result(step(local, model, 1))
        patched.setattr(training._Job, "finish", lambda job: 1 / 0)
        patched.setattr(training, "output_of", None)
        also = local.result(send(local, message_of(model, 2)))
    assert failed == {"error": "ZeroDivisionError: division by zero", "category": "server"} and also["category"] == "server"
    assert isinstance(local.result(send(local, message_of(model, 3))), bytes)


def test_bodies_that_are_too_long(local, monkeypatch):
    for limit in ("BODY_BYTES", "JSON_BYTES", "SAMPLE_BODY_BYTES"):
        monkeypatch.setattr(bodies, limit, 1 << 20)
    long = b"\0" * ((1 << 20) + 1)
    bomb = zstandard.compress(b"\0" * (1 << 26))
    assert len(bomb) < 1 << 16
    for path in ("forward_backward", "create_session", "telemetry", "asample"):
        assert local.http.post(path, content=long).status_code == 413
        assert local.http.post(path, content=bomb, headers={"Content-Encoding": "zstd"}).status_code == 413
        assert local.http.post(path, content=b"abc", headers={"Content-Encoding": "zstd"}).status_code == 400
        assert local.http.post(path, content=b"abc", headers={"Content-Encoding": "gzip"}).status_code == 415
    model = local.model()
    packed = zstandard.compress(message_of(model, 1).SerializeToString())
    assert isinstance(local.result(local.http.post("forward_backward", content=packed, headers={"Content-Encoding": "zstd"})), bytes)


def mutated(draw, body):
    body = bytearray(body)
    for _ in range(draw.integers(1, 3)):
        place = draw.integers(0, len(body))
        kind = draw.integers(0, 4)
        if kind == 0:
            body[place] = draw.integers(0, 256)
        elif kind == 1:
            del body[place : place + draw.integers(1, 9)]
        elif kind == 2:
            body[place:place] = draw.bytes(draw.integers(1, 9))
        else:
            body[place:place] = body[draw.integers(0, len(body)) :][:20]
        body = body or bytearray(b"\0")
    return bytes(body)


def test_broken_protobuf_and_json(local):
    seed = seed_of(70)
    print(f"seed {seed}")
    draw = np.random.default_rng(seed)
    models, numbers, promises = [local.model()], [1], []
    session = models[0].split(":")[0]
    sampler = local.post("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}).json()
    bodies = [("asample", {"sampling_session_id": sampler["sampling_session_id"], "seq_id": 1, "num_samples": 2, "prompt": {"chunks": [
                  {"type": "encoded_text", "tokens": [1, 2, 3]}]}, "sampling_params": {"max_tokens": 2, "seed": 3, "stop": [4]},
                  "target_prompt_logprobs": {"data": [1, 2, 3, 4], "dtype": "int64", "shape": [2, 2]}}),
              ("optim_step", {"model_id": models[0], "seq_id": 1, "adam_params": {"learning_rate": 1e-3, "beta1": 0.9}}),
              ("save_weights", {"model_id": models[0], "seq_id": 1, "path": "name", "ttl_seconds": 60}),
              ("retrieve_futures", {"target": {"sampling_session_id": sampler["sampling_session_id"]}, "timeout": 0}),
              ("create_model", {"session_id": session, "model_seq_id": 3, "base_model": "tiny", "lora_config": {"rank": 1, "seed": 2}}),
              ("load_weights", {"model_id": models[0], "seq_id": 2, "path": f"tinker://{models[0]}/weights/name", "optimizer": True}),
              ("create_session", {"user_metadata": {"a": 1}, "display_name": "x"})]  # fmt: skip
    for number in range(400):
        if number % 2:
            answer = local.http.post("forward_backward", content=mutated(draw, message_of(models[0], numbers[0]).SerializeToString()))
        else:
            path, body = bodies[draw.integers(0, len(bodies))]
            answer = local.http.post(path, content=mutated(draw, json.dumps(body).encode()))
        assert answer.status_code < 500, (seed, number, answer.text)
        if answer.status_code == 200 and "request_id" in answer.text:
            promises.append(answer)
            if number % 2 and answer.json()["request_id"] == f"{models[0]}:{numbers[0]}":
                numbers[0] += 1
    assert promises
    model = local.model()
    assert loss(local, model, 1) > 0
    for session in list(local.service.sessions.values()):  # what waits for numbers that never come ends with its session
        local.on_loop(local.service.end_session(session, "over"))
    for promise in promises:
        answer = local.result(promise)
        assert isinstance(answer, bytes) or answer.get("category") != "server", (seed, answer)
    assert local.service.futures.pending == 0 and after_one_step(local) > 0


def test_json_that_has_extreme_numbers(local):
    model = local.model()
    session = model.split(":")[0]
    sampler = local.post("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}).json()
    ask = {**sampler, "seq_id": 1, "prompt": {"chunks": [{"tokens": [1, 2]}]}, "sampling_params": {"max_tokens": 1}}
    for change in ({"seq_id": 1 << 70}, {"seq_id": -1}, {"seq_id": 10**9}, {"prompt": {"chunks": [{"tokens": [1 << 80]}]}},
                   {"sampling_params": {"seed": 1 << 90}}, {"sampling_params": {"stop": [1 << 40]}}, {"num_samples": 1 << 40},
                   {"sampling_params": {"temperature": -1}}, {"target_prompt_logprobs": {"data": [1 << 90], "dtype": "int64", "shape": [1, 1]}},
                   {"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [1, 1 << 50]}}):  # fmt: skip
        assert local.post("asample", {**ask, **change}).status_code == 400, change
    deep = "[" * 100_000
    assert local.http.post("asample", content=deep).status_code == 400
    assert local.http.put(f"training_runs/{model}/checkpoints/weights/a/ttl", json={"ttl_seconds": 1 << 60}).status_code == 400
    assert local.http.get("checkpoints", params={"limit": "1" * 5000}).status_code == 400
    assert isinstance(local.result(local.post("asample", ask)), bytes)


def test_no_path_leaves_the_folder(local, state):
    model = local.model()
    local.result(local.post("save_weights", {"model_id": model, "seq_id": 1, "path": "good"}))
    secret = state.parent / "secret.json"
    secret.write_text('{"base_model": "tiny", "lora": {}, "created": "0"}')
    run, number = model, 2
    for text in ("../secret", "..", ".", "a/b", "/etc/passwd", "..%2f..%2fsecret", "\0", "a\n", "ä", "x" * 300, "."):
        for path in ("save_weights", "save_weights_external", "save_weights_for_sampler"):
            failed = local.result(local.post(path, {"model_id": model, "seq_id": number, "path": text}))
            assert failed.get("category") == "user", (path, text, failed)
            number += 1
        for path in (text, f"tinker://{text}", f"tinker://{run}/weights/{text}", f"tinker://{run}/{text}/good", f"tinker://{text}/weights/good"):
            failed = local.result(local.post("load_weights", {"model_id": model, "seq_id": number, "path": path, "optimizer": False}))
            number += 1
            assert failed.get("category") == "user", (path, failed)
            for body in ({"tinker_path": path}, {"source_path": path}):
                assert local.post("weights_info" if "tinker_path" in body else "copy_weights", body).status_code in (400, 404)
            session = {"session_id": model.split(":")[0], "sampling_session_seq_id": 5, "model_path": path}
            assert local.post("create_sampling_session", session).status_code in (400, 404)
    for hidden in ("%2e%2e", "..%2f..%2f..%2fsecret.json", "%2e%2e/%2e%2e/about.json", "%2fetc%2fpasswd", "../about.json", "%00"):
        good = f"training_runs/{run}/checkpoints/weights/good"
        for path in (f"{good}/files/{hidden}", f"training_runs/{hidden}", f"training_runs/{hidden}/checkpoints",
                     f"training_runs/{run}/checkpoints/weights/{hidden}/external_weights_urls", f"samplers/{hidden}", f"sessions/{hidden}"):
            answer = local.http.send(httpx.Request("GET", f"{local.address}/api/v1/{path}"))
            assert answer.status_code in (400, 404, 405), (path, answer.text)
            assert local.http.request("DELETE", f"training_runs/{run}/checkpoints/weights/{hidden}").status_code in (400, 404, 405)
    assert secret.exists() and sorted(each.name for each in state.parent.iterdir()) == ["secret.json", "state"]
    assert (state / "runs" / run.replace(":", ".") / "weights/good/adapter").is_dir()


def test_queues_are_bounded(local, monkeypatch):
    model = local.model()
    with monkeypatch.context() as patched:
        patched.setattr(futures, "PENDING_REQUESTS", 2)
        promises = [step(local, model, number) for number in (3, 4, 5)]
        assert [each.status_code for each in promises] == [200, 200, 429]
        local.result(send(local, message_of(model, 1)))  # what the others wait for
    with monkeypatch.context() as patched:
        patched.setattr(futures, "PENDING_BYTES", 100)
        assert send(local, message_of(model, 5)).status_code == 429
    with monkeypatch.context() as patched:
        patched.setattr(training, "MAX_OPERATIONS", 2)
        assert step(local, model, 5).status_code == 429
        local.result(send(local, message_of(model, 2)))
    with monkeypatch.context() as patched:
        patched.setattr(service, "MAX_SESSIONS", 0)
        assert local.post("create_session", {}).status_code == 429
    promises[2:] = [step(local, model, 5)]  # as a client does that tries again
    assert "metrics" in local.result(promises[0]) and "loss" not in local.result(promises[2])
    with monkeypatch.context() as patched:  # what is done no longer counts, and a single body of any size is taken
        patched.setattr(futures, "PENDING_BYTES", 100)
        promises = [send(local, message_of(model, number)) for number in (7, 8)]
        assert [each.status_code for each in promises] == [200, 429]
        local.result(send(local, message_of(model, 6)))


def test_snapshots_of_a_session_are_bounded(local, monkeypatch):
    monkeypatch.setattr(service, "MAX_SNAPSHOTS", 2)
    model = local.model()
    ids = [local.result(local.post("save_weights_for_sampler", {"model_id": model, "seq_id": number + 1, "sampling_session_seq_id": number}))
           ["sampling_session_id"] for number in range(2)]  # fmt: skip
    local.service.sampler(ids[0])  # the other one is longest unused
    local.result(local.post("save_weights_for_sampler", {"model_id": model, "seq_id": 3, "sampling_session_seq_id": 2}))
    assert local.http.get(f"samplers/{ids[0]}").status_code == 200 and local.http.get(f"samplers/{ids[1]}").status_code == 404


def test_results_expire_and_large_ones_are_announced(local, monkeypatch):
    model = local.model()
    promise = send(local, message_of(model, 1))
    local.result(promise)
    ask = {"request_id": promise.json()["request_id"], "allow_metadata_only": True}
    monkeypatch.setattr(app, "METADATA_BYTES", 1)
    assert local.post("retrieve_future", ask).json()["status"] == "complete_metadata"
    monkeypatch.setattr(local.service.futures, "kept_seconds", -1.0)
    assert local.post("retrieve_future", ask).status_code == 410
    assert send(local, message_of(model, 1)).status_code == 410  # not done twice
    monkeypatch.undo()
    waiting = step(local, model, 3)
    monkeypatch.setattr(app, "POLL_SECONDS", 0.01)
    answer = local.post("retrieve_future", {"request_id": waiting.json()["request_id"]})
    assert answer.status_code == 408 and answer.json()["type"] == "try_again" and answer.json()["queue_state"] == "active"


def test_the_key(folder, tmp_path, monkeypatch):
    compared = []
    real = access.hmac.compare_digest
    monkeypatch.setattr(access.hmac, "compare_digest", lambda first, second: compared.append((first, second)) or real(first, second))
    with Local(folder, tmp_path, api_key="tml-secret") as local:
        assert local.http.get("healthz").status_code == 200 and not compared
        for headers in ({}, {"X-API-Key": "tml-wrong"}, {"X-API-Key": "tml-secret1"}, {"Authorization": "Bearer x"}, {"X-API-Key": "é".encode("latin-1")}):
            assert local.http.get("checkpoints", headers=headers).status_code == 401
            assert local.http.post("forward_backward", content=b"", headers=headers).status_code == 401
            assert local.http.get(f"{local.address}/metrics", headers=headers).status_code == 401
        for headers in ({"X-API-Key": "tml-secret"}, {"Authorization": "Bearer tml-secret"}):
            assert local.http.get("checkpoints", headers=headers).status_code == 200
    assert len(compared) == 17 and all(len(each) == 32 for pair in compared for each in pair)  # digests of equal length
