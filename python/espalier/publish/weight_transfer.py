# SPDX-License-Identifier: Apache-2.0
"""Sends published weights to a vLLM server over NCCL.

The sender is rank 0 of a communicator whose other ranks are the server's workers. NCCL's unique id goes with the request, not
through a TCPStore, whose entries are pickled classes of vLLM. Requests, packing and the reduction that follows the rendezvous are
those of vLLM 0.33.0 (commit 4ba787ec9): vllm/entrypoints/rl/online/api_router.py and vllm/distributed/weight_transfer,
nccl_common.py, nccl_engine.py and packed_tensor.py.
"""

import base64
import contextlib
import ctypes
import math
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from .server import ALIVE_SECONDS, FAILURES, LOAD_SECONDS, Refused, Server

BUFFER_BYTES = 256 << 20
"""Tensors are sent together up to the first that takes them beyond this. The server has two such buffers."""

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def send(server: Server, folder: Path, group: "NcclGroup | None" = None) -> None:
    """Sends the weights of `folder`, with at most a buffer and the largest tensor in memory. The server goes on afterwards, also
    where this raises OSError or ValueError."""
    if (folder / "adapter_config.json").is_file():
        raise ValueError("an adapter is not sent over NCCL; without --weight-transfer the server loads its folder")
    tensors = _tensors(folder)
    communicator = group or NcclGroup()
    workers = _workers(server)

    def update() -> None:
        _forget_killed_sender(server)
        try:
            _transfer(server, tensors, communicator, workers, version=folder.name)
        except BaseException:
            communicator.abort()
            _finish_if_it_can(server)  # else no further update could start
            raise
        server.post("/shutdown_weight_transfer_engine")
        communicator.abort()  # complete on all ranks

    server.replace_weights(update)


def _workers(server: Server) -> int:
    answer = server.get("/get_world_size")
    workers = answer.get("world_size") if isinstance(answer, dict) else None
    if not isinstance(workers, int) or workers < 1:
        raise Refused("/get_world_size", "a number of workers as world_size", str(answer)[:300], 200, "")
    return workers


def _finish_if_it_can(server: Server) -> None:
    with contextlib.suppress(*FAILURES):
        server.post("/finish_weight_update", seconds=ALIVE_SECONDS)


def _forget_killed_sender(server: Server) -> None:
    """The server would keep its communicator, and take no further update while this one is open."""
    try:
        server.post("/shutdown_weight_transfer_engine")
    except OSError:
        _finish_if_it_can(server)
        server.post("/shutdown_weight_transfer_engine")


@dataclass(frozen=True)
class _Tensor:
    file: Any
    name: str
    dtype: torch.dtype
    shape: list[int]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _tensors(folder: Path) -> list[_Tensor]:
    """Wide ones first: vLLM views each tensor in place in a buffer, which PyTorch allows at multiples of the element size alone.
    All files stay open, so that none is missing later."""
    tensors = []
    for path in sorted(folder.glob("*.safetensors")):
        try:
            file = safe_open(path, "pt")
        except Exception as error:  # SafetensorError is no OSError
            raise OSError(f"cannot read {path}: {error}") from None
        for name in file.keys():  # noqa: SIM118
            part = file.get_slice(name)
            if part.get_dtype() not in _DTYPES:
                raise ValueError(f"{path}: {name} is {part.get_dtype()}: over NCCL go {', '.join(_DTYPES)}")
            tensors.append(_Tensor(file, name, _DTYPES[part.get_dtype()], part.get_shape()))
    if not tensors:
        raise OSError(f"no weights in {folder}")
    return sorted(tensors, key=lambda each: -each.dtype.itemsize)


def _transfer(server: Server, tensors: list[_Tensor], group: "NcclGroup", workers: int, version: str) -> None:
    unique_id = base64.b64encode(group.unique_id()).decode()
    init = {"nccl_unique_id_b64": unique_id, "rank_offset": 1, "world_size": 1 + workers, "packed": True,
            "packed_buffer_size_bytes": BUFFER_BYTES}  # fmt: skip
    update = {"names": [each.name for each in tensors], "dtype_names": [str(each.dtype).split(".")[-1] for each in tensors],
              "shapes": [each.shape for each in tensors]}  # fmt: skip

    def broadcast() -> None:
        for chunk in _chunks(tensors):
            group.broadcast(_packed(chunk, group.device))

    _both(lambda: server.post("/init_weight_transfer_engine", {"init_info": init}), lambda: group.join(1 + workers))
    server.post("/start_weight_update")
    _both(lambda: server.post("/update_weights", {"update_info": update}), broadcast)
    server.post("/finish_weight_update", {"weight_version": version})


