# SPDX-License-Identifier: Apache-2.0
"""The compiled trainer, or one error that says how to build it."""

import importlib
import importlib.util
from types import ModuleType
from typing import TYPE_CHECKING

from . import native as _core  # noqa: F401  its class of rows is taken by the trainer
from . import torch_package as _package

try:
    # They load PyTorch and the operators, against which the trainer is linked: it takes those that are there.
    from . import ops as _ops  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError("espalier.Engine: expected PyTorch, which is not installed for this Python", name="torch") from None
from .kernels.libraries import verdicts_for_trainer


def _load() -> ModuleType:
    """espalier._engine of a clone or a prefix, else that of espalier-torch."""
    if importlib.util.find_spec("espalier._engine"):
        return importlib.import_module("espalier._engine")
    folder = _package.find()
    if folder is None:
        raise ImportError("espalier.Engine: expected the compiled trainer (espalier._engine), which is not installed for this "
                          f"Python: run {_package.INSTALL}, or `make build` in a clone of Espalier with the Python that has your "
                          "PyTorch, and set PYTHONPATH to the clone's folder python", name="espalier._engine")  # fmt: skip
    _package.check(folder, _package.installed_torch())
    return importlib.import_module("espalier_torch._engine")


if TYPE_CHECKING:
    import espalier._engine as native
else:
    native = _load()

native.judge_kernels_by(verdicts_for_trainer)

__all__ = ["native"]
