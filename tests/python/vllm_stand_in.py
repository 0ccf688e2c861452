# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a vLLM 0.33.0 server, written from its sources (wheel of PyPI), in vllm/: entrypoints/serve/lora/api_router.py,
entrypoints/openai/models/{api_router,serving}.py, entrypoints/serve/dev/{cache,rpc}/api_router.py, entrypoints/rl/online/api_router.py,
entrypoints/serve/middleware/authenticate.py, entrypoints/serve/instrumentator/health.py, v1/engine/core.py (pause_scheduler),
v1/core/sched/scheduler.py (reset_prefix_cache), v1/core/kv_cache_utils.py (_gen_lora_extra_hash_keys), v1/worker/gpu_worker.py and
distributed/weight_transfer/{nccl_common,nccl_engine,packed_tensor}.py. Sockets stand for NCCL.
"""

import base64
import concurrent.futures
import math
from pathlib import Path

import torch

import publish_over_sockets
from sampler_stand_in import Sampler

GUARDED = ("/v1", "/v2", "/inference", "/cohere")
"""Other paths take no key."""


class Worker:
    """A rank of the server: what vLLM's GPU worker and its engine `nccl` keep of an update, and when they refuse one."""

    def __init__(self, rank):
        self.rank, self.group, self.active, self.weights, self.loaded = rank, None, False, {}, []

    def init_weight_transfer_engine(self, rank_offset, world_size, nccl_unique_id_b64, packed=False, packed_buffer_size_bytes=2**30,
                                    packed_num_buffers=2):  # fmt: skip
        identifier = base64.b64decode(nccl_unique_id_b64, validate=True)
        if len(identifier) != 128:
            raise ValueError(f"nccl_unique_id_b64 must decode to 128 bytes, got {len(identifier)} bytes")
        assert packed and packed_num_buffers == 2
        self.limit = packed_buffer_size_bytes
        self.group = publish_over_sockets.Rank(identifier)
        self.group.join(world_size, rank_offset + self.rank)

    def shutdown_weight_transfer_engine(self):
        if self.active:
            raise RuntimeError("Cannot release a trainer connection during a weight update")
        self.group = None

    def start_weight_update(self):
        if self.active:
            raise RuntimeError("start_weight_update called while a weight update is already active. Call finish_weight_update first.")
        self.active, self.loaded = True, []

    def update_weights(self, names, dtype_names, shapes):
        if not self.active:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        try:
            if self.group is None:
                raise RuntimeError("NCCL weight transfer not initialized. Call init_transfer_engine() first.")
            if not len(names) == len(dtype_names) == len(shapes):
                raise ValueError("`dtype_names` and `shapes` should be of the same size as `names`")
            chunk, size = [], 0
            for name, dtype_name, shape in zip(names, dtype_names, shapes, strict=True):
                dtype = getattr(torch, dtype_name)
                chunk.append((name, dtype, shape, math.prod(shape) * dtype.itemsize))
                size += chunk[-1][3]
                if size > self.limit:
                    self.receive(chunk)
                    chunk, size = [], 0
            if chunk:
                self.receive(chunk)
        except BaseException:
            self.active = False
            raise

    def receive(self, chunk):
        packed = torch.empty(sum(size for *_, size in chunk), dtype=torch.uint8)
        self.group.broadcast(packed)
        parts = packed.split([size for *_, size in chunk])
        self.loaded.append({name: part.view(dtype).view(shape).clone()
                            for (name, dtype, shape, _), part in zip(chunk, parts, strict=True)})  # fmt: skip

    def finish_weight_update(self, weight_version=None):
        if not self.active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
        self.active = False
        self.weights = {name: tensor for chunk in self.loaded for name, tensor in chunk.items()}
        self.version = weight_version


class Adapter:
    def __init__(self, path):
        self.path, self.weights = path, Path(path, "adapter_model.safetensors").read_bytes()


def error(status, message, kind):
    return status, {"error": {"message": message, "type": kind, "param": None, "code": status}}


PAYLOADS = {"init_weight_transfer_engine": "init_info", "update_weights": "update_info"}
OF_WORKERS = [*PAYLOADS, "shutdown_weight_transfer_engine", "start_weight_update", "finish_weight_update"]


