# SPDX-License-Identifier: Apache-2.0
"""Planned restarts of `espalier serve`: what its clients had is there afterwards, bit for bit, and never an older state."""

import json
import resource
import signal
import stat
import threading
import time

import httpx
import pytest

pytest.importorskip("tinker", reason="the client of the Tinker API")

import numpy as np
from tinker import types

from conftest import seed_of
from engines import init_model
from espalier.errors import InputError
from espalier.server import futures, restart, training
from espalier.server.store import CheckpointPath, Store
from servers import Local, client, datum, forward_backward, prompt, server
from test_server_state import killed_at

ADAM = types.AdamParams(learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=0.5)
PARAMS = types.SamplingParams(max_tokens=6, seed=3, stop=[])
STEPS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory, espalier):
    return init_model(espalier, tmp_path_factory.mktemp("qwen3"))


def batch(number):
    draw = np.random.default_rng(seed_of(70) + number)
    start = draw.integers(0, 61, 5).tolist()
    rows = [start + draw.integers(0, 61, 4).tolist() for _ in range(3)]
    return [datum(tokens, weights=draw.standard_normal(len(tokens) - 1).astype(np.float32)) for tokens in rows]


class Run:
    """Steps of an official client. What it gets depends on weights and optimiser."""

    def __init__(self, address):
        self.training = client(address).create_lora_training_client("tiny", rank=2, seed=1).result()
        self.got = []

    def ask(self, number, begin=0, end=4):
        """Requests of a step, of which none is waited for. `forward` keeps the others apart, so that each is a forest of its own."""
        first, second = batch(2 * number), batch(2 * number + 1)
        calls = [lambda: self.training.forward_backward(first, "cross_entropy"), lambda: self.training.forward(first, "cross_entropy"),
                 lambda: self.training.forward_backward(second, "cross_entropy"), lambda: self.training.optim_step(ADAM)]  # fmt: skip
        return [call() for call in calls[begin:end]]

    def take(self, *asked):
        for each in asked:
            result = each.result(timeout=240)
            self.got.append(dict(result.metrics))
            self.got += [output["logprobs"].data for output in getattr(result, "loss_fn_outputs", ())]

    def folder(self, state):
        """Of a checkpoint of the end."""
        path = CheckpointPath.parse(self.training.save_state("end").result(timeout=240).path)
        return state / "runs" / path.run.replace(":", ".") / path.kind / path.name / "adapter"

    def files(self, state):
        files = self.folder(state).glob("*.safetensors")
        return {file.name: file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def calm(folder, tmp_path_factory):
    """What a client gets whose server goes on: results, and files of its checkpoint."""
    state = tmp_path_factory.mktemp("calm")
    with Local(folder, state) as local:
        run = Run(local.address)
        for number in range(STEPS):
            run.take(*run.ask(number))
        assert len({str(each) for each in run.got}) == 9 * STEPS  # `forward` repeats what the first forward_backward gave
        return run.got, run.files(state)


def port_of(address):
    return int(address.rpartition(":")[2])


def left(state):
    return sorted(path.name for path in state.glob("planned-restart*"))


def test_a_client_goes_on_between_two_steps(folder, tmp_path, calm, capfd):
    with Local(folder, tmp_path) as local:
        port = port_of(local.address)
        run = Run(local.address)
        for number in range(2):
            run.take(*run.ask(number))
        sampler = run.training.save_weights_and_get_sampling_client().result()
        before = [each.tokens for each in sampler.sample(prompt(4, 5, 6), 2, PARAMS).result().sequences]
        session = run.training.holder.get_session_id()
        seen = local.service.sessions[session].seen
        local.stop_in_order()
        assert left(tmp_path) == ["planned-restart"]
    with Local(folder, tmp_path, port=port) as local:
        assert left(tmp_path) == []
        assert local.service.sessions[session].seen >= seen and local.service.model(run.training.model_id).next_seq_id == 10
        for number in range(2, STEPS):
            run.take(*run.ask(number))
        assert [each.tokens for each in sampler.sample(prompt(4, 5, 6), 2, PARAMS).result(timeout=240).sequences] == before
        assert (run.got, run.files(tmp_path)) == calm
    said = capfd.readouterr().err
    assert "kept for the next start: 1 session, 1 model, 1 sampler" in said
    assert "came back from the last server: 1 session, 1 model, 1 sampler" in said


@pytest.mark.parametrize("done", [1, 3])
def test_gradients_that_no_step_has_used_are_computed_again(folder, tmp_path, calm, done):
    """After so many requests of a step, and once more before they were computed again."""
    with Local(folder, tmp_path) as local:
        port = port_of(local.address)
        run = Run(local.address)
        run.take(*run.ask(0))
        run.take(*run.ask(1, end=done))
        local.stop_in_order()
    with Local(folder, tmp_path, port=port) as local:
        assert local.service.model(run.training.model_id).weights.lacks_gradients
        local.stop_in_order()
    with Local(folder, tmp_path, port=port) as local:
        run.take(*run.ask(1, begin=done))
        for step in range(2, STEPS):
            run.take(*run.ask(step))
        assert not local.service.model(run.training.model_id).weights.passes
        assert (run.got, run.files(tmp_path)) == calm


def test_a_process_that_is_terminated_with_requests_in_its_queue(folder, tmp_path, calm):
    """The official client waits for all of them while the server ends, and gets their results from the next one."""
    with server(folder, tmp_path) as (address, first):
        run = Run(address)
        run.take(*run.ask(0))
        asked = [each for number in range(1, STEPS) for each in run.ask(number)]
        asked[0].result(timeout=240)
        first.send_signal(signal.SIGTERM)
        assert first.wait(120) in (128 + signal.SIGTERM, -signal.SIGTERM)
        assert any("kept for the next start: 1 session, 1 model, 0 samplers" in line for line in first.said), first.said
        record = json.loads(json.loads((tmp_path / "planned-restart/restart.json").read_text())["record"])
        assert record["sessions"][0]["models"][0]["next_seq_id"] < 4 * STEPS + 1
        modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "planned-restart").rglob("*")}
        assert modes == {0o700, 0o600} and stat.S_IMODE((tmp_path / "planned-restart").stat().st_mode) == 0o700
        with server(folder, tmp_path, "--port", port_of(address)) as (_, second):
            assert left(tmp_path) == [] and any("came back from the last server: 1 session" in line for line in second.said)
            run.take(*asked)
            assert (run.got, run.files(tmp_path)) == calm


