# SPDX-License-Identifier: Apache-2.0
"""What `espalier serve` keeps on disk: kills in each phase of a save, full disks, and adapters that are not in memory."""

import errno
import json
import os
import shutil
import signal
import stat
import threading
from pathlib import Path

import pytest

pytest.importorskip("tinker", reason="the client of the Tinker API")

from espalier import InputError
from espalier.server import store as stores
from espalier.server.errors import Refused
from espalier.server.store import CheckpointPath, Store

from engines import init_model
from servers import Local, forward_backward, parked, server

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


def test_a_name_is_durable_before_the_save_returns(tmp_path, monkeypatch):
    """Files first, then the folder with them, then the name; of new folders their names, too."""
    store = a_store(tmp_path)
    events = []
    original = {"fsync": os.fsync, "rename": Path.rename}
    monkeypatch.setattr(os, "fsync", lambda file: (events.append(("sync", Path(os.readlink(f"/proc/self/fd/{file}")).name)),
                                                   original["fsync"](file)))  # fmt: skip
    monkeypatch.setattr(Path, "rename", lambda self, to: (events.append(("rename", Path(to).name)), original["rename"](self, to)))
    write(store, "new")
    named = events.index(("rename", "last"))
    before, after = events[:named], events[named:]
    assert {("sync", name) for name in ("first", "second", "adapter", "about.json.new", "s-1.train.0")} <= set(before)
    assert ("sync", "weights") in after
    new = {name for kind, name in before if kind == "sync" and name.startswith(".new-")}
    assert len(new) == 1 and before[-1] == ("sync", new.pop())
    events.clear()
    store.set_ttl(PATH, 60)
    assert events[-2:] == [("rename", "about.json"), ("sync", "last")]
    events.clear()
    store.delete(PATH)
    assert events[0][0] == "rename" and events[0][1].startswith(".gone-") and events[1] == ("sync", "weights")


def lose_name(folder, number=0):
    """As a disk may have a checkpoint whose last rename a power cut has lost."""
    kind = folder / "runs/s-1.train.0/weights"
    return (kind / "last").rename(kind / f".new-{number:016x}")


def test_a_start_gives_a_whole_checkpoint_its_name(tmp_path):
    store = a_store(tmp_path)
    write(store, "new")
    store.close()
    lose_name(tmp_path)
    store = Store(tmp_path)
    assert content(store) == "new"
    lose_name(tmp_path)  # of two the newer one
    write(store, "newer")
    lose_name(tmp_path, 1)
    store.close()
    store = Store(tmp_path)
    assert content(store) == "newer" and [each.name for each in (tmp_path / "runs/s-1.train.0/weights").iterdir()] == ["last"]


def test_a_start_removes_what_is_not_whole_and_nothing_else(tmp_path, caplog):
    store = a_store(tmp_path)
    write(store, "old")
    store.close()
    kind = tmp_path / "runs/s-1.train.0/weights"
    shutil.copytree(kind / "last", half := kind / f".new-{1:016x}")
    (half / "about.json").unlink()
    shutil.copytree(kind / "last", nameless := kind / f".new-{2:016x}")  # of an older server
    about = json.loads((nameless / "about.json").read_text())
    (nameless / "about.json").write_text(json.dumps({key: value for key, value in about.items() if key != "name"}))
    (kind / f".gone-{3:016x}").mkdir()
    theirs = [kind / ".new-mine", kind / ".old", tmp_path / "runs/qwen/checkpoints/.old-best", tmp_path / "runs/qwen/weights/.new-1"]
    for folder in theirs:
        folder.mkdir(parents=True)
    store = Store(tmp_path)
    assert content(store) == "old" and not half.exists() and not (kind / f".gone-{3:016x}").exists()
    assert (nameless / "adapter/first").exists() and all(folder.exists() for folder in theirs)
    (line,) = caplog.messages
    assert "whole checkpoint without a name" in line and str(nameless) in line


