# SPDX-License-Identifier: Apache-2.0
"""The compiled trainer, or one error that says how to build it."""

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

__all__ = ["native"]