# Without the official client.


def train(local, model, number, half=0):
    found = local.http.post("forward_backward", content=forward_backward(model, number, [7, 8, 9, 10 + half]).SerializeToString(),
                            headers={"content-type": "application/x-protobuf"})  # fmt: skip
    return local.result(found)


def step(local, model, number):
    return local.result(local.post("optim_step", {"model_id": model, "seq_id": number, "adam_params": {"learning_rate": 0.01}}))


def a_trained_model(local, rank=2):
    """Its id; the last request has number 2."""
    model = local.model(rank)
    assert isinstance(train(local, model, 1), bytes) and "metrics" in step(local, model, 2)
    return model


def kept(folder, state, make, **options):
    """What `make` gets of a server that then stops in order."""
    with Local(folder, state, **options) as local:
        made = make(local)
        local.stop_in_order()
    return made


def test_a_kill_after_a_planned_restart_brings_nothing_back(folder, tmp_path):
    model = kept(folder, tmp_path, a_trained_model)
    with server(folder, tmp_path) as (address, process):
        with httpx.Client(base_url=f"{address}/api/v1/", timeout=60) as http:
            assert http.post("get_info", json={"model_id": model}).status_code == 200
        process.kill()
        process.wait()
    with Local(folder, tmp_path) as local:
        assert local.post("get_info", {"model_id": model}).status_code == 404
        assert local.post("session_heartbeat", {"session_id": model.partition(":")[0]}).status_code == 410


def test_a_kill_in_each_phase_of_a_stop(tmp_path):
    """Nothing is read that is not whole."""
    def write(store):
        with store.writing_restart() as folder:
            (folder / "weights").mkdir()
            (folder / "weights/first").write_text("new")
            (folder / "second").write_text("new")

    found = []
    for number in range(100):
        store = Store(tmp_path / str(number))
        is_killed = killed_at(lambda: write(store), number)
        store.close()
        store = Store(tmp_path / str(number))
        found.append(store.restart_folder() is not None)
        if found[-1]:
            assert {path.name for path in store.restart_folder().rglob("*")} == {"weights", "first", "second"}
        assert left(tmp_path / str(number)) == ["planned-restart"] * found[-1]
        store.remove_restart()
        assert left(tmp_path / str(number)) == []
        store.close()
        if not is_killed:
            break
    assert found[0] is False and found[-1] is True and len(found) > 6 and found == sorted(found)


