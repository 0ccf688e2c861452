# SPDX-License-Identifier: Apache-2.0
"""What clients of `espalier serve` are told while they wait, and shares of the queue. Features of the hosted service that are refused."""

import logging
from types import SimpleNamespace

import pytest

pytest.importorskip("tinker", reason="the client of the Tinker API")

from engines import init_model
from espalier.server import app, futures
from espalier.server.arguments import parse_arguments
from espalier.server.errors import Refused
from servers import Local, client, prompt
from tinker import types


@pytest.fixture(scope="module")
def local(tmp_path_factory, espalier):
    folder = init_model(espalier, tmp_path_factory.mktemp("qwen3"))
    with Local(folder, tmp_path_factory.mktemp("parent") / "state") as local:
        yield local


def test_states_of_the_queue(monkeypatch):
    monkeypatch.setattr(futures, "PENDING_REQUESTS", 6)
    queue = futures.Futures()
    own = [queue.create(f"s-a:sample:0:{number}") for number in range(4)]
    assert queue.queue_state(own[0]) == ("active", "4 requests wait")
    other = queue.create("s-b:sample:0:0")
    state, reason = queue.queue_state(own[0])  # 4 of 6, of two clients
    assert state == "paused_rate_limit" and "4 requests of this client wait; its share is 3 of 6" in reason
    assert queue.queue_state(other)[0] == "active"
    queue.create("s-a:sample:0:9")
    assert queue.queue_state(other)[0] == "paused_capacity" and queue.queue_state(own[0])[0] == "paused_rate_limit"
    for future in own:
        queue.finish(future, {})
    assert queue.queue_state(other) == ("active", "2 requests wait")


def test_a_client_that_fills_the_queue_does_not_shut_out_others(monkeypatch):
    monkeypatch.setattr(futures, "PENDING_REQUESTS", 6)
    queue = futures.Futures()
    full = [queue.create(f"s-a:sample:0:{number}") for number in range(6)]
    with pytest.raises(Refused) as refused:
        queue.create("s-a:sample:0:6")
    assert refused.value.status == 429
    for number in range(2):
        queue.create(f"s-b:sample:0:{number}")
    with pytest.raises(Refused):  # a third of the queue, as another client might come
        queue.create("s-b:sample:0:2")
    queue.create("s-b:sample:0:2", others_wait=True)
    for future in full:
        queue.finish(future, {})
        queue.forget(future)
    assert queue.pending == 3 and queue._bytes == 0 and not queue._done
    queue.create("s-a:sample:0:7")


def test_the_official_client_is_told_why_it_waits(local, monkeypatch, caplog):
    """It logs that it is paused, and gets its results in the end."""
    monkeypatch.setattr(app, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(futures, "PENDING_REQUESTS", 4)
    sampler = client(local.address).create_sampling_client(base_model="tiny").result()
    other = client(local.address).create_sampling_client(base_model="tiny").result()
    params = types.SamplingParams(max_tokens=2, seed=1, stop=[])
    with caplog.at_level(logging.WARNING), local.held():
        asked = [sampler.sample(prompt(5, number), 1, params) for number in range(3)]
        asked.append(other.sample(prompt(6), 1, params))
        while not any("is paused for sampler" in record.getMessage() for record in caplog.records):
            pass
    assert all(len(each.result().sequences) == 1 for each in asked)
    [message, *_] = [record.getMessage() for record in caplog.records if "is paused for sampler" in record.getMessage()]
    assert "requests" in message


IMAGE = {"type": "image", "data": "AA==", "format": "png"}


@pytest.mark.parametrize("method, path, body, words", [
    ("POST", "create_custom_loss", {}, "create_custom_loss: expected custom losses to run in the client"),
    ("POST", "training_runs/s-0:train:0/checkpoints/weights/x/publish", {}, "publishing"),
    ("DELETE", "training_runs/s-0:train:0/checkpoints/weights/x/publish", None, "publishing"),
    ("PUT", "sessions/s-0/project", {"project_id": "p"}, "projects"), ("POST", "sessions/search", {}, "the search of sessions"),
    ("GET", "sessions/s-0/trace_export", None, "traces"),
    ("POST", "checkpoints/search", {"project_ids": ["p"]}, "project_ids: expected none, as this server has no projects"),
    ("POST", "external_weights_upload_start", {"base_model": "tiny", "lora_config": {"rank": 0}}, "whole weights are not uploaded"),
    ("POST", "create_model", {"session_id": "s", "model_seq_id": 0, "base_model": "tiny", "optimizer_config": {"type": "dimuon"}},
     "optimizer_config: expected adamw")])  # fmt: skip
def test_what_is_not_served_is_refused_by_name(local, method, path, body, words):
    answer = local.http.request(method, path, json=body)
    assert answer.status_code in (400, 404) and words in answer.json()["detail"]


def test_images_are_refused_by_name(local):
    session = local.post("create_session", {}).json()["session_id"]
    sampler = local.post("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"})
    asked = {"sampling_session_id": sampler.json()["sampling_session_id"], "seq_id": 0, "sampling_params": {"max_tokens": 1},
             "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}, IMAGE]}}  # fmt: skip
    answer = local.post("asample", asked)
    assert answer.status_code == 400 and "expected chunks of tokens alone, received one of type 'image'" in answer.json()["detail"]


def test_results_are_kept_for_a_time(monkeypatch):
    results, now = futures.Futures(kept_seconds=300), 1000.0
    monkeypatch.setattr(futures, "time", SimpleNamespace(monotonic=lambda: now))
    done = results.create("s-a:sample:0:1")
    results.finish(done, {"a": 1})
    now += 299
    assert results.get(done.request_id) is done
    now += 2
    assert results.get(done.request_id) is None
    assert parse_arguments(["--model", "."]).result_seconds == futures.Futures().kept_seconds == 3600
