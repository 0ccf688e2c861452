# SPDX-License-Identifier: Apache-2.0
"""What the tests of `espalier serve` have in common: a server in a separate process, and the official client."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import numpy as np
from tinker import types

from conftest import NATIVE, seed_of, write_model
from small_models import MODELS

PYTHON = Path(__file__).resolve().parents[2] / "python"


@contextmanager
def server(folder, state, *flags, dtype="float64"):
    """The address of a server of one model, and its process."""
    environment = {**os.environ, "PYTHONPATH": f"{PYTHON}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "espalier", "serve", "--model", f"tiny={folder}", "--port", "0", "--state", str(state), "--dtype", dtype,
         "--threads", "1", *map(str, flags)], stderr=subprocess.PIPE, text=True, env=environment)  # fmt: skip
    said = []
    try:
        for line in process.stderr:
            said.append(line)
            if " on http://" in line:
                break
        else:
            raise AssertionError("".join(said))
        address = line.split()[-1]
        reader = threading.Thread(target=said.extend, args=[process.stderr], daemon=True)
        reader.start()
        process.said = said
        try:
            yield address, process
        finally:
            close_clients(address)
    finally:
        process.kill()
        process.wait()


_clients: dict[str, list] = {}


def client(address):
    """A ServiceClient of the official SDK."""
    import tinker

    service = tinker.ServiceClient(base_url=address, api_key="tml-local")
    _clients.setdefault(address, []).append(service)
    return service


def close_clients(address):
    """Without the server, their threads would go on to ask for it, and say so, until the end of all tests."""
    for service in _clients.pop(address, []):
        with suppress(RuntimeError):  # closed by its test
            service.holder.close()


def forward_backward(model_id, seq_id, tokens):
    """A ForwardBackwardRequest with the cross-entropy of one sequence."""
    from espalier.server import schema

    message = schema.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    each = message.data.add()
    each.model_input.add().encoded_text.tokens = np.array(tokens[:-1], "<i4").tobytes()
    for name, values, dtype, kind in (("target_tokens", tokens[1:], schema.INT64, "<i8"),
                                      ("weights", [1.0] * (len(tokens) - 1), schema.FLOAT32, "<f4")):  # fmt: skip
        each.loss_fn_inputs[name].dense = np.array(values, kind).tobytes()
        each.loss_fn_inputs[name].dtype = dtype
    return message


END = 258  # <|im_end|> of write_model


def model_with_texts(run, folder, template=NATIVE):
    """A random model of bytes, with tokenizer and chat template; `run` is the fixture `espalier`."""
    folder.mkdir()
    config = MODELS["qwen3"] | {"vocab_size": 264, "max_position_embeddings": 256, "eos_token_id": END, "initializer_range": 0.1}
    (folder / "config.json").write_text(json.dumps(config))
    run("init", "--config", folder / "config.json", "--out", folder / "model", "--seed", seed_of(12), "--dtype", "float64")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(write_model(folder / file, template) / file, folder / "model")
    return folder / "model"


def parked(state):
    """The folders of weights in no use below a state folder."""
    return [folder for folder in (Path(state) / "parked-weights").iterdir() if folder.name != ".espalier"]


def datum(tokens, targets=None, **inputs):
    """Of a sequence: each token but the last predicts the next, unless other targets are given."""
    targets = tokens[1:] if targets is None else targets
    return types.Datum(model_input=types.ModelInput.from_ints(list(map(int, tokens[:-1]))),
                       loss_fn_inputs={"target_tokens": targets, **inputs})  # fmt: skip


def prompt(*tokens):
    return types.ModelInput.from_ints(list(tokens))


class Local:
    """A server in this process, where a test can look inside."""

    def __init__(self, folder, state, max_adapters=32, api_key="", full_models=0, joins_clients=False, connections=1000, keys=None,
                 port=0, name="tiny", **options):  # fmt: skip
        from espalier.server import restart
        from espalier.server.access import Access
        from espalier.server.app import App
        from espalier.server.base import Base
        from espalier.server.connections import BoundedServer
        from espalier.server.service import Service
        from espalier.server.store import Store

        self.store, self.key_stores, self.keeps_clients = Store(state), [], False
        self.base = Base(name, folder, {"dtype": "float64", "threads": 1, **options}, self.store, max_adapters,
                         joins_clients=joins_clients)  # fmt: skip
        self.service = Service({name: self.base}, self.store, full_models)
        self.app = App(self.service)
        doors = [self.app.door(api_key)]
        for name, key in (keys or {}).items():
            store = Store(self.store.folder / "keys" / name)
            doors.append(App(self.service.for_key(name, store)).door(key))
            self.key_stores.append(store)
        try:
            for service in self.service.services:
                restart.check(service)
        except BaseException:
            self._close_stores()
            raise
        self._server = BoundedServer(Access(doors, ()), connections, port=port, log_config=None)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self):
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
            time.sleep(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=f"{self.address}/api/v1/", timeout=60)
        return self

    def __exit__(self, *error):
        self.http.close()
        if not self.keeps_clients:
            close_clients(self.address)
        self._server.should_exit = True
        self._thread.join()
        self._close_stores()

    def _close_stores(self):
        for store in (self.store, *self.key_stores):
            store.close()

    def on_loop(self, work):
        """The result of a coroutine on the thread of the event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.base._work.get_loop()).result()

    def stop_in_order(self, seconds=60):
        """As SIGTERM does: what the next server needs is kept, and its clients go on."""
        self.on_loop(self.service.stop(seconds, keeps=True))
        self.keeps_clients = True

    @contextmanager
    def held(self):
        """The thread of the base does no work within."""
        go = threading.Event()
        self.base._thread.submit(go.wait)
        try:
            yield
        finally:
            go.set()

    def post(self, path, body):
        return self.http.post(path, json=body)

    def result(self, promise):
        """Of a request: bytes of protobuf, or an object."""
        assert promise.status_code == 200, promise.text
        while (answer := self.post("retrieve_future", {"request_id": promise.json()["request_id"]})).status_code == 408:
            pass
        assert answer.status_code == 200, answer.text
        return answer.content if "protobuf" in answer.headers["content-type"] else answer.json()

    def model(self, rank=2, seed=1):
        """A new session with a new model."""
        session = self.post("create_session", {}).json()["session_id"]
        promise = self.post("create_model", {"session_id": session, "model_seq_id": 0, "base_model": "tiny",
                                             "lora_config": {"rank": rank, "seed": seed}})  # fmt: skip
        return self.result(promise)["model_id"]