def test_a_kill_while_a_start_removes_what_it_read(tmp_path):
    for number in range(20):
        store = Store(tmp_path / str(number))
        with store.writing_restart() as folder:
            (folder / "first").write_text("new")
        is_killed = killed_at(store.remove_restart, number)
        store.close()
        store = Store(tmp_path / str(number))
        assert (store.restart_folder() is not None) == (number == 0)  # whole, or gone
        store.close()
        if not is_killed:
            return
    raise AssertionError


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["restart.json", "arrays.safetensors"])
@pytest.mark.parametrize("damage", [flip, lambda path: path.unlink(), lambda path: path.write_bytes(b""),
                                    lambda path: (path.unlink(), path.symlink_to("/dev/zero"))])  # fmt: skip
def test_damaged_files_are_refused(folder, tmp_path, capfd, name, damage):
    model = kept(folder, tmp_path, a_trained_model)
    damage(tmp_path / "planned-restart" / name)
    capfd.readouterr()
    with Local(folder, tmp_path) as local:
        (line,) = [line for line in capfd.readouterr().err.splitlines() if "espalier serve" in line]
        assert line.startswith("espalier serve: nothing came back of what the last server kept: ") and name in line
        assert local.post("get_info", {"model_id": model}).status_code == 404 and not local.service.sessions
        assert left(tmp_path) == []


def two_models(local):
    return a_trained_model(local), a_trained_model(local)


def test_damaged_weights_leave_out_their_model(folder, tmp_path, capfd):
    first, second = kept(folder, tmp_path, two_models)
    flip(tmp_path / "planned-restart/weights-0/adapter_model.safetensors")
    capfd.readouterr()
    with Local(folder, tmp_path) as local:
        lines = [line for line in capfd.readouterr().err.splitlines() if "espalier serve" in line]
        assert len(lines) == 2 and lines[0].startswith(f"espalier serve: {first} did not come back: ") and "damaged" in lines[0]
        assert "2 sessions, 1 model, 0 samplers" in lines[1]
        assert local.post("get_info", {"model_id": first}).status_code == 404
        assert isinstance(train(local, second, 3), bytes)


def test_a_start_with_other_settings_is_refused_and_loses_nothing(folder, tmp_path, espalier):
    other, state = init_model(espalier, tmp_path / "other", dtype="float32"), tmp_path / "state"
    model = kept(folder, state, a_trained_model)
    differs = r"--model tiny: expected the weights and the --dtype that the last server had, received others: start with those, "
    for start, why in (
            (lambda: Local(other, state), differs),
            (lambda: Local(folder, state, dtype="float32"), differs),
            (lambda: Local(folder, state, name="large"), "--model: expected tiny, over which .*, received other models: name it, "),
    ):  # fmt: skip
        with pytest.raises(InputError, match=why + f"or remove {state}/planned-restart, which has"):
            start()
    with Local(folder, state) as local:
        assert isinstance(train(local, model, 3), bytes)


def test_a_full_disk_keeps_nothing_and_the_stop_ends(folder, tmp_path, capfd):
    with Local(folder, tmp_path) as local:
        model = a_trained_model(local)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, hard))
        try:
            local.stop_in_order()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert "kept nothing for the next start: " in capfd.readouterr().err and left(tmp_path) == []
    with Local(folder, tmp_path) as local:
        assert local.post("get_info", {"model_id": model}).status_code == 404


def test_results_are_there_and_repeated_requests_get_them(folder, tmp_path, monkeypatch):
    def make(local):
        model = local.model()
        return model, train(local, model, 1)

    model, result = kept(folder, tmp_path, make)
    with Local(folder, tmp_path) as local:
        ask = lambda: local.post("retrieve_future", {"request_id": f"{model}:1"})
        assert ask().content == result and train(local, model, 1) == result
        assert local.post("retrieve_future", {"request_id": f"{model}:create_model"}).json()["model_id"] == model
        monkeypatch.setattr(restart, "RESULT_BYTES", futures.RESULT_BYTES + len(result) + 100)
        local.stop_in_order()
    with Local(folder, tmp_path) as local:
        assert ask().content == result
        assert local.post("retrieve_future", {"request_id": f"{model}:create_model"}).status_code == 410  # as an expired one


