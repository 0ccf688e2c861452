# SPDX-License-Identifier: Apache-2.0
"""Samplers of `espalier serve`: requests join and leave between tokens, and prefixes are kept from turn to turn. In float64."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("tinker", reason="the client of the Tinker API")

from tinker import types

from engines import init_model
from espalier.server import sampling, schema
from servers import Local, client, datum, prompt

LONG = types.SamplingParams(max_tokens=60, seed=1, stop=[])
SHORT = types.SamplingParams(max_tokens=3, seed=2, stop=[])


@pytest.fixture(scope="module")
def folder(tmp_path_factory, espalier):
    return init_model(espalier, tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def local(folder, tmp_path_factory):
    with Local(folder, tmp_path_factory.mktemp("parent") / "state", prefix_cache="1GiB") as local:
        yield local


@pytest.fixture
def service(local):
    return client(local.address)


class Gate:
    """Lets a request begin, then holds the thread of the base until something else has been asked. Records what ends, in order."""

    def __init__(self, local, monkeypatch, after=5):
        self.begun, self._go, self.ended, self.steps = threading.Event(), threading.Event(), [], 0
        step, finish = sampling._Open.step, local.service.futures.finish

        def counted(open_):
            self.steps += 1
            if self.steps == after:
                self.begun.set()
                assert self._go.wait(60)
            return step(open_)

        def recorded(future, payload):
            self.ended.append(future.request_id)
            finish(future, payload)

        monkeypatch.setattr(sampling, "SLICE_SECONDS", 0.0)  # one step, then others have their turn
        monkeypatch.setattr(sampling._Open, "step", counted)
        monkeypatch.setattr(local.service.futures, "finish", recorded)

    def go_on_once(self, local, waiting):
        """When so many requests wait."""
        assert self.begun.wait(60)
        while local.service.futures.pending < waiting:
            pass
        self._go.set()


def tokens_of(response):
    return [list(sequence.tokens) for sequence in response.sequences]


def test_a_short_request_does_not_wait_for_a_long_one(local, monkeypatch):
    first, second = (client(local.address).create_sampling_client(base_model="tiny").result() for _ in range(2))
    alone = [tokens_of(first.sample(prompt(5, 6, 7), 2, LONG).result()), tokens_of(second.sample(prompt(5, 6, 9), 1, SHORT).result())]
    gate = Gate(local, monkeypatch)
    long = first.sample(prompt(5, 6, 7), 2, LONG)
    assert gate.begun.wait(60)
    short = second.sample(prompt(5, 6, 9), 1, SHORT)
    gate.go_on_once(local, waiting=2)
    assert [tokens_of(long.result()), tokens_of(short.result())] == alone
    ids = [each._sampling_session_id for each in (second, first)]
    assert [name.rpartition(":")[0] for name in gate.ended] == ids
    assert gate.steps <= 60 + 4  # they went on side by side


def test_training_goes_on_between_tokens(local, service, monkeypatch):
    """And what is sampled keeps the weights that it began with, also where they are published anew meanwhile."""
    training = service.create_lora_training_client(base_model="tiny", rank=2, seed=3).result()
    inflight = training.save_weights_and_get_sampling_client(kind="inflight").result()
    snapshot = training.save_weights_and_get_sampling_client().result()
    expected = snapshot.sample(prompt(5, 6, 7), 1, LONG, topk_sample_logprobs=2).result()
    gate = Gate(local, monkeypatch)
    long = inflight.sample(prompt(5, 6, 7), 1, LONG, topk_sample_logprobs=2)
    assert gate.begun.wait(60)
    training.forward_backward([datum([5, 6, 7, 8], weights=[1.0, 1.0, 1.0])], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1e-1))
    with ThreadPoolExecutor(1) as pool:
        publishing = pool.submit(lambda: training.save_weights_and_get_sampling_client(kind="inflight").result())
        gate.go_on_once(local, waiting=4)
        publishing.result()
    response = long.result()
    assert len(gate.ended) == 4 and gate.ended[-1].rpartition(":")[0] == inflight._sampling_session_id
    assert tokens_of(response) == tokens_of(expected)
    tops = [each.sequences[0].topk_logprobs_np.logprobs for each in (response, expected)]
    assert abs(tops[0] - tops[1]).max() < 1e-6
    # Negative control: what begins now has the new weights.
    assert tokens_of(inflight.sample(prompt(5, 6, 7), 1, LONG).result()) != tokens_of(expected)
    assert tokens_of(snapshot.sample(prompt(5, 6, 7), 1, LONG).result()) == tokens_of(expected)


def test_a_conversation_encodes_what_is_new(local, service, folder, tmp_path):
    sampler = service.create_sampling_client(base_model="tiny").result()
    with Local(folder, tmp_path / "state") as without:
        plain = client(without.address).create_sampling_client(base_model="tiny").result()
        tokens, before = [30, 31, 32], local.service.counter.counts()
        for turn in range(4):
            given = types.SamplingParams(max_tokens=5, seed=turn, stop=[])
            response, other = (each.sample(prompt(*tokens), 2, given).result() for each in (sampler, plain))
            assert tokens_of(response) == tokens_of(other)
            for ours, theirs in zip(response.sequences, other.sequences):
                assert list(ours.logprobs) == pytest.approx(list(theirs.logprobs), rel=1e-6)
            assert response.prompt_cache_hit_tokens == (0 if turn == 0 else len(tokens) - 3)
            tokens += [*response.sequences[turn % 2].tokens, 40 + turn, 50]
        counts, theirs = local.service.counter.counts(), without.service.counter.counts()
    assert counts["encoded_prompt_tokens"] - before.get("encoded_prompt_tokens", 0) == 3 + 3 * 3
    assert theirs["encoded_prompt_tokens"] == 3 + 10 + 17 + 24 and theirs["kept_prompt_tokens"] == theirs["prefix_cache_bytes"] == 0
    assert counts["prefix_cache_bytes"] > 0
    metrics = local.http.get(f"{local.address}/metrics").text
    assert f"espalier_kept_prompt_tokens {counts['kept_prompt_tokens']:g}\n" in metrics
    model = local.model()
    assert local.post("get_info", {"model_id": model}).json()["espalier"]["kept_prompt_tokens"] == counts["kept_prompt_tokens"]


def test_prompts_are_scored_by_the_pass_that_encodes_them(local, service):
    """Prefixes that prompts share are encoded and scored once, and what is scored already is not encoded again."""
    sampler = service.create_sampling_client(base_model="tiny").result()
    encoded = lambda: local.base.engine.sampling_counts["encoded_prompt_tokens"]
    start = [41, 42, 43, 44, 45]
    before = encoded()
    with local.held():
        asked = [sampler.compute_logprobs(prompt(*start, *end)) for end in ([1, 2], [3], [])]
    found = [each.result() for each in asked]
    assert 8 <= encoded() - before <= 10  # those that come later encode the last token of what they share again
    for ids, values in zip(([1, 2], [3], []), found, strict=True):
        [expected] = local.base.engine.logprobs([[*start, *ids]])
        assert values[0] is None and values[1:] == pytest.approx(expected[1:].tolist(), rel=1e-6)
    before = encoded()
    assert sampler.compute_logprobs(prompt(*start, 1, 2)).result() == found[0] and encoded() == before
    assert sampler.compute_logprobs(prompt(41)).result() == [None]
    ask = {"sampling_session_id": sampler._sampling_session_id, "seq_id": 99, "num_samples": 1, "prompt": {"chunks": [
        {"type": "encoded_text", "tokens": start}]}, "sampling_params": {"max_tokens": 1}, "prompt_logprobs": True,
        "prompt_logprobs_last_n": 2}  # fmt: skip
    answer = schema.SampleResponse.FromString(local.result(local.post("asample", ask)))
    values = np.frombuffer(answer.prompt_logprobs, "<f4")
    assert np.isnan(values[:3]).all() and values[3:].tolist() == pytest.approx(found[2][3:], rel=1e-6)


def test_a_cancelled_request_ends(local, service, monkeypatch):
    sampler = service.create_sampling_client(base_model="tiny").result()
    gate = Gate(local, monkeypatch)
    sampler.sample(prompt(5, 6, 7), 2, LONG)
    assert gate.begun.wait(60)
    [request_id] = local.service.futures._pending
    assert local.post("cancel_future", {"request_id": request_id}).is_success
    assert local.service.futures.get(request_id).payload.error == "cancelled by the client"
    gate._go.set()
    assert len(sampler.sample(prompt(5, 6, 9), 1, SHORT).result().sequences) == 1
    assert gate.steps < 20 and not local.service._samplers[local.base]._open


def test_what_has_begun_is_done_when_the_server_stops(folder, tmp_path, monkeypatch):
    with Local(folder, tmp_path / "state") as local:
        sampler = client(local.address).create_sampling_client(base_model="tiny").result()
        gate = Gate(local, monkeypatch)
        long = sampler.sample(prompt(5, 6, 7), 2, LONG)
        assert gate.begun.wait(60)
        stopping = threading.Thread(target=lambda: local.on_loop(local.service.stop()))
        stopping.start()
        while not local.base.is_stopped:
            pass
        gate._go.set()
        assert [len(tokens) for tokens in tokens_of(long.result())] == [60, 60]
        stopping.join()
