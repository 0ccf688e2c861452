# SPDX-License-Identifier: Apache-2.0
"""Clients of `espalier serve` never reach each other through the engine: each has its turn, and fails alone. In float64."""

import queue
import threading

import numpy as np
import pytest

pytest.importorskip("tinker", reason="the client of the Tinker API")

from engines import init_model
from espalier.server import base, data, requests, sample_requests, sampling, schema, scoring, service, sessions, wire
from espalier.server.errors import Refused
from servers import Local


@pytest.fixture(scope="module")
def folder(tmp_path_factory, espalier):
    return init_model(espalier, tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def local(folder, tmp_path_factory):
    with Local(folder, tmp_path_factory.mktemp("parent") / "state", prefix_cache="1GiB") as local:
        yield local


def sampler_of(local, session=None):
    """A sampler of the base, by default of a new client."""
    session = session or local.post("create_session", {}).json()["session_id"]
    number = len(local.service.sessions[session].samplers)
    made = local.post("create_sampling_session", {"session_id": session, "sampling_session_seq_id": number, "base_model": "tiny"})
    return made.json()["sampling_session_id"]


def ask(local, sampler, seq_id=1, tokens=(5, 6, 7), samples=1, seed=1, stop=(), max_tokens=3, **more):
    return local.post("asample", {
        "sampling_session_id": sampler, "seq_id": seq_id, "num_samples": samples, "prompt": {"chunks": [{"tokens": list(tokens)}]},
        "sampling_params": {"max_tokens": max_tokens, "seed": seed, "stop": stop if isinstance(stop, str) else list(stop)}, **more})  # fmt: skip


def tokens_of(content):
    assert isinstance(content, bytes), content
    return [np.frombuffer(each.tokens, "<i4").tolist() for each in schema.SampleResponse.FromString(content).sequences]


class Steps:
    """Counts steps of the engine; `begun` once a request is sampled. `go` lets it go on."""

    def __init__(self, monkeypatch, after=3):
        self.count, self.begun, self.go = 0, threading.Event(), threading.Event()
        step = sampling._Open.step

        def counted(open_):
            self.count += 1
            if self.count == after:
                self.begun.set()
                assert self.go.wait(60)
            return step(open_)

        monkeypatch.setattr(sampling, "SLICE_SECONDS", 0.0)
        monkeypatch.setattr(sampling._Open, "step", counted)


def test_a_short_request_beside_hundreds_of_long_samples(local, monkeypatch):
    one, two = sampler_of(local), sampler_of(local)
    expected = tokens_of(local.result(ask(local, two, 1, max_tokens=1)))
    steps = Steps(monkeypatch)
    many = ask(local, one, 1, samples=300, max_tokens=50)
    assert steps.begun.wait(60)
    short = ask(local, two, 2, max_tokens=1)
    begun = steps.count
    steps.go.set()
    assert tokens_of(local.result(short)) == expected
    assert steps.count - begun < 30  # all samples of the other take 250
    assert local.service.futures.get(many.json()["request_id"]).payload is None
    local.post("cancel_future", {"request_id": many.json()["request_id"]})


def test_a_broken_adapter_fails_alone(local, monkeypatch):
    """And others that are sampled beside it have the tokens that they would have alone."""
    model = local.model()
    weights = local.service.model(model).weights
    broken = local.result(local.post("save_weights_for_sampler", {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0}))
    bystander = sampler_of(local)
    expected = tokens_of(local.result(ask(local, bystander, 1, samples=2, max_tokens=50)))
    steps = Steps(monkeypatch)
    beside = ask(local, bystander, 2, samples=2, max_tokens=50)
    assert steps.begun.wait(60)
    real = local.base.engine.sampling
    failing = ask(local, broken["sampling_session_id"], 1, samples=3, max_tokens=50)
    monkeypatch.setattr(sampling._Open, "_take", failing_for(local, failing.json()["request_id"]))
    steps.go.set()
    failed = local.result(failing)
    assert failed == {"error": "no room", "category": "user"}
    assert tokens_of(local.result(beside)) == expected
    assert real == local.base.engine.sampling and weights.adapter is not None
    assert tokens_of(local.result(ask(local, bystander, 3, samples=2, max_tokens=50))) == expected


def failing_for(local, request_id):
    """`_Open._take` where the engine could not sample one request."""
    from espalier.errors import InputError

    take = sampling._Open._take

    def taken(open_, each):
        request = open_.requests.get(each.prompt)
        is_broken = request is not None and request.future.request_id == request_id
        return take(open_, each._replace(error=InputError("no room")) if is_broken else each)

    return taken


def test_an_error_of_a_step_is_that_of_the_request_that_makes_it(local, monkeypatch):
    """Each is tried again by itself, with its random numbers."""
    one, two = sampler_of(local), sampler_of(local)
    expected = tokens_of(local.result(ask(local, two, 1, samples=2, max_tokens=20, seed=9)))
    step, bad = sampling._Open.step, []

    def stepped(open_):
        if any(request.future.request_id in bad for request in open_.requests.values()):
            raise RuntimeError("a bug")
        return step(open_)

    monkeypatch.setattr(sampling._Open, "step", stepped)
    bad.append(f"{one}:1")
    with local.held():
        # The first is taken at once, and the other one joins it between tokens.
        beside, failing = ask(local, two, 2, samples=2, max_tokens=20, seed=9), ask(local, one, 1, max_tokens=20)
    assert local.result(failing) == {"error": "RuntimeError: a bug", "category": "server"}
    assert tokens_of(local.result(beside)) == expected


def test_alternatives_and_most_likely_tokens_leave_room_for_others(local, monkeypatch):
    one, two = sampler_of(local), sampler_of(local)
    ended, finish = [], local.service.futures.finish
    monkeypatch.setattr(local.service.futures, "finish", lambda future, payload: (ended.append(future.request_id), finish(future, payload)))
    steps = Steps(monkeypatch, after=2)
    tokens = [3, 4, 5] * 6
    large = ask(local, one, 1, tokens=tokens, samples=2, topk_sample_logprobs=3, topk_prompt_logprobs=3, prompt_alt_tokens_k=200,
                target_prompt_logprobs={"data": [1] * 17 * 40, "dtype": "int64", "shape": [17, 40]})
    assert steps.begun.wait(60)
    small = ask(local, two, 1, max_tokens=2)
    steps.go.set()
    local.result(small)
    answer = schema.SampleResponse.FromString(local.result(large))
    assert ended.index(small.json()["request_id"]) < ended.index(large.json()["request_id"])
    assert list(answer.prompt_alt_tokens.tokens.shape) == [17, 200] and list(answer.target_prompt_logprobs.shape) == [17, 40]
    drawn = np.frombuffer(answer.prompt_alt_tokens.tokens.dense, "<i8").reshape(17, 200)
    assert len({tuple(row) for row in drawn}) == 17  # each place has its own random numbers


@pytest.mark.parametrize("more", [
    {"topk_prompt_logprobs": 10**9}, {"topk_sample_logprobs": 10**9}, {"prompt_alt_tokens_k": 2000},
    {"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [2, 1 << 40]}}])  # fmt: skip
def test_results_are_bounded_before_they_are_made(local, more):
    answer = ask(local, sampler_of(local), **more)
    assert answer.status_code == 400 and next(iter(more)) in answer.json()["detail"]


def test_bounds_of_results(monkeypatch):
    sample = requests.Sample(prompt={"chunks": []}, sampling_params={}, topk_prompt_logprobs=20)
    scoring.check_size(sample, 4096, 100)
    monkeypatch.setattr(scoring, "MAX_SCORE_BYTES", 8 * 20 * 4096 - 1)
    with pytest.raises(Refused, match="topk_prompt_logprobs"):
        scoring.check_size(sample, 4096, 100)


@pytest.mark.parametrize("stop", [["a"] * 65, ["x" * 513], [""], [1, "a"], [-1], "x" * 513, 5, [[1]]])
def test_stops_that_are_refused(local, stop):
    body = {"sampling_session_id": sampler_of(local), "seq_id": 1, "prompt": {"chunks": [{"tokens": [1]}]},
            "sampling_params": {"max_tokens": 1, "stop": stop}}
    answer = local.post("asample", body)
    assert answer.status_code == 400 and "stop" in answer.json()["detail"]


def test_stop_strings_need_a_tokenizer(local):
    failed = local.result(ask(local, sampler_of(local), stop="abc"))
    assert failed["category"] == "user" and "need a tokenizer" in failed["error"]
    assert tokens_of(local.result(ask(local, sampler_of(local), stop=[5])))


def test_a_body_is_counted_before_it_is_read(local, monkeypatch):
    model = local.model()
    request = schema.ForwardBackwardRequest(model_id=model, seq_id=5).SerializeToString()
    empty = request + b"\x1a\x00" * (wire.MAX_FIELDS + 1)
    read = []
    real = schema.ForwardBackwardRequest.FromString
    monkeypatch.setattr(schema, "ForwardBackwardRequest", type("Counted", (), {"FromString": lambda body: read.append(len(body)) or real(body)}))
    answer = local.http.post("forward_backward", content=empty)
    assert answer.status_code == 400 and "fields" in answer.json()["detail"] and not read
    # Inside of a datum, and numbers of a shape.
    chunks = b"\x0a\x00" * (wire.MAX_FIELDS + 1)
    nested = request + b"\x1a" + varint(len(chunks)) + chunks
    assert local.http.post("forward_backward", content=nested).status_code == 400 and not read
    shape = b"\x22" + varint(wire.MAX_FIELDS + 1) + b"\x01" * (wire.MAX_FIELDS + 1)
    entry = b"\x0a\x01a\x12" + varint(len(shape)) + shape
    named = b"\x12" + varint(len(entry)) + entry
    packed = request + b"\x1a" + varint(len(named)) + named
    assert local.http.post("forward_backward", content=packed).status_code == 400 and not read
    # Fewer are read, and then are too many data.
    few = local.http.post("forward_backward", content=request + b"\x1a\x00" * 40_000)
    assert few.status_code == 200 and len(read) == 1


def varint(number):
    parts = []
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


def test_sparse_targets_are_bounded_before_they_are_dense(monkeypatch):
    request = schema.ForwardBackwardRequest()
    for _ in range(3):
        datum = request.data.add()
        datum.loss_fn_inputs["target_tokens"].sparse_csr.values = b""
        datum.loss_fn_inputs["target_tokens"].shape.extend([1000, 1000])
    data.check_cells(request.data)
    monkeypatch.setattr(data, "MAX_CELLS", 2_999_999)
    with pytest.raises(Refused, match="2999999 entries"):
        data.check_cells(request.data)


def test_what_waits_counts_as_what_it_takes(local, monkeypatch):
    """Tokens are kept as arrays."""
    sampler, submitted = sampler_of(local), queue.Queue()
    samplers = local.service._samplers[local.base]
    submit = samplers.submit
    monkeypatch.setattr(samplers, "submit", lambda request: (submitted.put(request), submit(request)))
    with local.held():
        promise = ask(local, sampler, tokens=[5] * 40)
        future = local.service.futures.get(promise.json()["request_id"])
        assert future.body_bytes == sample_requests.SAMPLE_BYTES + 160
        request = submitted.get(timeout=60)
        assert request.sample.prompt.chunks == [] and request.prompt.dtype == np.int32
    local.result(promise)


def test_names_of_sequences_are_not_kept(local):
    sampler = sampler_of(local)
    promise = ask(local, sampler, samples=3)
    assert promise.json()["sample_sequence_ids"] == [f"{sampler}:1:{number}" for number in range(3)]
    local.result(promise)
    future = local.service.futures.get(f"{sampler}:1")
    assert future.extra == {} and ask(local, sampler, samples=3).json() == promise.json()


def test_records_count_what_they_take(monkeypatch):
    records = sessions.Records()
    records.add("a:1", [np.array([1.0, 2.0]), np.array([3.0])])
    records.add("b:1", [np.array([4.0])])
    assert records.get("a:1:0").tolist() == [1.0, 2.0] and records.get("a:1:1").tolist() == [3.0]
    for unknown in ("a:1:2", "a:1:-1", "a:1:x", "a:2:0", "", "a:1:" + "9" * 5000):
        assert records.get(unknown) is None
    monkeypatch.setattr(sessions, "RECORDED_BYTES", 2500)
    records.add("c:1", [np.zeros(1)])
    assert records.get("b:1:0") is None and records.get("a:1:0") is not None  # b was not used since


def test_samplers_are_bounded(local, monkeypatch):
    monkeypatch.setattr(service, "MAX_SAMPLERS", 3)
    session = local.post("create_session", {}).json()["session_id"]
    made = [local.post("create_sampling_session", {"session_id": session, "sampling_session_seq_id": number, "base_model": "tiny"})
            .json()["sampling_session_id"] for number in range(4)]
    assert list(local.service.sessions[session].samplers) == made[1:]


def test_a_snapshot_takes_the_place_of_another(local):
    model = local.model()
    session = local.service.sessions[model.split(":")[0]]
    resident = len(local.base._resident)
    for number in range(1, 5):
        local.result(local.post("save_weights_for_sampler", {"model_id": model, "seq_id": number, "sampling_session_seq_id": 0}))
    local.base._thread.submit(lambda: None).result()
    assert len(session.samplers) == 1 and len(local.base._resident) == resident + 1


def test_adapters_that_cannot_be_written_are_bounded(local, monkeypatch, caplog):
    monkeypatch.setattr(base, "MAX_UNWRITTEN", 2)
    monkeypatch.setattr(local.base, "_max_adapters", 0)

    def fail(folder):
        raise OSError("no space")

    models = []
    with monkeypatch.context() as patched:
        patched.setattr(local.base.engine, "save", fail)
        for _ in range(4):  # or fewer, as others are in memory already
            session = local.post("create_session", {}).json()["session_id"]
            made = local.result(local.post("create_model", {"session_id": session, "model_seq_id": 0, "base_model": "tiny",
                                                            "lora_config": {"rank": 2}}))
            if "error" in made:
                break
            models.append(made["model_id"])
    assert made["category"] == "user" and "cannot be written" in made["error"]
    lines = [record for record in caplog.records if "stays in memory" in record.getMessage()]
    assert len(lines) <= len(local.base._resident)  # once for each
    for model in models:
        local.result(local.post("unload_model", {"model_id": model}))


def test_waiting_requests_are_bounded_by_client(local, monkeypatch):
    monkeypatch.setattr(sampling, "MAX_WAITING", 4)
    one, two = sampler_of(local), sampler_of(local)
    with local.held():
        first = [ask(local, one, number) for number in range(1, 7)]
        other = ask(local, two, 1)
    found = [local.result(each) for each in first]
    assert sum(isinstance(each, bytes) for each in found) <= 5 and "at most 4 waiting" in found[-1]["error"]
    assert tokens_of(local.result(other))


class Source:
    """Jobs that take as long as they say."""

    has_begun = False

    def __init__(self, name, log, clock, seconds, clients=1):
        self.clients, self.count = clients, 0
        self._name, self._log, self._clock, self._seconds = name, log, clock, seconds

    def next_job(self):
        return self

    def run(self):
        self._log.append(self._name)
        self._clock[0] += self._seconds
        self.count += 1

    def finish(self):
        pass


def test_sources_of_a_worker_have_equal_time(local, monkeypatch):
    """A model with long jobs has fewer of them; samplers have as much time as they have clients."""
    worker, log, clock = local.base, [], [0.0]
    sources = [Source("long", log, clock, 1.0), Source("short", log, clock, 0.125), Source("three", log, clock, 0.125, clients=3)]
    monkeypatch.setattr(worker, "sources", type(worker.sources)(sources))
    monkeypatch.setattr(worker, "_used", {})
    monkeypatch.setattr(worker, "_now", 0.0)
    for _ in range(400):
        source, job = worker._next_job()
        begun = clock[0]
        job.run()
        worker._used[source] += (clock[0] - begun) / source.clients
    seconds = dict(zip(("long", "short", "three"), (source.count * source._seconds for source in sources)))
    assert abs(seconds["long"] - seconds["short"]) <= 1.5 and abs(seconds["three"] - 3 * seconds["short"]) <= 3.5
