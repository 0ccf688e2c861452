# SPDX-License-Identifier: Apache-2.0
"""What `espalier serve` keeps on disk: kills in each phase of a save, full disks, and adapters that are not in memory."""

import os
import signal
import threading
from pathlib import Path

import pytest

pytest.importorskip("tinker", reason="the client of the Tinker API")

from espalier import InputError
from espalier.server.errors import Refused
from espalier.server.store import CheckpointPath, Store

from engines import init_model
from servers import Local, parked, server

PATH = CheckpointPath("s-1:train:0", "weights", "last")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, espalier):
    return init_model(espalier, tmp_path_factory.mktemp("qwen3"))


def a_store(folder):
    store = Store(folder)
    store.add_run(PATH.run, {"base_model": "tiny", "lora": {"rank": 2}, "user_metadata": None})
    return store


def write(store, text, **options):
    with store.writing(PATH, overwrite=True, **options) as folder:
        folder.mkdir()
        (folder / "first").write_text(text)
        (folder / "second").write_text(text)


def content(store):
    """Of the checkpoint, which is listed if and only if it is whole."""
    listed = [each["tinker_path"] for each in store.checkpoints()]
    try:
        texts = {(store.find(PATH) / name).read_text() for name in ("first", "second")}
    except Refused:
        assert listed == []
        return None
    assert listed == [str(PATH)] and len(texts) == 1
    return texts.pop()


# All that changes a file while a checkpoint is written.
PHASES = [(Path, "mkdir"), (Path, "write_text"), (Path, "rename"), (os, "fsync"), (os, "unlink"), (os, "rmdir")]


def killed_at(work, number):
    """Whether a process was killed before its change with this number; else it did all its work."""
    child = os.fork()
    if child == 0:
        left = number

        def counted(original):
            def changed(*arguments, **options):
                nonlocal left
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*arguments, **options)

            return changed

        for place, name in PHASES:
            setattr(place, name, counted(getattr(place, name)))
        try:
            work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("before", [None, "old"])
def test_a_kill_in_each_phase_of_a_save(tmp_path, before):
    found = []
    for number in range(100):
        folder = tmp_path / str(number)
        store = a_store(folder)
        if before is not None:
            write(store, before, ttl_seconds=3600)
        is_killed = killed_at(lambda: write(store, "new"), number)
        store.close()
        store = Store(folder)  # a restart
        found.append(content(store))
        if found[-1] is not None:  # times belong to the content
            assert (store.checkpoints()[0]["expires_at"] is None) == (found[-1] == "new")
        assert not list(folder.glob("runs/*/*/.*"))
        write(store, "again")
        assert content(store) == "again"
        store.close()
        if not is_killed:
            break
    assert found[0] == before and found[-1] == "new" and len(found) > 6
    assert found == [before] * found.count(before) + ["new"] * found.count("new")


def test_a_kill_while_a_checkpoint_is_deleted(tmp_path):
    for number in range(20):
        store = a_store(tmp_path / str(number))
        write(store, "old")
        is_killed = killed_at(lambda: store.delete(PATH), number)
        store.close()
        store = Store(tmp_path / str(number))
        assert content(store) == ("old" if number == 0 else None)
        store.close()
        if not is_killed:
            return
    raise AssertionError


def test_a_save_that_fails_leaves_the_old_one(tmp_path):
    store = a_store(tmp_path)
    write(store, "old")
    with pytest.raises(OSError), store.writing(PATH, overwrite=True) as folder:
        folder.mkdir()
        (folder / "first").write_text("new")
        raise OSError("no space left on device")
    assert content(store) == "old" and not list(tmp_path.glob("runs/*/*/.*"))
    with pytest.raises(Refused, match="exists already"), store.writing(PATH):
        pass


def test_checkpoints_expire(tmp_path, monkeypatch):
    store = a_store(tmp_path)
    write(store, "old", ttl_seconds=60)
    assert content(store) == "old"
    monkeypatch.setattr("espalier.server.store.now", lambda: "9998-01-01T00:00:00+00:00")
    assert content(store) is None and not list(tmp_path.glob("runs/*/weights/*"))


def test_two_servers_of_one_folder(tmp_path):
    store = Store(tmp_path)
    with pytest.raises(InputError, match="no other server"):
        Store(tmp_path)
    store.close()


def adam(model, number, rate=1e-2):
    return {"model_id": model, "seq_id": number, "adam_params": {"learning_rate": rate}}


def fwdbwd(local, model, number, tokens):
    from espalier.server import schema

    message = schema.ForwardBackwardRequest(model_id=model, seq_id=number, loss_fn="cross_entropy")
    each = message.data.add()
    each.model_input.add().encoded_text.tokens = bytes_of(tokens[:-1], "<i4")
    for name, values, dtype, kind in (("target_tokens", tokens[1:], schema.INT64, "<i8"),
                                      ("weights", [1.0] * (len(tokens) - 1), schema.FLOAT32, "<f4")):  # fmt: skip
        each.loss_fn_inputs[name].dense = bytes_of(values, kind)
        each.loss_fn_inputs[name].dtype = dtype
    return local.http.post("forward_backward", content=message.SerializeToString())


def bytes_of(values, kind):
    import numpy as np

    return np.array(values, kind).tobytes()