class VllmServer(Sampler):
    """`workers` ranks behind one port. `busy`: how many times the cache cannot be emptied, because copies of blocks are on their
    way, which goes on with requests; `refusals`: how many times /reset_prefix_cache says so."""

    def __init__(self, workers=2, key=None):
        self.workers, self.key = [Worker(rank) for rank in range(workers)], key
        self.adapters, self.busy, self.refusals = {}, 0, 0
        super().__init__()

    def admits(self, method, path, key):
        return not path.startswith(GUARDED) or self.key is None or key == self.key

    def get(self, path):
        if path == "/health":
            return 200, None
        if path == "/v1/models":
            loaded = [("base", "org/base", None), *((name, each.path, "base") for name, each in self.adapters.items())]
            cards = [{"id": name, "object": "model", "created": 0, "owned_by": "vllm", "root": root, "parent": parent,
                      "max_model_len": None, "permission": []} for name, root, parent in loaded]  # fmt: skip
            return 200, {"object": "list", "data": cards}
        if path == "/get_world_size":
            return 200, {"world_size": len(self.workers)}
        if path == "/weight_info":
            return 200, {"weight_version": self.version}
        return 404, {"detail": "Not Found"}

    def post(self, path, body):
        path, _, query = path.partition("?")
        call = getattr(self, path.removeprefix("/v1/").removeprefix("/") + "_", None)
        if path[1:] in OF_WORKERS:
            return self.of_workers(path[1:], body)
        return call(body, query) if call else (404, {"detail": "Not Found"})

    def completions_(self, body, _):
        name = body["model"]
        if name == "base":
            return 200, self.sample(None, lambda: self.weights, body["max_tokens"])
        if name not in self.adapters:
            return error(404, f"The model `{name}` does not exist.", "NotFoundError")
        adapter = self.adapters[name]
        return 200, self.sample((name, adapter.path), lambda: adapter.weights, body["max_tokens"])

    def load_lora_adapter_(self, body, _):
        name, path = body["lora_name"], body["lora_path"]
        if name in self.adapters and not body.get("load_inplace", False):
            return error(400, f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                         "'load_inplace' to True.", "InvalidUserInput")  # fmt: skip
        try:
            self.adapters[name] = Adapter(path)
        except OSError:
            return error(404, f"Loading lora {name} failed: No adapter found for {path}", "NotFoundError")
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def unload_lora_adapter_(self, body, _):
        """Blocks in the cache stay, under name and path."""
        if self.adapters.pop(body["lora_name"], None) is None:
            return error(404, f"The lora adapter '{body['lora_name']}' cannot be found.", "NotFoundError")
        return 200, f"Success: LoRA adapter '{body['lora_name']}' removed successfully."

    def pause_(self, _, query):
        """It preempts requests and empties the cache, though its documentation says otherwise."""
        assert query == "mode=keep"
        self.pause(retracted=True)
        if self.busy:
            return 500, {"error": "Failed to pause generation: Call to pause_generation method failed: Failed to reset KV cache even "
                         "when all the running requests are preempted and moved to the waiting queue. This is likely due to the "
                         "presence of running requests waiting for remote KV transfer, which is not supported yet."}  # fmt: skip
        self.cached.clear()
        return 200, {"status": "paused"}

    def resume_(self, *_):
        self.busy = max(0, self.busy - 1)
        self.resume()
        return 200, {"status": "resumed"}

    def reset_prefix_cache_(self, _, query):
        assert query in ("", "reset_external=true")
        self.refusals -= 1
        if self.refusals >= 0 or any(request.prefix is not None for request in self.running):
            return 200, {"success": False}
        self.cached.clear()
        return 200, {"success": True}

    def collective_rpc_(self, body, _):
        if body.get("method") != "reload_weights" or set(body.get("kwargs", {})) != {"weights_path"}:
            return error(400, "Missing 'method' in request body", "Bad Request")
        try:
            self.weights = Path(body["kwargs"]["weights_path"], "model.safetensors").read_bytes()
        except OSError as failure:
            return error(500, f"Call to collective_rpc method failed: {failure}", "InternalServerError")
        return 200, {"results": [None for _ in self.workers]}

    def update_weight_version_(self, body, _):
        self.version = body["new_version"]
        return 200, {"success": True, "new_version": self.version}

    def of_workers(self, method, body):
        """Waits for one worker after the other, and for none after one that failed, as vLLM's collective_rpc does."""
        assert self.paused and (method not in PAYLOADS or set(body) == {PAYLOADS[method]})
        arguments = body[PAYLOADS[method]] if method in PAYLOADS else body
        pool = concurrent.futures.ThreadPoolExecutor(len(self.workers))
        try:
            for outcome in [pool.submit(getattr(worker, method), **arguments) for worker in self.workers]:
                outcome.result()
        except Exception as failure:
            return error(500, f"{type(failure).__name__}: {failure}", "InternalServerError")
        finally:
            pool.shutdown(wait=False)
        return 200, {"message": "Weights updated"}
