# SPDX-License-Identifier: Apache-2.0
"""The compiled trainer, or one error that says how to build it."""

import json
import os
import sys
from typing import TYPE_CHECKING

from . import engine_library

try:
    # They load PyTorch and the operators, against which the trainer is linked: it takes those that are there.
    from . import ops as _ops  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError("espalier.Engine: expected PyTorch, which is not installed for this Python", name="torch") from None


if TYPE_CHECKING:
    import espalier._engine as native
else:
    try:
        native = engine_library.find()
    except ImportError as error:
        raise ImportError(f"espalier.Engine: expected the compiled trainer (espalier._engine): {error}",
                          name=error.name) from None  # fmt: skip

# A process that checks one family of kernels: native.check_kernels(family, device, file) follows. None: there is no
# interpreter to run it with, as where Python is embedded.
CHECK_COMMAND: list[str] | None = [sys.executable, "-c", "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
                 "from espalier.native_engine import native; native.check_kernels(*sys.argv[2:])",
                 json.dumps([os.fspath(folder) for folder in sys.path])] if sys.executable else None  # fmt: skip
if CHECK_COMMAND:
    native.check_kernels_by(CHECK_COMMAND)

__all__ = ["CHECK_COMMAND", "native"]