DAMAGED = [("about.json", ""), ("about.json", "{}"), ("about.json", "[]"), ("about.json", '{"size_bytes": 1}'),
           ("about.json", '{"time": "2026-01-01", "expires_at": 5}'), ("about.json", '{"time": 5}'),
           ("about.json", '{"time": "once"}'), ("about.json", '{"time": "2026-01-01", "user_metadata": {"a": 1}}'),
           ("run.json", ""), ("run.json", "{}"), ("run.json", '{"created": "2026-01-01", "base_model": "tiny"}'),
           ("run.json", '{"training_run_id": "s-2:train:0", "created": "2026-01-01", "base_model": "tiny", "lora": {"rank": 1}}'),
           ("run.json", '{"training_run_id": "s-1:train:0", "created": 1, "base_model": "tiny", "lora": {"rank": 1}}'),
           ("run.json", '{"training_run_id": "s-1:train:0", "created": "2026-01-01", "base_model": "tiny", "lora": {"rank": "1"}}')]  # fmt: skip


@pytest.mark.parametrize("name, text", DAMAGED)
def test_a_damaged_file_leaves_out_that_one(tmp_path, caplog, name, text):
    store = a_store(tmp_path)
    write(store, "old")
    other = CheckpointPath("s-2:train:0", "weights", "fine")
    store.add_run(other.run, {"base_model": "tiny", "lora": {"rank": 2}, "user_metadata": {"a": "b"}})
    with store.writing(other) as folder:
        folder.mkdir()
    store.close()
    damaged = tmp_path / "runs/s-1.train.0" / ("run.json" if name == "run.json" else "weights/last/about.json")
    damaged.write_text(text)
    store = Store(tmp_path)
    assert [each["tinker_path"] for each in store.checkpoints()] == [str(other)]
    assert next(each["training_run_id"] for each in store.runs()) == other.run
    assert (store.run(PATH.run) is None) == (name == "run.json")
    (line,) = caplog.messages
    assert line.startswith(f"{damaged}: left out of lists: ")
    for call in (store.find, store.run_of, store.delete, lambda path: store.set_ttl(path, 5)):
        with pytest.raises(Refused, match="found none") as refused:
            call(PATH)
        assert refused.value.status == 404
    with pytest.raises(Refused, match="damaged; `overwrite` replaces it"), store.writing(PATH):
        pass
    assert damaged.read_text() == text and (tmp_path / "runs/s-1.train.0/weights/last/adapter/first").read_text() == "old"


def test_many_damaged_files_are_counted(tmp_path, caplog):
    for number in range(25):
        (tmp_path / f"runs/s-{number}.train.0").mkdir(parents=True)
        (tmp_path / f"runs/s-{number}.train.0/run.json").write_text("{")
    Store(tmp_path)
    assert len(caplog.messages) == 21 and caplog.messages[-1].endswith("5 more are left out of lists")


def test_folders_of_the_user_stay(tmp_path):
    (tmp_path / "parked").mkdir()
    (tmp_path / "parked/car.jpg").write_text("mine")
    tmp_path.chmod(0o755)
    a_store(tmp_path).close()
    assert (tmp_path / "parked/car.jpg").read_text() == "mine"
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755 and stat.S_IMODE((tmp_path / "runs").stat().st_mode) == 0o700
    (tmp_path / "parked-weights/.espalier").unlink()
    (tmp_path / "parked-weights/car.jpg").write_text("mine")
    with pytest.raises(InputError, match="parked-weights: expected a folder of the server"):
        Store(tmp_path)
    assert (tmp_path / "parked-weights/car.jpg").read_text() == "mine"
    (tmp_path / "parked-weights/car.jpg").unlink()
    store = Store(tmp_path)  # the refused one has let go of its locks
    store.parked().mkdir()
    (tmp_path / "parked-weights/car.jpg").write_text("mine")
    store.close()
    Store(tmp_path)
    assert [each.name for each in parked(tmp_path)] == ["car.jpg"]


