# SPDX-License-Identifier: Apache-2.0
"""Weights that go to a vLLM server over NCCL. Sockets stand for NCCL, and for vLLM a server that takes requests and bytes as vLLM
0.33.0 does."""

import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import publish_over_sockets
from conftest import REPOSITORY
from espalier.publish import weight_transfer
from espalier.publish.kinds import VLLM
from espalier.publish.server import Server
from test_faults import checkpoint, data, flags, last_of_each  # noqa: F401
from vllm_stand_in import VllmServer


@pytest.fixture(scope="module")
def espalier(espalier):
    return lambda *arguments, **options: espalier(*last_of_each(arguments), **options)


@pytest.fixture
def server():
    server = VllmServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def weights():
    generator = torch.Generator().manual_seed(3)
    random = lambda dtype, *shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return {"a.weight": random(torch.bfloat16, 7, 3), "b.weight": random(torch.float32, 5), "c.scale": random(torch.float64),
            "d.weight": random(torch.float16, 2, 3, 5), "e.bias": random(torch.bfloat16, 1), "f.weight": random(torch.float32, 40),
            "g.none": random(torch.float32, 0, 4), "h.weight": random(torch.bfloat16, 9)}  # fmt: skip


@pytest.fixture
def folder(weights, tmp_path):
    """In two files, whose order is not that of the names."""
    folder = tmp_path / "weights/step_7"
    folder.mkdir(parents=True)
    names = sorted(weights)
    save_file({name: weights[name] for name in names[4:]}, folder / "model-00001-of-00002.safetensors")
    save_file({name: weights[name] for name in names[:4]}, folder / "model-00002-of-00002.safetensors")
    return folder


def send(server, folder, group=None):
    weight_transfer.send(Server(server.url, VLLM, wait=0), folder, group or publish_over_sockets.Rank())


def same(received, sent):
    assert received.keys() == sent.keys()
    for name, tensor in sent.items():
        assert received[name].dtype == tensor.dtype and received[name].shape == tensor.shape, name
        assert torch.equal(received[name], tensor), name


RESET = "/reset_prefix_cache?reset_external=true"
ONE_UPDATE = ["/get_world_size", "/pause?mode=keep", "/shutdown_weight_transfer_engine", "/init_weight_transfer_engine",
              "/start_weight_update", "/update_weights", "/finish_weight_update", "/shutdown_weight_transfer_engine",
              RESET, "/resume"]  # fmt: skip
AFTER_A_FAILURE = ["/finish_weight_update", "/resume"]


# ---- What arrives --------------------------------------------------------------------------------------------------


# Limits at, below and above sums of sizes, which are 8, 160, 0, 20, 2, 18, 42 and 60 bytes in the order of sending.
@pytest.mark.parametrize("limit", [1, 7, 8, 167, 168, 169, 188, 190, 309, 310, 2**20])
def test_every_worker_has_the_weights_to_the_bit(server, weights, folder, monkeypatch, limit):
    monkeypatch.setattr(weight_transfer, "BUFFER_BYTES", limit)
    send(server, folder)
    assert server.requests == ONE_UPDATE and not server.paused
    for worker in server.workers:
        same(worker.weights, weights)
        assert worker.version == "step_7" and worker.group is None
        sizes = [sum(each.nbytes for each in chunk.values()) for chunk in worker.loaded]
        assert all(size > limit for size in sizes[:-1])


def test_memory_is_a_buffer_and_the_largest_tensor(server, folder, monkeypatch):
    """A chunk is released before the next is packed."""
    limit, sizes, alive = 1, [], []

    class Counting(publish_over_sockets.Rank):
        def broadcast(self, buffer):
            sizes.append(buffer.numel())
            super().broadcast(buffer)

    packed = weight_transfer._packed

    def counted(chunk, device):
        assert all(part() is None for part in alive)
        buffer = packed(chunk, device)
        alive.append(weakref.ref(buffer))
        return buffer

    monkeypatch.setattr(weight_transfer, "BUFFER_BYTES", limit)
    monkeypatch.setattr(weight_transfer, "_packed", counted)
    send(server, folder, Counting())
    assert len(sizes) == 7 and max(sizes) <= limit + 160 and sum(sizes) == 310