def _chunks(tensors: list[_Tensor]) -> Iterator[list[_Tensor]]:
    chunk, size = [], 0
    for each in tensors:
        chunk.append(each)
        size += each.bytes
        if size > BUFFER_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _packed(chunk: list[_Tensor], device: torch.device) -> torch.Tensor:
    """Their bytes, one after the other: uint8 `[B]`."""
    buffer = torch.empty(sum(each.bytes for each in chunk), dtype=torch.uint8, device=device)
    for each, part in zip(chunk, buffer.split([each.bytes for each in chunk]), strict=True):
        part.copy_(each.file.get_tensor(each.name).reshape(-1).view(torch.uint8))
    return buffer


def _both(*calls: Callable[[], None]) -> None:
    """Makes both calls at once. The first error is raised without waiting for the other call, which may wait for this one."""
    threads = ThreadPoolExecutor(len(calls))
    done, waiting = wait([threads.submit(call) for call in calls], LOAD_SECONDS, FIRST_EXCEPTION)
    threads.shutdown(wait=False)
    for each in done:
        each.result()
    if waiting:
        raise OSError(f"the server has not taken the weights within {LOAD_SECONDS} seconds")


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_ubyte * 128)]


_POINTER, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_SIGNATURES = {
    "ncclGetUniqueId": [ctypes.POINTER(_UniqueId)],
    "ncclCommInitRank": [ctypes.POINTER(_POINTER), _INT, _UniqueId, _INT],
    "ncclAllReduce": [_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
    "ncclBroadcast": [_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
    "ncclCommAbort": [_POINTER],
}


class NcclGroup:
    """Rank 0 of a communicator of the NCCL that PyTorch has loaded, on the current GPU. Calls return when they are complete, and
    raise OSError; they are those of nccl.h."""

    _UINT8, _FLOAT32, _SUM = 1, 7, 0

    def __init__(self, library: str = "libnccl.so.2") -> None:
        if not torch.cuda.is_available():
            raise OSError("--weight-transfer nccl needs a GPU")
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._library = ctypes.CDLL(library)
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        self._id = _UniqueId()
        self._communicator = ctypes.c_void_p()

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name)
        function.argtypes = _SIGNATURES[name]
        if status := function(*arguments):
            raise OSError(f"{name}: {self._library.ncclGetErrorString(status).decode()}")

    def unique_id(self) -> bytes:
        """128 bytes by which the other ranks find this one."""
        self._call("ncclGetUniqueId", ctypes.byref(self._id))
        return bytes(self._id)

    def join(self, ranks: int) -> None:
        """Waits for all other ranks, and takes part in the sum of one float32 by which each begins."""
        with torch.cuda.device(self.device):  # of this thread
            self._call("ncclCommInitRank", ctypes.byref(self._communicator), ranks, self._id, 0)
            self._collective("ncclAllReduce", torch.zeros(1, device=self.device), self._FLOAT32, self._SUM)

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Sends `buffer`, uint8 `[B]`, to all other ranks."""
        with torch.cuda.device(self.device):
            self._collective("ncclBroadcast", buffer, self._UINT8, 0)

    def _collective(self, name: str, buffer: torch.Tensor, dtype: int, operation_or_root: int) -> None:
        stream = torch.cuda.current_stream()
        address = buffer.data_ptr()
        self._call(name, address, address, buffer.numel(), dtype, operation_or_root, self._communicator, stream.cuda_stream)
        stream.synchronize()

    def abort(self) -> None:
        """Ends the communicator, also while another thread waits in it."""
        if self._communicator:
            self._call("ncclCommAbort", self._communicator)
            self._communicator = ctypes.c_void_p()