def test_a_state_folder_is_for_its_owner_alone(tmp_path):
    before = os.umask(0o022)
    try:
        store = a_store(tmp_path / "state")
        write(store, "new")
    finally:
        os.umask(before)
    folders = [tmp_path / "state", *(each for each in (tmp_path / "state").rglob("*") if each.is_dir() and each.name != "adapter")]
    assert len(folders) > 5 and all(stat.S_IMODE(folder.stat().st_mode) == 0o700 for folder in folders)
    records = [tmp_path / "state/lock", *(tmp_path / "state").rglob("*.json")]
    assert len(records) == 3 and all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in records)
    store.close()
    (tmp_path / "state").chmod(0o755)
    (tmp_path / "state/runs/s-1.train.0").chmod(0o755)
    Store(tmp_path / "state")  # that of an older server
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == stat.S_IMODE((tmp_path / "state/runs/s-1.train.0").stat().st_mode) == 0o700


def test_two_servers_of_one_folder(tmp_path):
    store = Store(tmp_path)
    for _ in range(2):
        with pytest.raises(InputError, match="no other server"):
            Store(tmp_path)
        (tmp_path / "lock").unlink(missing_ok=True)  # the second one makes a new file
    store.close()
    Store(tmp_path)


@pytest.mark.parametrize("name", ["lock", "runs", "parked-weights"])
def test_a_link_in_place_of_a_name_of_the_server(tmp_path, name):
    target = tmp_path / "target"
    target.mkdir() if name != "lock" else target.write_text("mine")
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / name).symlink_to(target)
    with pytest.raises(InputError, match=f"{name}: expected no link"):
        Store(tmp_path / "state")
    assert (name == "lock" and target.read_text() == "mine") or not list(target.iterdir())


def test_links_below_the_runs_are_not_followed(tmp_path, caplog):
    store = a_store(tmp_path / "state")
    write(store, "mine")
    store.close()
    run = tmp_path / "state/runs/s-1.train.0"
    outside = shutil.copytree(run, tmp_path / "outside")
    (tmp_path / "state/runs/s-2.train.0").symlink_to(outside)
    (run / "sampler_weights").symlink_to(outside / "weights")
    (run / "weights/link").symlink_to(outside / "weights/last")
    shutil.copytree(run / "weights/last", run / "weights/about")
    (run / "weights/about/about.json").unlink()
    (run / "weights/about/about.json").symlink_to(outside / "weights/last/about.json")
    store = Store(tmp_path / "state")
    assert content(store) == "mine" and len(store.runs()) == 1 and len(caplog.messages) == 3
    (run / "weights/last/adapter/link").symlink_to(outside / "weights/last/about.json")
    for call in (store.files, lambda path: store.reading(path).__enter__(), lambda path: store.copy(path, "c:train:0", {}, None)):
        with pytest.raises(Refused, match="link is a link or a device") as refused:
            call(PATH)
        assert refused.value.status == 422
    (run / "weights/last/adapter").rename(run / "adapter")
    (run / "weights/last/adapter").symlink_to(run / "adapter")
    with pytest.raises(Refused, match="is missing, or is a link"):
        store.files(PATH)
    assert not parked(tmp_path / "state")


def test_expired_checkpoints_are_removed_without_a_list(tmp_path, monkeypatch):
    store = a_store(tmp_path)
    write(store, "old", ttl_seconds=60)
    folder = tmp_path / "runs/s-1.train.0/weights/last"
    store.tidy([PATH.run])
    assert folder.exists()
    with monkeypatch.context() as later:
        later.setattr(stores, "now", lambda seconds=0: "9998-01-01T00:00:00+00:00")
        store.tidy([PATH.run])
    assert not list(folder.parent.iterdir()) and len(store.runs()) == 1


