# SPDX-License-Identifier: Apache-2.0
"""What vLLM and SGLang call what a publication needs.

vLLM 0.33.0: vllm/entrypoints/serve/{lora,dev/cache,dev/rpc}/api_router.py, rl/online/api_router.py. SGLang 0.5.23:
sglang/srt/entrypoints/http_server.py, managers/tokenizer_control_mixin.py, managers/scheduler_components/weight_updater.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Post = tuple[str, dict[str, Any]]
"""A path and what is sent to it."""


@dataclass(frozen=True)
class Kind:
    """A kind of server."""

    name: str
    read_keys: tuple[str, ...]  # environment variables, the first that is set is the key of GET
    write_keys: tuple[str, ...]  # and of POST
    alive: str
    load: str  # takes lora_name and lora_path
    unload: str
    pause: Post  # requests rest without their keys and values, and go on afterwards
    resume: str
    update: Callable[[Path], list[Post]]  # has the server read the full weights of a folder
    flush: Post | None  # forgets prefixes of the old weights; None: the update does
    stale: tuple[str, ...]  # a failure with one of these words: prefixes of old weights are in use until requests go on


VLLM = Kind(
    name="vllm",
    read_keys=("VLLM_API_KEY",),
    write_keys=("VLLM_API_KEY",),
    alive="/health",
    load="/v1/load_lora_adapter",
    unload="/v1/unload_lora_adapter",
    pause=("/pause?mode=keep", {}),
    resume="/resume",
    update=lambda folder: [
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}),
        ("/update_weight_version", {"new_version": folder.name}),
    ],
    flush=("/reset_prefix_cache?reset_external=true", {}),
    stale=('{"success": false}', "Failed to reset"),
)

SGLANG = Kind(
    name="sglang",
    read_keys=("SGLANG_API_KEY",),
    write_keys=("SGLANG_ADMIN_API_KEY", "SGLANG_API_KEY"),  # with an admin key, calls that change the server take no other
    alive="/model_info",  # /health samples a token, and fails while the server is paused
    load="/load_lora_adapter",
    unload="/unload_lora_adapter",
    pause=("/pause_generation", {"mode": "retract"}),
    resume="/continue_generation",
    # This flushes the caches of all data-parallel ranks and answers for all; /flush_cache answers for the first alone.
    update=lambda folder: [
        ("/update_weights_from_disk", {"model_path": str(folder), "weight_version": folder.name, "flush_cache": True}),
    ],
    flush=None,
    stale=("cache was not flushed",),
)

KINDS = {kind.name: kind for kind in (VLLM, SGLANG)}