def test_every_kind_of_request_that_waits_is_done(folder, tmp_path):
    """In its turn, also what fails, and also behind a number that comes only after the restart."""
    def make(local):
        model = local.model()
        path = local.result(local.post("save_weights", {"model_id": model, "seq_id": 1, "path": "first"}))["path"]
        turn = lambda number, **more: {"model_id": model, "seq_id": number, **more}
        local.http.post("forward_backward", content=forward_backward(model, 3, [7, 8, 9]).SerializeToString())
        local.post("optim_step", turn(4, adam_params={"learning_rate": 0.01}))
        local.post("save_weights", turn(5, path="second", user_metadata={"a": "b"}))
        local.post("save_weights_for_sampler", turn(6, path="third"))
        local.post("save_weights_for_sampler", turn(7, sampling_session_seq_id=0))
        local.post("save_weights_external", turn(8, path="fourth"))
        local.post("load_weights", turn(9, path=path, optimizer=True))
        local.post("optim_step", turn(10, adam_params={"learning_rate": -1}))
        local.http.post("forward_backward", content=forward_backward(model, 11, [7, 8, 1000]).SerializeToString())
        return model

    model = kept(folder, tmp_path, make)
    with Local(folder, tmp_path) as local:
        get = lambda number: local.post("retrieve_future", {"request_id": f"{model}:{number}"})
        assert local.service.futures.pending == 9 and local.service.futures._pending_bytes > 0
        assert isinstance(train(local, model, 2), bytes)
        while get(11).status_code == 408:
            pass
        assert "protobuf" in get(3).headers["content-type"] and "metrics" in get(4).json()
        assert [get(number).json()["type"] for number in range(5, 10)] == [
            "save_weights", "save_weights_for_sampler", "save_weights_for_sampler", "save_weights_external", "load_weights"]
        assert "learning_rate" in get(10).json()["error"] and "token ids" in get(11).json()["error"]
        listed = {each["checkpoint_id"]: each for each in local.http.get("checkpoints").json()["checkpoints"]}
        assert listed.keys() == {"weights/first", "weights/second", "sampler_weights/third", "external_weights/fourth"}
        assert listed["weights/second"]["user_metadata"] == {"a": "b"}
        assert local.http.get(f"samplers/{model.partition(':')[0]}:sample:0").status_code == 200


def test_what_has_no_room_fails_by_name(folder, tmp_path, monkeypatch):
    def make(local):
        models = two_models(local)
        for model in models:
            train(local, model, 3)
        local.http.post("forward_backward", content=forward_backward(models[1], 5, [7, 8, 9]).SerializeToString())
        monkeypatch.setattr(restart, "DATA_BYTES", 0)
        return models

    first, second = kept(folder, tmp_path, make)
    with Local(folder, tmp_path) as local:
        answer = local.post("retrieve_future", {"request_id": f"{second}:5"}).json()
        assert answer["error"] == "the server stops, and has no room to keep this request; send it again once the server is back"
        for model, number in ((first, 4), (second, 6)):
            assert "could not keep the gradients of this model: send forward_backward again" in step(local, model, number)["error"]
            assert isinstance(train(local, model, number + 1), bytes) and "metrics" in step(local, model, number + 2)


def test_gradients_with_too_much_data_or_an_error_are_not_repeated(folder, tmp_path, monkeypatch):
    def make(local):
        models = two_models(local)
        monkeypatch.setattr(training, "PASSES_BYTES", 0)
        train(local, models[0], 3)
        monkeypatch.setattr(training, "PASSES_BYTES", 1 << 30)
        train(local, models[1], 3)
        with monkeypatch.context() as patch:
            patch.setattr(training, "_forward_backward", lambda *arguments: 1 / 0)
            assert "error" in train(local, models[1], 4)
        assert [local.service.model(each).weights.passes for each in models] == [None, None]
        return models

    first, second = kept(folder, tmp_path, make)
    with Local(folder, tmp_path) as local:
        assert "send forward_backward again" in step(local, first, 4)["error"]
        assert "send forward_backward again" in step(local, second, 5)["error"]

    def fails(job):
        raise ArithmeticError("as memory that does not suffice")

    model = kept(folder, tmp_path / "more", lambda local: (model := local.model(), train(local, model, 1))[0])
    with Local(folder, tmp_path / "more") as local, monkeypatch.context() as patch:
        patch.setattr(training, "_run_passes", fails)
        assert "could not be computed again (as memory that does not suffice)" in step(local, model, 2)["error"]


