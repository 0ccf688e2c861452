# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of `espalier serve` as clients load and copy them: whole, undamaged, or refused."""

import asyncio
import itertools
import resource
import shutil
from contextlib import contextmanager

import pytest

pytest.importorskip("tinker", reason="the client of the Tinker API")

from espalier.native import core
from espalier.server import app, disk, service
from espalier.server import store as stores
from espalier.server.requests import CHECKPOINT_METADATA_BYTES, RUN_METADATA_BYTES
from espalier.server.store import CheckpointPath

from engines import init_model
from servers import Local, forward_backward, parked


@pytest.fixture(scope="module")
def folder(tmp_path_factory, espalier):
    return init_model(espalier, tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def local(folder, tmp_path_factory):
    with Local(folder, tmp_path_factory.mktemp("state"), full_models=4) as local:
        yield local


@contextmanager
def session(local):
    """A session, which ends afterwards with all that it has."""
    session_id = local.post("create_session", {}).json()["session_id"]
    yield session_id
    assert local.post(f"sessions/{session_id}/finish", {}).status_code == 204


class Model:
    """A model of a client."""

    def __init__(self, local, session_id, rank, seed=1):
        self.local, self._numbers = local, itertools.count(1)
        config = {"rank": rank, "seed": seed} if rank else None
        self.model_id = local.result(local.post("create_model", {"session_id": session_id, "model_seq_id": 0, "base_model": "tiny",
                                                                 "lora_config": config}))["model_id"]  # fmt: skip

    def call(self, route, **body):
        """The result of an operation, or its error."""
        return self.local.result(self.local.post(route, {"model_id": self.model_id, "seq_id": next(self._numbers), **body}))

    def train(self):
        message = forward_backward(self.model_id, next(self._numbers), [3, 4, 5, 6])
        assert isinstance(self.local.result(self.local.http.post("forward_backward", content=message.SerializeToString())), bytes)
        assert "metrics" in self.call("optim_step", adam_params={"learning_rate": 1e-2})

    def save(self, name, route="save_weights", **more):
        """The path of a new checkpoint."""
        return self.call(route, path=name, **more)["path"]


def load_new(local, path, optimizer):
    with session(local) as session_id:
        return local.result(local.post("load_weights", {"session_id": session_id, "model_seq_id": 0, "path": path,
                                                        "optimizer": optimizer}))  # fmt: skip


def new_sampler(local, path):
    with session(local) as session_id:
        return local.post("create_sampling_session", {"session_id": session_id, "sampling_session_seq_id": 0, "model_path": path})


WAYS = {"with its optimiser": lambda local, model, path: model.call("load_weights", path=path, optimizer=True),
        "without it": lambda local, model, path: model.call("load_weights", path=path, optimizer=False),
        "into a new model": lambda local, model, path: load_new(local, path, True),
        "into a new model without its optimiser": lambda local, model, path: load_new(local, path, False),
        "for sampling": lambda local, model, path: new_sampler(local, path),
        "as a copy": lambda local, model, path: local.post("copy_weights", {"source_path": path})}  # fmt: skip


def refusal(answer):
    """The error in a result or in an answer, whose status is then 422; None where there is none."""
    if isinstance(answer, dict):
        return answer.get("error")
    assert answer.status_code in (200, 422)
    return answer.json().get("detail")


def adapter_of(local, path):
    return local.store.find(CheckpointPath.parse(path))


@pytest.mark.parametrize("rank", [2, 0])
def test_a_flipped_bit_is_refused_in_each_way_to_load(local, rank):
    with session(local) as session_id:
        model = Model(local, session_id, rank)
        model.train()
        path = model.save("a")
        folder = adapter_of(local, path)
        names = {file.name for file in folder.iterdir()}
        assert {"optimizer.safetensors", "manifest.json", "trainer_state.json"} < names
        runs = len(local.store.runs())
        for name, way in WAYS.items():
            for file in sorted(folder.iterdir()):
                whole = file.read_bytes()
                damaged = bytearray(whole)
                damaged[len(whole) // 2] ^= 4
                file.write_bytes(damaged)
                fault = refusal(way(local, model, path))
                file.write_bytes(whole)
                assert fault and fault.startswith(f"{path}: the checkpoint is damaged: "), (name, file.name, fault)
            (folder / "manifest.json").rename(folder.parent / "manifest.json")
            assert refusal(way(local, model, path)) == f"{path}: the checkpoint is damaged: manifest.json is missing"
            (folder.parent / "manifest.json").rename(folder / "manifest.json")
        assert len(local.store.runs()) == runs  # what was refused leaves none
        assert [refusal(way(local, model, path)) for way in WAYS.values()] == [None] * len(WAYS)
        assert not parked(local.store.folder)


def overwriting(local, path, source):
    """What overwrites a checkpoint with the files of another, once."""
    def once():
        if not done:
            done.append(True)
            with local.store.writing(CheckpointPath.parse(path), overwrite=True) as folder:
                disk.copy_tree(adapter_of(local, source), folder)

    done = []
    return once


def before(original, work):
    """A function that does other work first."""
    def call(*arguments, **options):
        work()
        return original(*arguments, **options)

    return call


@pytest.mark.parametrize("rank", [2, 0])
def test_what_is_copied_or_loaded_while_it_is_overwritten_is_the_old_one(local, monkeypatch, rank):
    with session(local) as session_id:
        model = Model(local, session_id, rank)
        old = model.save("old")
        model.train()
        new = model.save("new")
        # Between the files of the copy, and between the names of the second folder and the look at their checksums.
        for number, (place, name) in enumerate([(shutil, "copyfile"), (stores, "check_files"), (core, "manifest_fault")]):
            path = model.save(f"a{number}")
            with local.store.writing(CheckpointPath.parse(path), overwrite=True) as folder:
                disk.copy_tree(adapter_of(local, old), folder)
            with monkeypatch.context() as patch:
                work = overwriting(local, path, new)
                patch.setattr(place, name, before(getattr(place, name), lambda work=work: (patch.undo(), work())))
                copy = local.post("copy_weights", {"source_path": path}).json()["tinker_path"]
            assert contents(local, copy) == contents(local, old) and contents(local, path) == contents(local, new)
            assert refusal(model.call("load_weights", path=copy, optimizer=True)) is None
        path = model.save("b")
        with local.store.writing(CheckpointPath.parse(path), overwrite=True) as folder:
            disk.copy_tree(adapter_of(local, old), folder)
        engine = type(model_engine(local, model))
        for name in ("load",):  # the engine reads the files after the server has looked at them
            with monkeypatch.context() as patch:
                work = overwriting(local, path, new)
                patch.setattr(engine, name, before(getattr(engine, name), work))
                assert refusal(model.call("load_weights", path=path, optimizer=True)) is None
        assert contents(local, path) == contents(local, new)
        assert contents(local, model.save("loaded")) == contents(local, old)
        assert not parked(local.store.folder)


def contents(local, path):
    return {name: file.read_bytes() for name, file in disk.plain_files(adapter_of(local, path)).items()}


def model_engine(local, model):
    return local.service.model(model.model_id).worker.engine


@pytest.mark.parametrize("rank", [2, 0])
def test_checkpoints_for_samplers_and_elsewhere_have_no_optimiser(local, rank):
    with session(local) as session_id:
        model = Model(local, session_id, rank)
        model.train()
        full = model.save("a")
        for route in ("save_weights_for_sampler", "save_weights_external"):
            path = model.save("a", route)
            assert not list(adapter_of(local, path).glob("optimizer*"))
            (listed,) = [each for each in local.store.checkpoints(model.model_id) if each["tinker_path"] == path]
            assert listed["size_bytes"] < 0.7 * next(each["size_bytes"] for each in local.store.checkpoints(model.model_id)
                                                     if each["tinker_path"] == full)  # fmt: skip
            for loaded in (model.call("load_weights", path=path, optimizer=True), load_new(local, path, True)):
                assert refusal(loaded).startswith(f"{path}: it has no optimiser state: load it without")
            assert refusal(model.call("load_weights", path=path, optimizer=False)) is None
            assert refusal(load_new(local, path, False)) is None and refusal(new_sampler(local, path)) is None
            weights = "adapter_model.safetensors" if rank else "model.safetensors"
            assert contents(local, path)[weights] == contents(local, full)[weights]
        model.train()  # goes on after a save without its optimiser
        assert refusal(model.call("load_weights", path=full, optimizer=True)) is None


def test_a_full_disk_while_a_checkpoint_is_copied(local):
    with session(local) as session_id:
        model = Model(local, session_id, 2)
        path = model.save("a")
        runs = sorted((local.store.folder / "runs").iterdir())
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, hard))
        try:
            failed = local.post("copy_weights", {"source_path": path})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert failed.status_code == 507 and "disk of --state is full" in failed.json()["detail"]
        assert sorted((local.store.folder / "runs").iterdir()) == runs and len(local.store.runs()) == len(runs)
        assert local.post("copy_weights", {"source_path": path}).status_code == 200


