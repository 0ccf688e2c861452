# SPDX-License-Identifier: Apache-2.0
"""Tells a vLLM server to load published weights, for `espalier train --publish DIR --publish-command`.

    python -m espalier.publish URL DIR/step_N

The server reads the folder under the same path. An adapter is loaded as DIR-step_N (the last part of DIR), a new name for every
version, since vLLM keys its prefix cache by the name; versions whose folders are gone are unloaded. Full weights replace those of
the server while its requests rest. VLLM_API_KEY is sent if it is set. Ends with status 1 and a line where the server does not
take the weights.
"""

import http.client
import json
import os
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

_ALIVE_SECONDS = 10
_LOAD_SECONDS = 600


def publish(url: str, folder: Path) -> None:
    """Raises OSError, http.client.HTTPException or ValueError where the server does not take the weights."""
    _request(url, "/health", seconds=_ALIVE_SECONDS)
    if (folder / "adapter_config.json").is_file():
        _load_adapter(url, folder)
    else:
        _reload_weights(url, folder)


def _load_adapter(url: str, folder: Path) -> None:
    prefix = f"{folder.parent.name}-"
    models = json.loads(_request(url, "/v1/models"))["data"]
    there = [model["id"] for model in models]
    if prefix + folder.name in there:  # a run that was resumed publishes a step again
        _request(url, "/v1/unload_lora_adapter", {"lora_name": prefix + folder.name})
    _request(url, "/v1/load_lora_adapter", {"lora_name": prefix + folder.name, "lora_path": str(folder)})
    for name in there:
        if re.fullmatch(rf"{re.escape(prefix)}step_\d+", name) and not (folder.parent / name[len(prefix) :]).exists():
            _request(url, "/v1/unload_lora_adapter", {"lora_name": name})


def _reload_weights(url: str, folder: Path) -> None:
    _request(url, "/pause?mode=keep", {})
    try:
        _request(url, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        _request(url, "/reset_prefix_cache", {})
    finally:
        _request(url, "/resume", {})


def _request(url: str, path: str, body: dict[str, Any] | None = None, seconds: int = _LOAD_SECONDS) -> bytes:
    """A GET without `body`, else a POST."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("VLLM_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url.rstrip("/") + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            content: bytes = answer.read()
            return content
    except urllib.error.HTTPError as error:
        said = " ".join(error.read(2000).decode(errors="replace").split())
        raise OSError(f"{path.partition('?')[0]}: {error.code} {error.reason}: {said[:300]}") from None


def main(arguments: list[str]) -> None:
    if len(arguments) != 2:
        sys.exit("expected a URL and a folder: python -m espalier.publish URL DIR/step_N")
    url, folder = arguments
    try:
        publish(url, Path(folder).resolve())
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        sys.exit(f"{url}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
