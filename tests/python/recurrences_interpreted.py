# SPDX-License-Identifier: Apache-2.0
"""The kernels of flash-linear-attention, or of mamba_ssm, in Triton's interpreter, on the CPU in float32: run as a program with
the name of an operator, it prints the calls of the library and the worst relative difference between the operator in waves of
them and as it is otherwise, forward and backward.

Triton's interpreter has gaps that are filled here: it has nothing to time kernels with, it takes arrays of one number for no
numbers with NumPy 2.4, and variables of its loops are none of its tensors. mamba_ssm as a package imports what it compiles;
its Triton kernels do without.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import builtins
import contextlib
import importlib.machinery
import importlib.util
import sys
import types

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import autotuner, interpreter

autotuner.Autotuner._bench = lambda _self, *_args, **_options: [0.0, 0.0, 0.0]  # the first configuration
patch_tensor = interpreter._patch_lang_tensor


def patch_tensor_for_numpy(tensor, scope):
    patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def loop(*bounds):
    for number in builtins.range(*(bound.__index__() for bound in bounds)):
        yield tl.core.tensor(interpreter.TensorHandle(np.array([number], dtype=np.int32), tl.int32), tl.int32)


interpreter._patch_lang_tensor = patch_tensor_for_numpy


def flash_linear_attention():
    import fla.ops.common.chunk_delta_h as kernels
    from fla.ops import gated_delta_rule as library

    kernels.range = loop
    return library


def mamba_ssm():
    spec = importlib.util.find_spec("mamba_ssm")
    spec.loader = None  # the package as a folder
    sys.modules["mamba_ssm"] = importlib.util.module_from_spec(spec)
    torch.cuda.device = lambda _index: contextlib.nullcontext()
    torch.cuda.get_device_properties = lambda _device: types.SimpleNamespace(multi_processor_count=1)
    from mamba_ssm.ops.triton import ssd_combined as library

    return library


def main(operator):
    from recurrence_stand_ins import GatedDelta, Mamba, installed
    from test_library_recurrences import problem, results, worst

    kind, library = {"gated_delta_rule": (GatedDelta, flash_linear_attention), "ssm_scan": (Mamba, mamba_ssm)}[operator]
    function = getattr(library(), kind.function)

    class Calls(kind):
        def __init__(self):
            super().__init__()
            setattr(self, kind.function, self.call)

        def call(self, *args, **options):
            self.calls += 1
            return function(*args, **options)

    arguments = problem(1, operator, context=True, ends=True, dtype=torch.float32, count=5, dims=(16, 16))
    expected = results(arguments, operator)
    with pytest.MonkeyPatch.context() as monkeypatch, installed(monkeypatch, Calls()) as calls:
        ours = results(arguments, operator)
    print(calls.calls, worst(ours, expected))


if __name__ == "__main__":
    main(sys.argv[1])