def test_runs_without_checkpoints_go_after_a_week_or_where_they_are_many(tmp_path, monkeypatch):
    store = a_store(tmp_path)
    write(store, "old")
    runs = [f"s-{number}:train:0" for number in range(2, 7)]
    for run in runs:
        store.add_run(run, {"base_model": "tiny", "lora": {"rank": 2}})
    (tmp_path / "runs/s-4.train.0/notes").write_text("mine")
    known = lambda: sorted(run["training_run_id"] for run in store.runs())
    store.tidy([])
    assert known() == [PATH.run, *runs]
    monkeypatch.setattr(stores, "EMPTY_RUNS", 2)
    store.tidy(runs[:1])  # four are in no use, and the oldest two of them too many; one has a file of the user
    assert known() == [PATH.run, runs[0], *runs[2:]]
    assert (tmp_path / "runs/s-4.train.0/run.json").exists() and not (tmp_path / "runs/s-3.train.0").exists()
    monkeypatch.setattr(stores, "EMPTY_RUN_SECONDS", -60)
    with store.writing(CheckpointPath(runs[4], "weights", "a")) as folder:
        folder.mkdir()
        store.tidy(runs[:1])  # what is being written is in use, too
    assert known() == [PATH.run, runs[0], runs[2], runs[4]] and content_of_other(store, runs[4])
    store.close()
    assert len(Store(tmp_path).runs()) == 4


def content_of_other(store, run):
    return [each["checkpoint_id"] for each in store.checkpoints(run)] == ["weights/a"]


def test_lists_read_no_file(tmp_path, monkeypatch):
    store = a_store(tmp_path)
    write(store, "old")

    def fail(*arguments, **options):
        raise AssertionError("a list reads the disk")

    for place, name in ((os, "open"), (os, "scandir"), (os, "listdir"), (os, "stat"), (os, "lstat"), (Path, "open")):
        monkeypatch.setattr(place, name, fail)
    (run,) = store.runs()
    assert run == store.run(PATH.run) and run["last_checkpoint"] == store.checkpoints(PATH.run)[0] == store.checkpoints()[:5][0]


def full(*arguments, **options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


CHANGES = {"save": lambda store: write(store, "new"), "ttl": lambda store: store.set_ttl(PATH, 5),
           "run": lambda store: store.add_run("s-2:train:0", {"base_model": "tiny", "lora": {"rank": 2}}),
           "copy": lambda store: store.copy(PATH, "c:train:0", {"base_model": "tiny", "lora": {"rank": 2}}, None)}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_full_disk_in_each_phase_of_a_change(tmp_path, monkeypatch, name):
    """The error names it, and all is as before."""
    monkeypatch.setattr(stores, "check_files", lambda folder, subject: None)
    store = a_store(tmp_path)
    write(store, "old")
    state = lambda: ({file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}, [*store.runs()], [*store.checkpoints()])
    before = state()
    for number in range(100):
        left = number

        def counted(original):
            def changed(*arguments, **options):
                nonlocal left
                left -= 1
                return full() if left == -1 else original(*arguments, **options)

            return changed

        with monkeypatch.context() as patch:
            for place, call in ((Path, "mkdir"), (Path, "rename"), (json, "dump"), (shutil, "copyfile"), (os, "link"), (os, "fsync")):
                patch.setattr(place, call, counted(getattr(place, call)))
            try:
                CHANGES[name](store)
                break
            except Refused as error:
                assert error.status == 507 and "disk of --state is full (No space left on device)" in str(error)
        assert state() == before
    assert number >= 2 and state() != before


def adam(model, number, rate=1e-2):
    return {"model_id": model, "seq_id": number, "adam_params": {"learning_rate": rate}}


def fwdbwd(local, model, number, tokens):
    return local.http.post("forward_backward", content=forward_backward(model, number, tokens).SerializeToString())


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
        for weights in local.base._resident.values():
            weights.park_after = 0.0  # as after a minute
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
    assert not any(file.stat().st_mode & 0o077 for file in tmp_path.rglob("*"))  # for the user of the server alone
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