def test_a_request_that_failed_while_it_went_on_leaves_out_its_model(folder, tmp_path):
    """Its client was told to send it again: a step must not be done twice."""
    go = threading.Event()

    def make(local):
        first, second = two_models(local)
        local.service.model(first)._waiting[3] = training.Operation(local.service.futures.create(f"{first}:3"), lambda model: go.wait() and {})
        local.base._work.get_loop().call_soon_threadsafe(local.base.wake)
        while local.service.model(first).waiting:
            pass
        threading.Timer(1.5, go.set).start()
        return first, second

    with Local(folder, tmp_path) as local:
        first, second = make(local)
        local.stop_in_order(seconds=0.5)
    with Local(folder, tmp_path) as local:
        assert local.post("get_info", {"model_id": first}).status_code == 404
        assert local.post("get_info", {"model_id": second}).status_code == 200
        assert "send it again once the server is back" in local.post("retrieve_future", {"request_id": f"{first}:3"}).json()["error"]


def test_what_comes_while_the_server_stops_is_sent_to_the_next_one(folder, tmp_path):
    with Local(folder, tmp_path) as local:
        model = a_trained_model(local)
        session = model.partition(":")[0]
        sampler = local.post("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"})
        sampler = sampler.json()["sampling_session_id"]
        local.stop_in_order()
        new = {"session_id": session, "sampling_session_seq_id": 1, "base_model": "tiny"}
        for path, body in (("create_session", {}), ("create_sampling_session", new),
                           ("create_model", {**new, "model_seq_id": 1, "lora_config": {"rank": 2}}),
                           ("join_sampling_session", {"sampling_session_id": sampler}),
                           ("optim_step", {"model_id": model, "seq_id": 3, "adam_params": {}})):  # fmt: skip
            assert local.post(path, body).status_code == 429, path
        assert local.post("session_heartbeat", {"session_id": session}).status_code == 200


def test_samplers_come_back(folder, tmp_path):
    """Those of snapshots, of a checkpoint, of a base, and inflight ones, which take the newest weights of their model."""
    def sample(local, sampler, number):
        ask = {"sampling_session_id": sampler, "seq_id": number, "prompt": {"chunks": [{"tokens": [3, 4, 5]}]},
               "sampling_params": {"max_tokens": 4, "seed": 2, "stop": []}, "prompt_logprobs": True}  # fmt: skip
        return local.result(local.post("asample", ask))

    def make(local):
        model = a_trained_model(local)
        session = model.partition(":")[0]
        path = local.result(local.post("save_weights", {"model_id": model, "seq_id": 3}))["path"]
        turn = {"model_id": model, "sampling_session_seq_id": 0, "kind": "inflight"}
        ids = [local.result(local.post("save_weights_for_sampler", {**turn, "seq_id": 4}))["sampling_session_id"]]
        train(local, model, 5)
        step(local, model, 6)
        turn = {"model_id": model, "sampling_session_seq_id": 1}
        ids.append(local.result(local.post("save_weights_for_sampler", {**turn, "seq_id": 7}))["sampling_session_id"])
        for number, source in ((2, {"base_model": "tiny"}), (3, {"model_path": path})):
            asked = local.post("create_sampling_session", {"session_id": session, "sampling_session_seq_id": number, **source})
            ids.append(asked.json()["sampling_session_id"])
        assert local.post("join_sampling_session", {"sampling_session_id": ids[1]}).json()["client_counter"] == 1
        found = [sample(local, each, 0) for each in ids]
        target = {"sampling_session_id": ids[1], "cloned_sampler_id": 0}
        told = local.post("retrieve_futures", {"target": target, "timeout": 1}).json()
        assert len(told["completions"]) == 1
        return model, ids, found, told

    model, ids, found, told = kept(folder, tmp_path, make)
    assert found[0] == found[3] and len(set(found)) == 3
    with Local(folder, tmp_path) as local:
        assert local.http.get(f"samplers/{ids[3]}").json()["model_path"].startswith("tinker://")
        assert [sample(local, each, 1) for each in ids] == found
        target = {"sampling_session_id": ids[1], "cloned_sampler_id": 0}
        new = local.post("retrieve_futures", {"target": target, "prev_cursor": told["cursor"], "timeout": 5}).json()
        assert new["cursor"] == told["cursor"] + 1 and new["completions"][-1]["request_id"] == f"{ids[1]}:1"
        assert local.post("join_sampling_session", {"sampling_session_id": ids[1]}).json()["client_counter"] == 2
        turn = {"model_id": model, "sampling_session_seq_id": 0, "kind": "inflight", "seq_id": 8}
        local.result(local.post("save_weights_for_sampler", turn))
        assert sample(local, ids[0], 2) == found[1]  # the newest weights are those of the snapshot


