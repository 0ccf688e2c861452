# SPDX-License-Identifier: Apache-2.0
"""The command line of `espalier serve`."""

import argparse
import os
import re
from pathlib import Path

from ..commands.command_line import ArgumentParser, check_model, positive

DESCRIPTION = """\
Serves the Tinker API (SDK 0.38) on this machine: training and sampling of LoRA
adapters, or of whole weights, for clients of `tinker` and its cookbook. Prefixes
that the data of a batch share are encoded once, forward and backward, with exactly
the gradients of training on each datum alone.
"""

EPILOG = """\
clients:
  TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local python my_loop.py
  A client asks for a model by NAME, or by the name of its folder.

examples:
  espalier serve --model runs/SmolLM2
  espalier serve --model Qwen/Qwen3-0.6B=models/qwen --state runs/server \\
      --device cuda --dtype bfloat16

Without --host only this machine can connect, and whoever can connect can use the
server, unless --api-key or ESPALIER_API_KEY sets a key. Another --host needs one.
Ctrl-C or SIGTERM ends it after what runs. Checkpoints stay, and a server that is
started again with the same models and --state goes on with its clients.

exit codes: 0 ended by a signal, 1 bad input, 2 wrong arguments.
"""


def serve_parser() -> ArgumentParser:
    """All flags."""
    parser = ArgumentParser(prog="espalier serve", description=DESCRIPTION, epilog=EPILOG,
                            formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = parser.add_argument
    add("--model", action="append", required=True, metavar="[NAME=]DIR",
        help="Hugging Face folder of a model, and the name by which clients ask for it (default: that of the folder); "
             "may be repeated")  # fmt: skip
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--allow-host", action="append", default=[], metavar="NAME",
        help="name by which clients reach this machine, such as that of a proxy, beside its addresses, localhost and --host; may "
             "be repeated")  # fmt: skip
    add("--port", type=_port, default=8000, help="port to listen on; 0: any that is free (default: %(default)s)")
    add("--state", type=Path, default=Path("espalier-state"), metavar="DIR", help="folder of checkpoints (default: %(default)s)")
    add("--api-key", metavar="KEY",
        help="key that clients have to send; the list of processes shows it, unlike ESPALIER_API_KEY (default: that of "
             "ESPALIER_API_KEY, else none)")  # fmt: skip
    add("--api-key-file", type=Path, metavar="FILE",
        help="lines of a NAME and its KEY: clients of each key have models, samplers and checkpoints of their own, and see none "
             "of others")  # fmt: skip
    add("--stop-seconds", type=positive, default=30, metavar="N",
        help="how long SIGTERM, SIGHUP or Ctrl-C let go on what has begun; what is left then fails, and a second signal ends the "
             "server at once (default: %(default)s)")  # fmt: skip
    add("--result-seconds", type=positive, default=3600, metavar="N",
        help="how long the result of a request is kept, for clients that lost their connection (default: %(default)s)")
    add("--dtype", default="float32", choices=("float32", "float64", "bfloat16"), help="precision (default: %(default)s)")
    add("--device", default="auto", help="cpu, cuda, cuda:1, ..., or auto: cuda where there is one (default: %(default)s)")
    add("--memory-budget", metavar="SIZE", help="memory that a step may use, such as 16GiB (default: no limit)")
    add("--token-budget", type=positive, metavar="N", help="tokens of a micro-batch at most (default: no limit)")
    add("--strategy", choices=("auto", "partition", "tree-packing", "append-only", "sequence-packing"),
        help="how data are put into micro-batches; sequence-packing encodes each by itself (default: auto)")  # fmt: skip
    add("--prefix-cache", default="1GiB", metavar="SIZE",
        help="memory of each model for keys and values of prompts and completions, from which later prompts go on; 0: none "
             "(default: %(default)s)")  # fmt: skip
    add("--threads", type=positive, metavar="N", help="CPU threads (default: all cores)")
    add("--max-adapters", type=positive, default=32, metavar="N",
        help="adapters kept in memory; others lie in --state until they are used (default: %(default)s)")  # fmt: skip
    add("--join-clients", action="store_true",
        help="compute forward and backward passes of several adapters as one where they are ready at the same time: faster for "
             "many clients with little data each. The last digits of a client's gradients then depend on what others "
             "send")  # fmt: skip
    add("--full-models", type=positive, default=0, metavar="N",
        help="models that may train their whole weights at a time (LoRA rank 0), each with weights, gradients and optimiser of "
             "its own; all snapshots of a model together take its weights once more (default: none)")  # fmt: skip
    return parser


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The arguments; `model` has folders by name."""
    parser = serve_parser()
    found = parser.parse_args(arguments)
    found.model = _models(parser, found.model)
    if not found.host:
        parser.error("argument --host: expected an address or a name, received an empty text")
    found.api_keys = _api_keys(parser, found.api_key, found.api_key_file)
    return found


def _port(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, received {text[:100]!r}")
    return int(text)


def _api_keys(parser: ArgumentParser, flag: str | None, file: Path | None) -> dict[str, str]:
    """Keys by name: that of --api-key or the environment has the name "", those of a file the others."""
    name, key = ("argument --api-key", flag) if flag is not None else ("ESPALIER_API_KEY", os.environ.get("ESPALIER_API_KEY"))
    keys = {} if key is None else {"": _checked(parser, name, key)}
    if file is None:
        return keys
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        parser.error(f"argument --api-key-file: {file} cannot be read: {error}")
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        place = f"argument --api-key-file: {file}:{number}"
        name, *rest = line.split()
        if not re.fullmatch(r"[A-Za-z0-9_]{1,32}", name) or len(rest) != 1:
            parser.error(f"{place}: expected a NAME of at most 32 letters, digits and _, and a KEY, received another line")
        if name in keys or rest[0] in keys.values():
            parser.error(f"{place}: expected another name and another key in each line, received one twice")
        keys[name] = _checked(parser, place, rest[0])
    if not keys.keys() - {""}:
        parser.error(f"argument --api-key-file: expected lines of a NAME and its KEY in {file}, received none")
    return keys


def _checked(parser: ArgumentParser, name: str, key: str) -> str:
    if not re.fullmatch(r"[!-~]{1,1000}", key):
        parser.error(f"{name}: expected a key of 1 to 1000 visible ASCII characters, received another text; a variable that is "
                     "empty is no key")  # fmt: skip
    return key


def _models(parser: ArgumentParser, given: list[str]) -> dict[str, Path]:
    """Folders by name, of [NAME=]DIR."""
    models: dict[str, Path] = {}
    for text in given:
        match = re.fullmatch(r"([^=/][^=]*)=(.+)", text)
        folder = Path(match[2] if match else text)
        name = match[1] if match else folder.resolve().name
        check_model(parser, folder)
        if name in models:
            parser.error(f"argument --model: expected another name for each model, received {name} twice")
        models[name] = folder
    return models
