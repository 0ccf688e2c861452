# SPDX-License-Identifier: Apache-2.0
"""A stand-in for an SGLang 0.5.23 server, written from its sources (wheel of PyPI), in sglang/srt/: entrypoints/http_server.py,
utils/auth.py, managers/{tokenizer_control_mixin,tokenizer_manager,scheduler,io_struct}.py,
managers/scheduler_components/weight_updater.py, model_executor/model_runner_components/weight_updater.py and
lora/{lora_manager,lora_registry}.py.
"""

import uuid
from pathlib import Path

from sampler_stand_in import Sampler

ADMIN_OPTIONAL = ("/load_lora_adapter", "/unload_lora_adapter", "/update_weights_from_disk", "/pause_generation",
                  "/continue_generation", "/flush_cache")  # fmt: skip
PAUSED = {"message": "Generation paused successfully.", "status": "ok"}
CONTINUED = {"message": "Generation continued successfully.", "status": "ok"}
NOT_FLUSHED = ("Weights were updated, but the cache was not flushed because requests are still running or queued. Retract or "
               "finish them, then call /flush_cache.")  # fmt: skip
FLUSHED = ("Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, the operation "
           "will not be performed.)\n")  # fmt: skip


class Adapter:
    def __init__(self, name, path):
        self.name, self.path, self.id = name, path, uuid.uuid4().hex
        self.weights = Path(path, "adapter_model.safetensors").read_bytes()


class SglangServer(Sampler):
    """`busy`: how many times the cache cannot be flushed, because copies of it are on their way, which goes on with requests."""

    def __init__(self, key=None, admin_key=None, enable_lora=True, data_parallel=1):
        self.key, self.admin_key, self.enable_lora, self.data_parallel = key, admin_key, enable_lora, data_parallel
        self.adapters, self.busy, self.served_model_name = {}, 0, "org/base"
        super().__init__()

    def admits(self, method, path, key):
        if path.startswith(("/health", "/ready", "/metrics")):
            return True
        wanted = self.admin_key or self.key if path in ADMIN_OPTIONAL else self.key
        return wanted is None or key == wanted

    def get(self, path):
        if path == "/model_info":
            return 200, {"model_path": self.served_model_name, "served_model_name": self.served_model_name, "is_generation": True,
                         "weight_version": self.version}  # fmt: skip
        if path == "/v1/models":
            card = lambda name, root, parent: {"id": name, "object": "model", "created": 0, "owned_by": "sglang", "root": root,
                                               "parent": parent, "max_model_len": None}  # fmt: skip
            loaded = [card(each.name, each.path, self.served_model_name) for each in self.adapters.values()]
            return 200, {"object": "list", "data": [card(self.served_model_name, self.served_model_name, None), *loaded]}
        return 404, {"detail": "Not Found"}

    def post(self, path, body):
        if body is None:
            return 400, {"object": "error", "message": "1 validation error", "type": "Bad Request", "param": None, "code": 400}
        call = getattr(self, path.removeprefix("/") + "_", None)
        return call(**body) if call else (404, {"detail": "Not Found"})

    def generate_(self, text, sampling_params, lora_path=None):
        """Cached prefixes are keyed by ids of adapters, which are new with each load."""
        if lora_path is None:
            return 200, self.sample(None, lambda: self.weights, sampling_params["max_new_tokens"])
        if lora_path not in self.adapters:
            return 400, {"error": {"message": f"Got LoRA adapter that has never been loaded: {lora_path}"}}
        adapter = self.adapters[lora_path]
        return 200, self.sample(adapter.id, lambda: adapter.weights, sampling_params["max_new_tokens"])

    def result(self, error_message=None):
        body = {"rid": None, "http_worker_ipc": None, "success": error_message is None, "error_message": error_message or "",
                "loaded_adapters": {each.name: each.path for each in self.adapters.values()}}  # fmt: skip
        return (400, body) if error_message else (200, body)

    def lora_fault(self):
        if not self.enable_lora:
            return self.result("LoRA is not enabled. Please set `--enable-lora` to enable LoRA.")
        return (500, "Internal Server Error") if self.data_parallel > 1 else None  # an assertion

    def load_lora_adapter_(self, lora_name, lora_path):
        if fault := self.lora_fault():
            return fault
        if lora_name in self.adapters:
            return self.result(f"Failed to load LoRA adapter {lora_name} because it is already loaded")
        try:
            self.adapters[lora_name] = Adapter(lora_name, lora_path)
        except OSError as error:
            return self.result(str(error))
        return self.result()

    def unload_lora_adapter_(self, lora_name):
        """New requests cannot use it from now on; those in flight are waited for."""
        if fault := self.lora_fault():
            return fault
        adapter = self.adapters.pop(lora_name, None)
        if adapter is None:
            return self.result(f"LoRA with name {lora_name} does not exist. Loaded LoRAs: odict_keys({[*self.adapters]})")
        with self.changed:
            self.changed.wait_for(lambda: all(request.space != adapter.id for request in self.running))
        return self.result()

    def pause_generation_(self, mode="abort"):
        self.pause(retracted=mode == "retract")
        return 200, PAUSED

    def continue_generation_(self, torch_empty_cache=True):
        self.busy = max(0, self.busy - 1)
        self.resume()
        return 200, CONTINUED

    def update_weights_from_disk_(self, model_path, weight_version=None, flush_cache=True):
        """While nothing is paused, it waits for requests in flight."""
        with self.changed:
            self.changed.wait_for(lambda: self.paused or not self.running)
            try:
                self.weights = Path(model_path, "model.safetensors").read_bytes()
            except OSError as error:
                return self.updated(f"Failed to get weights iterator: {error}.")
            if flush_cache and not self.flush():
                return self.updated(NOT_FLUSHED)
            self.served_model_name, self.version = model_path, weight_version or self.version
        return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def updated(self, message):
        return 400, {"success": False, "message": message, "num_paused_requests": 0}

    def flush(self):
        """Refused while a request has keys and values, or copies are on their way."""
        if self.busy or any(request.prefix is not None for request in self.running):
            return False
        self.cached.clear()
        return True

    def flush_cache_(self):
        return (200, FLUSHED) if self.flush() else (400, "Flush cache failed.\n")