def test_a_run_publishes_to_a_server(espalier, flags, server, tmp_path):
    command = f"{sys.executable} {REPOSITORY}/tests/python/publish_over_sockets.py --buffer-bytes 5000 --weight-transfer nccl {server.url}"
    espalier("train", *flags, "--out", tmp_path / "run", "--steps", 2, "--publish", tmp_path / "out", "--publish-command",
             f"PYTHONPATH={REPOSITORY}/python {command}", "--publish-every", 1)  # fmt: skip
    assert server.requests == 2 * ["/model_info", *ONE_UPDATE]
    for worker in server.workers:
        same(worker.weights, load_file(checkpoint(tmp_path / "run", 2) / "model.safetensors"))
        assert worker.version == "step_2" and len(worker.loaded) > 1


# ---- What fails ----------------------------------------------------------------------------------------------------


def refused(server, folder, match):
    with pytest.raises((OSError, ValueError), match=match):
        send(server, folder)


def test_without_a_gpu_nothing_is_asked_of_the_server(server, folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OSError, match="--weight-transfer nccl needs a GPU"):
        weight_transfer.send(Server(server.url, VLLM, wait=0), folder)
    assert server.requests == []


def test_what_cannot_be_sent_is_refused_before_a_request(server, folder, weights, tmp_path):
    refused(server, tmp_path, "no weights in")
    save_file({"a": torch.zeros(2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    refused(server, tmp_path, "model.safetensors: a is I8: over NCCL go F64, F32, F16, BF16")
    damaged = folder / "model-00002-of-00002.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    refused(server, folder, f"cannot read {damaged}")
    (folder / "adapter_config.json").touch()
    refused(server, folder, "an adapter is not sent over NCCL")
    assert server.requests == []


@pytest.mark.parametrize("at", range(1, len(ONE_UPDATE)))
def test_a_failure_of_any_request_is_named_and_the_server_goes_on(server, weights, folder, at):
    """The next update is whole."""
    path = ONE_UPDATE[at]
    server.fails = {path: (500, {"detail": "no\nroom"})}
    with pytest.raises(OSError, match=rf'{path.partition("?")[0]}: expected status 200, received 500 Internal Server Error: '
                       r'{"detail": "no\\nroom"}'):  # fmt: skip
        send(server, folder)
    after = {"/pause?mode=keep": ["/resume"], "/shutdown_weight_transfer_engine": ["/finish_weight_update", path, "/resume"],
             RESET: ["/resume"], "/resume": []}  # fmt: skip
    assert server.requests == ONE_UPDATE[: ONE_UPDATE.index(path) + 1] + after.get(path, AFTER_A_FAILURE)
    assert server.paused == (path == "/resume")
    server.fails = {}
    send(server, folder)
    assert not server.paused
    for worker in server.workers:
        same(worker.weights, weights)


def wait_until_idle(worker):
    while worker.active:
        time.sleep(0.01)


def test_a_worker_that_fails_in_the_middle_ends_the_transfer(server, weights, folder, monkeypatch):
    monkeypatch.setattr(weight_transfer, "BUFFER_BYTES", 1)
    worker, other = server.workers
    receive = worker.receive

    def failing(chunk):
        if len(worker.loaded) == 3:
            raise MemoryError("no room for weights")
        receive(chunk)

    worker.receive = failing
    refused(server, folder, "/update_weights: .*500 .*no room for weights")
    assert not server.paused and server.requests[-2:] == AFTER_A_FAILURE
    wait_until_idle(other)
    worker.receive = receive
    send(server, folder)
    same(worker.weights, weights)


class FailsAt(publish_over_sockets.Rank):
    """Waits without an end in one of its calls, or fails in it once the server has been `asked` for the same."""

    def __init__(self, call, error=None, asked=None):
        super().__init__()
        self.fails, self.error, self.asked, self.aborted = call, error, asked, threading.Event()

    def join(self, *arguments):
        self.reached("join")
        super().join(*arguments)

    def broadcast(self, buffer):
        super().broadcast(buffer)
        self.reached("broadcast")

    def reached(self, call):
        if call == self.fails:
            (self.asked or self.aborted).wait()
            raise self.error or OSError("aborted")

    def abort(self):
        self.aborted.set()
        super().abort()


@pytest.mark.parametrize("call", ["join", "broadcast"])
def test_a_communicator_that_fails_ends_the_transfer(server, folder, call):
    asked, request = threading.Event(), {"join": "/init_weight_transfer_engine", "broadcast": "/update_weights"}[call]
    server.before = lambda path: path != request or asked.set()
    with pytest.raises(OSError, match="unhandled cuda error"):
        send(server, folder, FailsAt(call, OSError("unhandled cuda error"), asked))
    assert not server.paused and server.requests[-2:] == AFTER_A_FAILURE


@pytest.mark.parametrize("call, path", [("join", "/init_weight_transfer_engine"), ("broadcast", "/update_weights")])
def test_a_communicator_that_waits_for_a_server_that_has_failed_is_aborted(server, folder, call, path):
    server.fails = {path: (500, {"detail": "Weight transfer not configured."})}
    group = FailsAt(call)
    if call == "broadcast":
        group.broadcast = lambda buffer: group.reached("broadcast")
    with pytest.raises(OSError, match=f"{path}: .*500 .*not configured"):
        send(server, folder, group)
    assert group.aborted.is_set() and not server.paused


def test_a_server_that_does_not_take_the_bytes_is_not_waited_for_for_ever(server, folder, monkeypatch):
    monkeypatch.setattr(weight_transfer, "LOAD_SECONDS", 0.5)
    server.fails = {"/update_weights": (200, {})}
    group = FailsAt("broadcast")
    group.broadcast = lambda buffer: group.reached("broadcast")
    with pytest.raises(OSError, match="has not taken the weights within 0.5 seconds"):
        send(server, folder, group)
    assert group.aborted.is_set() and not server.paused


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("over_nccl", [True, False])
def test_a_sender_that_is_told_to_end_lets_the_server_go_on(server, folder, number, over_nccl):
    reached, free = threading.Event(), threading.Event()

    def wait(path):
        if path in ("/update_weights", "/collective_rpc"):
            reached.set()
            free.wait()

    server.before = wait
    words = ["--weight-transfer", "nccl"] if over_nccl else []
    process = subprocess.Popen([sys.executable, REPOSITORY / "tests/python/publish_over_sockets.py", *words, server.url, folder],
                               env={"PYTHONPATH": str(REPOSITORY / "python")}, stderr=subprocess.PIPE, text=True)  # fmt: skip
    assert reached.wait(120)
    process.send_signal(number)
    _, said = process.communicate(timeout=120)
    free.set()
    assert process.returncode == 1 and said == f"{server.url}: interrupted\n"
    assert not server.paused and server.requests[-1] == "/resume"


# ---- NCCL's calls --------------------------------------------------------------------------------------------------


NCCL = Path(torch.__file__).parents[1] / "nvidia/nccl/include"


@pytest.mark.skipif(not (NCCL / "nccl.h").exists() or torch.version.cuda is None, reason="no nccl.h")
def test_nccl_is_called_as_its_header_says(folder, tmp_path, monkeypatch):
    """A library that is compiled against nccl.h writes down what it is called with."""
    library, log = tmp_path / "nccl.so", tmp_path / "log"
    cuda = next(Path(torch.__file__).parents[1].glob("nvidia/cu*/include"))
    subprocess.run(["g++", "-std=c++17", "-shared", "-fPIC", f"-I{NCCL}", f"-I{cuda}", "-o", library,
                    REPOSITORY / "tests/python/nccl_stand_in.cpp"], check=True)  # fmt: skip
    monkeypatch.setenv("NCCL_STAND_IN_LOG", str(log))
    stream = type("Stream", (), {"cuda_stream": 0x1234, "synchronize": lambda self: log.open("a").write("synchronize\n")})()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    devices = []

    class OnDevice:
        def __init__(self, device):
            devices.append(device)

        __enter__ = __exit__ = lambda *_: None

    monkeypatch.setattr(torch.cuda, "device", OnDevice)
    group = weight_transfer.NcclGroup(str(library))
    assert group.device == torch.device("cuda", 0)
    group.device = torch.device("cpu")
    identifier = bytes(range(128, 256))
    assert group.unique_id() == identifier
    group.join(3)
    group.broadcast(torch.tensor([5, 0, 7], dtype=torch.uint8))
    group.abort()
    group.abort()
    assert len(devices) == 2
    assert log.read_text().splitlines() == [
        "ncclGetUniqueId", f"ncclCommInitRank 3 {identifier.hex()} 0", "ncclAllReduce in place float32 x1: 00000000 sum 0x77 0x1234",
        "synchronize", "ncclBroadcast in place uint8 x3: 050007 root 0 0x77 0x1234", "synchronize", "ncclCommAbort 0x77"]  # fmt: skip
    with pytest.raises(OSError, match="ncclCommInitRank: stand-in error 5"):
        weight_transfer.NcclGroup(str(library)).join(-1)
