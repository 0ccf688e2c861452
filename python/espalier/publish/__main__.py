# SPDX-License-Identifier: Apache-2.0
"""Tells a vLLM server to load published weights, for `espalier train --publish DIR --publish-command`.

    python -m espalier.publish [--weight-transfer nccl] URL DIR/step_N

The server reads the folder under the same path. An adapter is loaded as DIR-step_N (the last part of DIR), a new name for every
version, since vLLM keys its prefix cache by the name; versions whose folders are gone are unloaded. Full weights replace those of
the server while its requests rest. With --weight-transfer nccl they are sent to it over NCCL. VLLM_API_KEY is sent if it is set.
Ends with status 1 and a line where the server does not take the weights.
"""

import argparse
import json
import os
import re
import signal
import sys
from pathlib import Path

from .vllm_server import FAILURES, Server


def publish(server: Server, folder: Path, over_nccl: bool = False) -> None:
    """Raises one of FAILURES where the server does not take the weights."""
    if over_nccl:
        from . import weight_transfer

        weight_transfer.send(server, folder)
        return
    server.get("/health")
    if (folder / "adapter_config.json").is_file():
        _load_adapter(server, folder)
    else:
        _reload_weights(server, folder)


def _load_adapter(server: Server, folder: Path) -> None:
    prefix = f"{folder.parent.name}-"
    models = json.loads(server.get("/v1/models"))["data"]
    there = [model["id"] for model in models]
    if prefix + folder.name in there:  # a run that was resumed publishes a step again
        server.post("/v1/unload_lora_adapter", {"lora_name": prefix + folder.name})
    server.post("/v1/load_lora_adapter", {"lora_name": prefix + folder.name, "lora_path": str(folder)})
    for name in there:
        if re.fullmatch(rf"{re.escape(prefix)}step_\d+", name) and not (folder.parent / name[len(prefix) :]).exists():
            server.post("/v1/unload_lora_adapter", {"lora_name": name})


def _reload_weights(server: Server, folder: Path) -> None:
    with server.paused():
        server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        server.post("/reset_prefix_cache")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m espalier.publish", description="Has a vLLM server load published weights.")
    parser.add_argument("--weight-transfer", choices=["nccl"], help="send full weights over NCCL, to a server that was started "
                        "with --weight-transfer-config '{\"backend\": \"nccl\"}'")  # fmt: skip
    parser.add_argument("url", metavar="URL")
    parser.add_argument("folder", metavar="DIR/step_N", type=Path)
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server is told to go on
    try:
        publish(Server(given.url), given.folder.resolve(), given.weight_transfer == "nccl")
    except (*FAILURES, KeyboardInterrupt) as error:
        print(f"{given.url}: {str(error) or 'interrupted'}", file=sys.stderr, flush=True)
        os._exit(1)  # a thread may wait in NCCL, for a server that does not come


if __name__ == "__main__":
    main(sys.argv[1:])