def test_whole_weights_come_back(folder, tmp_path):
    def make(local):
        model = a_trained_model(local, rank=0)
        turn = {"model_id": model, "seq_id": 3, "sampling_session_seq_id": 0}
        sampler = local.result(local.post("save_weights_for_sampler", turn))["sampling_session_id"]
        train(local, model, 4)
        return model, sampler

    def rest(local, model):
        found = [train(local, model, 5, half=1), step(local, model, 6)["metrics"]["grad_norm"], train(local, model, 7)]
        return [*found, step(local, model, 8)["metrics"]["grad_norm"]]

    with Local(folder, tmp_path / "calm", full_models=1) as local:
        expected = rest(local, make(local)[0])
    model, sampler = kept(folder, tmp_path / "state", make, full_models=1)
    with pytest.raises(InputError, match="--full-models: expected at least 1, as the last server kept, received 0: give that number, or"):
        Local(folder, tmp_path / "state")
    with Local(folder, tmp_path / "state", full_models=1) as local:
        assert rest(local, model) == expected and local.http.get(f"samplers/{sampler}").status_code == 200
        assert local.service._full_models == {model}


def test_sessions_of_a_key_come_back_to_it(folder, tmp_path):
    keys = {"ann": "tml-ann", "bob": "tml-bob"}
    with Local(folder, tmp_path, api_key="tml-root", keys=keys) as local:
        local.http.headers["X-API-Key"] = "tml-ann"
        model = a_trained_model(local)
        local.stop_in_order()
        assert left(tmp_path) == [] and left(tmp_path / "keys/ann") == ["planned-restart"] and left(tmp_path / "keys/bob") == []
    with Local(folder, tmp_path, api_key="tml-root", keys=keys) as local:
        for key in ("tml-root", "tml-bob"):
            local.http.headers["X-API-Key"] = key
            assert local.post("get_info", {"model_id": model}).status_code == 404
        local.http.headers["X-API-Key"] = "tml-ann"
        assert isinstance(train(local, model, 3), bytes)
        assert left(tmp_path / "keys/ann") == []


def test_weights_that_are_not_finite_stay_behind_alone(folder, tmp_path, capfd):
    def make(local):
        first, second = two_models(local)

        def write(weights, place, original=local.base.write):
            if weights is local.service.model(first).weights:
                raise restart.InputError("expected finite weights")
            original(weights, place)

        local.base.write = write
        return first, second

    first, second = kept(folder, tmp_path, make)
    assert f"{first} is not kept for the next start: " in capfd.readouterr().err
    with Local(folder, tmp_path) as local:
        assert local.post("get_info", {"model_id": first}).status_code == 404
        assert isinstance(train(local, second, 3), bytes)


def test_recorded_sequences_and_idle_time_come_back(folder, tmp_path):
    def make(local):
        session = local.post("create_session", {}).json()["session_id"]
        local.service.records.add(f"{session}:sample:0:0", [np.float32([-1, -2]), np.float32([-3])])
        local.service.sessions[session].seen -= 500
        return session

    session = kept(folder, tmp_path, make)
    with Local(folder, tmp_path) as local:
        found = [local.service.records.get(f"{session}:sample:0:0:{number}") for number in (0, 1, 2)]
        assert [each if each is None else each.tolist() for each in found] == [[-1, -2], [-3], None]
        assert 500 <= time.monotonic() - local.service.sessions[session].seen < 590
