# SPDX-License-Identifier: Apache-2.0
"""Kernels of other libraries that know GPUs alone, in layers of a model on a CPU: what to say when they fail."""

import contextlib
import re
import sys
from collections.abc import Iterator
from types import TracebackType

from torch import nn

from ..errors import Unsupported, in_one_line

# Packages that call kernels of others; a kernel is of the innermost package that is none of them.
_CALLERS = {"accelerate", "espalier", "peft", "torch", "transformers", "triton", "trl", *sys.stdlib_module_names}
_COMPILER = "triton"  # which looks for the driver of a GPU
_ABOUT_GPUS = re.compile(r"cuda|gpu|\bcpu\b|triton|nvidia|active drivers", re.IGNORECASE)


@contextlib.contextmanager
def naming_layers(subject: str) -> Iterator[None]:
    """Inside, such a failure is raised as Unsupported, which begins with `subject` and names the layer and the library."""
    try:
        yield
    except Unsupported:
        raise
    except Exception as failure:
        what = what_needs_a_gpu(failure)
        if what is None:
            raise
        raise Unsupported(f"{subject}: {what}; move the model to a GPU, or run it without them") from None


def what_needs_a_gpu(failure: BaseException) -> str | None:
    """The layer and the library whose kernels have failed on a CPU; None where something else has failed."""
    modules, packages = _places(failure.__traceback__)
    library = next((package for package in reversed(packages) if package not in _CALLERS), None)
    if not modules or library is None or not (_COMPILER in packages or _ABOUT_GPUS.search(str(failure))):
        return None
    model, layer = modules[0], modules[-1]
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        return None
    path = next(path for path, module in model.named_modules(remove_duplicate=False) if module is layer)
    return (f"{path or 'the model'} ({type(layer).__name__}) runs kernels of {library}, which fail on a CPU "
            f"({in_one_line(failure)})")  # fmt: skip


def _places(traceback: TracebackType | None) -> tuple[list[nn.Module], list[str]]:
    """(modules whose forward passes a failure is in, packages of the functions that the innermost of them has called), both from
    the outermost."""
    modules: list[nn.Module] = []
    packages: list[str] = []
    while traceback is not None:
        frame = traceback.tb_frame
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and (not modules or any(part is owner for part in modules[0].modules())):
            if not modules or owner is not modules[-1]:
                packages.clear()
            modules.append(owner)
        packages.append(str(frame.f_globals.get("__name__")).partition(".")[0])
        traceback = traceback.tb_next
    return modules, packages
