# SPDX-License-Identifier: Apache-2.0
"""The kernels of flash-linear-attention in Triton's interpreter, on the CPU in float32: run as a program, it prints the worst
relative difference between gated_delta_rule in waves of them and as the operator has it, forward and backward.

Triton's interpreter has gaps that are filled here: it has nothing to time kernels with, it takes arrays of one number for no
numbers with NumPy 2.4, and variables of its loops are none of its tensors.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import builtins

import numpy as np
import pytest
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
import fla.ops.common.chunk_delta_h as kernels  # noqa: E402
from fla.ops import gated_delta_rule as library  # noqa: E402

kernels.range = loop

if __name__ == "__main__":
    import torch

    from fla_stand_in import installed
    from test_library_recurrences import problem, results, worst

    class Calls:
        number = 0

        def chunk_gated_delta_rule(self, *args, **options):
            self.number += 1
            return library.chunk_gated_delta_rule(*args, **options)

    arguments = problem(1, context=True, ends=True, dtype=torch.float32, count=5, dims=(16, 16))
    expected = results(arguments)
    with pytest.MonkeyPatch.context() as monkeypatch, installed(monkeypatch, Calls()) as calls:
        ours = results(arguments)
    print(calls.number, worst(ours, expected))
