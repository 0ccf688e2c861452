# SPDX-License-Identifier: Apache-2.0
"""Loads the compiled trainer, or raises one error that says how to get it. PyTorch's Python half is not imported, which takes
seconds: the trainer needs its libraries alone."""

import ctypes
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from . import native as _core  # noqa: F401  its class of rows is taken by the trainer
from . import torch_package
from .errors import InputError


def load(name: str) -> ModuleType:
    """The compiled trainer, for messages of the command `name`: espalier._engine beside this file, else that of espalier-torch.
    Raises InputError where it is not there, or does not fit PyTorch."""
    try:
        return find()
    except ImportError as error:
        raise InputError(f"{name} needs LibTorch: {error}") from None


def find() -> ModuleType:
    """The compiled trainer. Raises ImportError where it is not there, or does not fit PyTorch."""
    if importlib.util.find_spec("espalier._engine"):
        return _loaded("espalier._engine")
    folder = torch_package.find()
    if folder is None:
        raise ImportError(f"run {torch_package.INSTALL}, or `make build` in a clone", name="espalier._engine")
    torch_package.check(folder, torch_package.installed_torch())
    return _loaded("espalier_torch._engine")


def _loaded(name: str) -> ModuleType:
    if name not in sys.modules:
        _load_torch_libraries()
        engine = importlib.import_module(name)
        engine.judge_kernels_by(_verdicts)
        engine.listen(_say, lambda *_: None, lambda: None)  # until a command does
    return sys.modules[name]


def _say(text: str) -> None:
    if sys.stderr:
        print(text, file=sys.stderr, flush=True)


def _verdicts(index: int) -> str:
    """Of the judge of kernels, on the CUDA device of this index."""
    from .kernels.libraries import verdicts_for_trainer  # which imports PyTorch

    return verdicts_for_trainer(index)


def _load_torch_libraries() -> None:
    """Those of the PyTorch that is installed, which need not lie where the trainer was built."""
    spec = None if "torch" in sys.modules else importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return
    folder = Path(spec.origin).parent / "lib"
    for library in ("libc10.so", "libtorch_cpu.so"):  # the trainer loads those of CUDA where a GPU is used
        if (folder / library).is_file():
            try:
                ctypes.CDLL(str(folder / library))
            except OSError as error:
                raise ImportError(str(error)) from None
