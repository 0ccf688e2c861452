#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# vLLM keys cached prefixes of an adapter by name and path. Unloading it tells the engine nothing, so its blocks stay, and another
# adapter that is loaded later under that name from that path, as the next run of a trainer has it, goes on from them. Loading in
# place says so in a warning; unloading and loading says nothing.
#
# Debian 12, Python 3.11; vllm 0.33.0, of which OpenAIServingModels (/v1/load_lora_adapter, /v1/unload_lora_adapter) and the
# keys of blocks are run as they are in the wheel, without its requirements and a GPU; the engine notes what it is called. Seen:
#   calls of the engine: add_lora 1, add_lora 2
#   keys of blocks: equal
#   warnings: 0, for a load in place 1
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet msgspec==0.21.1 "pydantic==2.13.3"
"$folder/venv/bin/pip" install --quiet --no-deps vllm==0.33.0

cat > "$folder/adapters.py" <<'PYTHON'
import __future__

import ast
import asyncio
import collections
import http
import importlib.util
import itertools
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

VLLM = Path(sysconfig.get_path("purelib"), "vllm")


def definition(path, name, names):
    """A function or class of a file of vLLM, with `names` for what the file imports."""
    node = next(node for node in ast.parse((VLLM / path).read_text()).body if getattr(node, "name", None) == name)
    code = compile(ast.Module([node], []), path, "exec", flags=__future__.annotations.compiler_flag)
    exec(code, names)
    return names[name]


def module(path, name):
    spec = importlib.util.spec_from_file_location(name, VLLM / path)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


class Log:
    def __init__(self):
        self.warnings = 0

    def warning(self, *_):
        self.warnings += 1

    info = debug = lambda *_: None


class Engine:
    """Notes each call of it; all are coroutines."""

    def __init__(self):
        self.calls, self.model_config, self.renderer, self.input_processor = [], None, None, None

    async def add_lora(self, request):
        self.calls.append(f"add_lora {request.lora_int_id}")

    def __getattr__(self, name):
        self.calls.append(name)
        raise AttributeError(name)


class Counter(itertools.count):
    def inc(self, _):
        return next(self)


lora = module("lora/request.py", "vllm_lora_request")
protocol = module("entrypoints/serve/lora/protocol.py", "vllm_lora_protocol")
log, engine = Log(), Engine()
ErrorResponse = type("ErrorResponse", (), {})
Models = definition("entrypoints/openai/models/serving.py", "OpenAIServingModels", {
    "OpenAIModelRegistry": lambda **_: SimpleNamespace(is_base_model=lambda name: name == "base"),
    "AtomicCounter": lambda _: Counter(1), "LoRAResolverRegistry": SimpleNamespace(get_supported_resolvers=list),
    "defaultdict": collections.defaultdict, "Lock": asyncio.Lock,
    "LoRARequest": lora.LoRARequest, "logger": log, "HTTPStatus": http.HTTPStatus, "ErrorResponse": ErrorResponse,
    "LoadLoRAAdapterRequest": protocol.LoadLoRAAdapterRequest, "LoRAAdapterNotFoundError": KeyError,
    "create_error_response": lambda *_, **words: sys.exit(f"refused: {words}")})
keys = definition("v1/core/kv_cache_utils.py", "_gen_lora_extra_hash_keys", {})


async def main():
    models = Models(engine, [])
    request = lambda **more: protocol.LoadLoRAAdapterRequest(lora_name="a", lora_path="/runs/step_1", **more)
    load = lambda **more: models.load_lora_adapter(request(**more))
    await load()
    first = models.lora_requests["a"]
    await models.unload_lora_adapter(protocol.UnloadLoRAAdapterRequest(lora_name="a"))
    await load()  # the folder has another adapter by now
    second = models.lora_requests["a"]
    silent, calls = log.warnings, list(engine.calls)
    await load(load_inplace=True)
    equal = keys(SimpleNamespace(lora_request=first)) == keys(SimpleNamespace(lora_request=second))
    print("calls of the engine:", ", ".join(calls))
    print("keys of blocks:", "equal" if equal else "other")
    print(f"warnings: {silent}, for a load in place {log.warnings - silent}")
    return calls == ["add_lora 1", "add_lora 2"] and equal and (silent, log.warnings) == (0, 1)


sys.exit(0 if asyncio.run(main()) else 1)
PYTHON
"$folder/venv/bin/python" "$folder/adapters.py"