def three_clients(local):
    """Weights and samples after three steps in turns, with gradients that wait and with snapshots."""
    models = [local.model(rank, seed) for rank, seed in ((1, 5), (2, 6), (3, 7))]
    snapshots = []
    for step in range(3):
        for number, model in enumerate(models):
            assert isinstance(local.result(fwdbwd(local, model, 3 * step + 1, [3, 4, 5 + number, 9 + step])), bytes)
        for model in models:  # the gradients of all wait
            assert "metrics" in local.result(local.post("optim_step", adam(model, 3 * step + 2)))
            saved = {"model_id": model, "seq_id": 3 * step + 3, "sampling_session_seq_id": step}
            snapshots.append(local.result(local.post("save_weights_for_sampler", saved))["sampling_session_id"])
    found = []
    for sampler in snapshots * 2:
        ask = {"sampling_session_id": sampler, "seq_id": len(found), "prompt": {"chunks": [{"tokens": [3, 4, 5]}]},
               "sampling_params": {"max_tokens": 4, "seed": 2, "stop": []}, "prompt_logprobs": True}  # fmt: skip
        found.append(local.result(local.post("asample", ask)))
    for model in models:
        path = local.result(local.post("save_weights", {"model_id": model, "seq_id": 10, "path": "end"}))["path"]
        folder = local.store.find(CheckpointPath.parse(path))
        found += [(folder / "adapter_model.safetensors").read_bytes(), *(file.read_bytes() for file in folder.glob("optim*"))]
    return models, found


def test_adapters_on_disk_have_the_bits_of_those_in_memory(tmp_path, folder):
    with Local(folder, tmp_path / "many", max_adapters=32) as local:
        _, expected = three_clients(local)
        assert not parked(tmp_path / "many")
    with Local(folder, tmp_path / "one", max_adapters=1) as local:
        models, found = three_clients(local)
        assert len(local.base._resident) == 1 and 3 <= len(parked(tmp_path / "one")) <= 12  # one for each adapter at most
        for model in models:
            assert local.post(f"sessions/{model.split(':')[0]}/finish", {}).status_code == 204
        assert not parked(tmp_path / "one") and not local.base._resident
    assert found == expected and len(set(expected)) > 9


def test_an_adapter_that_cannot_be_written_stays_in_memory(tmp_path, folder):
    """A full disk, or weights that are nan: no request of another client fails."""
    with Local(folder, tmp_path, max_adapters=1) as local:
        first = local.model()
        place = tmp_path / "parked-weights"
        place.rename(tmp_path / "elsewhere")
        place.write_text("no folder: as a full disk")
        second = local.model()
        for number in (1, 2):
            for model in (first, second):
                assert isinstance(local.result(fwdbwd(local, model, 2 * number - 1, [1, 2, 3])), bytes)
                assert "metrics" in local.result(local.post("optim_step", adam(model, 2 * number)))
        assert len(local.base._resident) == 2
        place.unlink()
        (tmp_path / "elsewhere").rename(place)
        local.result(fwdbwd(local, first, 5, [1, 2, 3]))
        assert len(local.base._resident) == 1


def test_a_full_disk_while_a_checkpoint_is_written(tmp_path, folder, monkeypatch):
    import resource

    with Local(folder, tmp_path) as local:
        model = local.model()
        save = lambda number, **more: local.result(local.post("save_weights", {"model_id": model, "seq_id": number, "path": "a", **more}))
        assert "path" in save(1)
        local.result(fwdbwd(local, model, 2, [1, 2, 3]))
        local.result(local.post("optim_step", adam(model, 3)))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, hard))
        try:
            failed = save(4, overwrite=True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert "error" in failed, failed
        (listed,) = local.http.get("checkpoints").json()["checkpoints"]
        assert not list(tmp_path.glob("runs/*/*/.*"))
        load = {"model_id": model, "seq_id": 5, "path": listed["tinker_path"], "optimizer": True}
        assert local.result(local.post("load_weights", load))["path"] == listed["tinker_path"]
        assert "path" in save(6, overwrite=True)


def test_a_server_that_is_killed_and_one_that_is_asked_to_end(tmp_path, folder):
    import httpx

    class Remote(Local):
        def __init__(self, address):
            self.http = httpx.Client(base_url=f"{address}/api/v1/", timeout=60)

    with server(folder, tmp_path) as (address, process):
        local = Remote(address)
        model = local.model()
        path = local.result(local.post("save_weights", {"model_id": model, "seq_id": 1, "path": "a"}))["path"]
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    with server(folder, tmp_path) as (address, process):
        local = Remote(address)
        assert [each["tinker_path"] for each in local.http.get("checkpoints").json()["checkpoints"]] == [path]
        session = local.post("create_session", {}).json()["session_id"]
        load = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True}
        model = local.result(local.post("load_weights", load))["model_id"]
        promises = [fwdbwd(local, model, 1, list(range(1, 50)))]
        answers = []
        waiting = threading.Thread(target=lambda: answers.append(local.result(promises[0])))
        waiting.start()
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(60) in (0, 128 + signal.SIGTERM, -signal.SIGTERM)
        waiting.join()
        assert len(answers) == 1 and isinstance(answers[0], bytes)
        assert not any("Traceback" in line for line in process.said)
