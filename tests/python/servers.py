# SPDX-License-Identifier: Apache-2.0
"""What the tests of `espalier serve` have in common: a server in a process of its own, and the official client."""

import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

from tinker import types

PYTHON = Path(__file__).resolve().parents[2] / "python"


@contextmanager
def server(folder, state, *flags, dtype="float64"):
    """The address of a server of one model, and its process."""
    environment = {**os.environ, "PYTHONPATH": f"{PYTHON}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "espalier.server", "--model", f"tiny={folder}", "--port", "0", "--state", str(state), "--dtype", dtype,
         "--threads", "1", *map(str, flags)], stderr=subprocess.PIPE, text=True, env=environment)  # fmt: skip
    said = []
    try:
        for line in process.stderr:
            said.append(line)
            if " on http://" in line:
                break
        else:
            raise AssertionError("".join(said))
        reader = threading.Thread(target=said.extend, args=[process.stderr], daemon=True)
        reader.start()
        process.said = said
        yield said[-1].split()[-1], process
    finally:
        process.kill()
        process.wait()


def client(address):
    """A ServiceClient of the official SDK."""
    import tinker

    return tinker.ServiceClient(base_url=address, api_key="tml-local")


def datum(tokens, targets=None, **inputs):
    """Of a sequence: each token but the last predicts the next, unless other targets are given."""
    targets = tokens[1:] if targets is None else targets
    return types.Datum(model_input=types.ModelInput.from_ints(list(map(int, tokens[:-1]))),
                       loss_fn_inputs={"target_tokens": targets, **inputs})  # fmt: skip


def prompt(*tokens):
    return types.ModelInput.from_ints(list(tokens))