def test_metadata_are_bounded_and_lists_leave_out_long_ones(local):
    with session(local) as session_id:
        model = Model(local, session_id, 2)
        fits, long = {"note": "x" * (CHECKPOINT_METADATA_BYTES - 12)}, {"note": "\u00e9" * (CHECKPOINT_METADATA_BYTES // 2)}
        assert "path" in model.call("save_weights", path="fits", user_metadata=fits)
        failed = model.call("save_weights", path="long", user_metadata=long)
        assert failed["error"] == f"user_metadata: expected at most 4096 bytes as JSON, received {4096 + 12}"
        assert [each["user_metadata"] for each in local.store.checkpoints(model.model_id)] == [fits]
        for number, given in enumerate((fits, long), 1):
            body = {"session_id": session_id, "model_seq_id": number, "base_model": "tiny", "lora_config": {"rank": 1},
                    "user_metadata": given}  # fmt: skip
            run = local.result(local.post("create_model", body))["model_id"]
            (listed,) = [each for each in local.http.get("training_runs").json()["training_runs"] if each["training_run_id"] == run]
            assert listed["user_metadata"] == (fits if given is fits else None)
            assert local.http.get(f"training_runs/{run}").json()["user_metadata"] == given
        body = {"session_id": session_id, "model_seq_id": 3, "base_model": "tiny", "user_metadata": {"a": "x" * RUN_METADATA_BYTES}}
        refused = local.post("create_model", body)
        assert refused.status_code == 400 and f"user_metadata: expected at most {RUN_METADATA_BYTES} bytes" in refused.json()["detail"]


def test_a_page_of_a_list_is_bounded(local, monkeypatch):
    monkeypatch.setattr(app, "PAGE_ROWS", 2)
    with session(local) as session_id:
        model = Model(local, session_id, 2)
        for number in range(3):
            model.save(f"{number}")
        answer = local.http.get("checkpoints", params={"limit": 1000}).json()
        assert len(answer["checkpoints"]) == 2 == answer["cursor"]["limit"] and answer["cursor"]["total_count"] >= 3
        assert len(local.http.get(f"training_runs/{model.model_id}/checkpoints").json()["checkpoints"]) == 3


def test_damage_while_the_server_runs_is_no_error_of_lists(local):
    with session(local) as session_id:
        model = Model(local, session_id, 2)
        path = model.save("a")
        folder = adapter_of(local, path)
        for file in (folder.parent / "about.json", folder.parents[2] / "run.json"):
            file.write_text("{}")
        for route in ("checkpoints", "training_runs", f"training_runs/{model.model_id}", f"training_runs/{model.model_id}/checkpoints"):
            assert local.http.get(route).status_code == 200
        assert local.post("weights_info", {"tinker_path": path}).status_code == 200
        shutil.rmtree(folder.parent)
        place = f"training_runs/{model.model_id}/checkpoints/weights/a"
        assert local.http.get(f"{place}/external_weights_urls").status_code == 422
        assert local.http.put(f"{place}/ttl", json={"ttl_seconds": 5}).status_code == 422
        assert "is missing" in refusal(model.call("load_weights", path=path, optimizer=True))
        assert local.http.delete(place).status_code == 204 and path not in local.http.get("checkpoints").text


def test_the_watch_removes_what_has_expired(local, monkeypatch):
    with session(local) as session_id:
        path = Model(local, session_id, 2).save("a", ttl_seconds=1)
        folder = adapter_of(local, path)
        monkeypatch.setattr(service, "SESSION_SECONDS", 0.2)  # the watch looks four times in that
        monkeypatch.setattr(local.service, "end_what_is_over", nothing)
        watch = asyncio.run_coroutine_threadsafe(local.service.watch_sessions(), local.base._work.get_loop())
        while folder.exists():
            assert not watch.done()
        watch.cancel()


async def nothing():
    pass
