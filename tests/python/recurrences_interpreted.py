# SPDX-License-Identifier: Apache-2.0
"""The kernels of flash-linear-attention, or of mamba_ssm, in Triton's interpreter on the CPU: run as a program with the name of
an operator and a dtype. In float32 it prints the calls of the library and the worst relative difference between the operator
in waves of them and as it is otherwise, forward and backward. In bfloat16 they are judged as on a GPU, on a small forest.

Triton's interpreter has gaps that are filled here: it has nothing to time kernels with, it takes arrays of one number for no
numbers with NumPy 2.4, variables of its loops are none of its tensors, it multiplies the bits of bfloat16 as if they were whole
numbers, and cuts numbers off where GPUs round them. mamba_ssm as a package imports what it compiles; its Triton kernels do
without.
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


cast, dot = interpreter.InterpreterBuilder.cast_impl, interpreter.InterpreterBuilder.create_dot


def rounding_cast(self, values, kind):
    if values.dtype.scalar != tl.float32 or kind.scalar != tl.bfloat16:
        return cast(self, values, kind)
    rounded = torch.from_numpy(np.ascontiguousarray(values.data)).bfloat16().view(torch.int16).numpy()
    return interpreter.TensorHandle(rounded.view(np.uint16), tl.bfloat16)


def dot_of_numbers(self, a, b, *others):
    def numbers(values):
        if values.dtype.scalar != tl.bfloat16:
            return values
        return interpreter.TensorHandle((values.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    return dot(self, numbers(a), numbers(b), *others)


interpreter._patch_lang_tensor = patch_tensor_for_numpy
interpreter.InterpreterBuilder.cast_impl = rounding_cast
interpreter.InterpreterBuilder.create_dot = dot_of_numbers


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


SMALL = [-1, *range(19), 19, 20, 21, 22, 19, 24, 25, -2, 27, 28, -3, 30, 30]  # `prev`: three trees, two from states


def judged(operator):
    from espalier.kernels import checks, recurrence_cases

    recurrence_cases.forests = lambda: {"small": SMALL}
    recurrence_cases.SIZES = {operator: ((16, 0.1),)}
    recurrence_cases.HEADS, recurrence_cases.GROUPS = 2, 1
    return checks.judged(recurrence_cases.cases(operator, torch.bfloat16, "cpu"))


def main(operator, dtype):
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

    with pytest.MonkeyPatch.context() as monkeypatch:
        if dtype == "bfloat16":
            with installed(monkeypatch, Calls()) as calls:
                finding = judged(operator)
            print(finding)
            return 0 if finding.is_right and calls.calls > 4 else 1
        arguments = problem(1, operator, context=True, ends=True, dtype=torch.float32, count=5, dims=(16, 16))
        expected = results(arguments, operator)
        with installed(monkeypatch, Calls()) as calls:
            difference = worst(results(arguments, operator), expected)
    print(calls.calls, difference)
    return 0 if calls.calls > 4 and difference < 1e-5 else 1  # float32, in another order of adding


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
