# SPDX-License-Identifier: Apache-2.0
"""Has a vLLM or SGLang server load published weights, for `espalier train --publish DIR --publish-command`."""

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

from .kinds import KINDS, SGLANG, Kind
from .names import adapter_name, is_outdated
from .server import FAILURES, WAIT_SECONDS, Refused, Server, kind_of

HELP = """Has a vLLM or SGLang server load published weights: after each publication of a run, as

  espalier train ... --publish runs/a-weights --publish-command 'python -m espalier.publish http://sampler:8000'

The server reads the folder under the same path. Prints what it has loaded:
  an adapter     as DIR-step_N-HASH, a name that no other adapter has, because prefixes are cached by names; request samples by it
                 (model=NAME of vLLM, model=BASE:NAME of SGLang). Adapters of DIR that are no longer there are unloaded.
  full weights   in place of those of the server, as the version step_N, while its requests rest; they go on with the new weights.
"""

MORE = """environment:
  VLLM_API_KEY           the key of a vLLM server
  SGLANG_API_KEY         the key of an SGLang server (--api-key)
  SGLANG_ADMIN_API_KEY   and the one that it wants for changes (--admin-api-key)
Keys go to URL alone: redirects are not followed.

The server needs, for an adapter: vLLM --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True; SGLang --enable-lora
with --max-lora-rank and --lora-target-modules. For full weights: vLLM VLLM_SERVER_DEV_MODE=1.
The exit status is 1, with one line on standard error, where the server does not take the weights. Its requests go on
all the same."""


def publish(server: Server, folder: Path, over_nccl: bool = False) -> str:
    """What the server has loaded. Raises one of FAILURES where it does not take the weights."""
    if not folder.is_dir():
        raise OSError(f"expected a folder of published weights, received {folder}, which is none")
    if over_nccl:
        from . import weight_transfer

        if server.kind is SGLANG:
            raise ValueError("--weight-transfer nccl: expected a vLLM server, received SGLang, which reads folders")
        weight_transfer.send(server, folder)
        return folder.name
    server.get_alive()
    if (folder / "adapter_config.json").is_file():
        return _load_adapter(server, folder)
    server.replace_weights(lambda: _update(server, folder))
    return folder.name


def _load_adapter(server: Server, folder: Path) -> str:
    name, models = adapter_name(folder), _models(server)
    if name not in models:
        server.post(server.kind.load, {"lora_name": name, "lora_path": str(folder)})
    for other, path in models.items():
        if is_outdated(other, path, folder.parent):
            server.post(server.kind.unload, {"lora_name": other})
    return name


def _models(server: Server) -> dict[str, str]:
    """Paths of models and adapters, by names."""
    answer = server.get("/v1/models")
    models = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(models, list) or not all(isinstance(model, dict) and isinstance(model.get("id"), str) for model in models):
        raise Refused("/v1/models", "a list of models as data", str(answer)[:300], 200, "")
    return {model["id"]: str(model.get("root") or "") for model in models}


def _update(server: Server, folder: Path) -> None:
    for path, body in server.kind.update(folder):
        server.post(path, body)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m espalier.publish", description=HELP, epilog=MORE, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = parser.add_argument
    add("--server", choices=[*KINDS, "auto"], default="auto",
        help="the kind of server (default: auto, which asks for /model_info, a path that SGLang alone has)")  # fmt: skip
    add("--wait", type=float, default=WAIT_SECONDS, metavar="SECONDS",
        help="try again for so long where the server does not answer yet, or keeps prefixes of the old weights "
        "(default: %(default)s)")  # fmt: skip
    add("--weight-transfer", choices=["nccl"], help="send full weights over NCCL, to a vLLM server that was started with "
        "--weight-transfer-config '{\"backend\": \"nccl\"}'")  # fmt: skip
    add("url", metavar="URL", help="of the server, such as http://sampler:8000")
    add("folder", metavar="DIR/step_N", type=Path, help="a folder that --publish has written")
    return parser


def _kind(arguments: Any) -> Kind:
    return KINDS.get(arguments.server) or kind_of(arguments.url, arguments.wait)


def main(words: list[str]) -> None:
    arguments = _parser().parse_args(words)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server is told to go on
    url = arguments.url.rpartition("@")[2]  # without a password
    try:
        server = Server(arguments.url, _kind(arguments), arguments.wait)
        loaded = publish(server, arguments.folder.resolve(), arguments.weight_transfer == "nccl")
        print(f"{url}: loaded {loaded}", flush=True)
    except (*FAILURES, KeyboardInterrupt) as error:
        print(f"{url}: {str(error) or 'interrupted'}", file=sys.stderr, flush=True)
        os._exit(1)  # a thread may wait in NCCL, for a server that does not come


if __name__ == "__main__":
    main(sys.argv[1:])
