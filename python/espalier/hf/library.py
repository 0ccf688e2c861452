# SPDX-License-Identifier: Apache-2.0
"""The library of the operators torch.ops.espalier."""

import functools
import os
from pathlib import Path

import torch

_BUILT = "build/release/src/espalier/ops/libespalier_ops.so"


@functools.cache
def load():
    """Makes torch.ops.espalier ready."""
    torch.ops.load_library(os.environ.get("ESPALIER_OPS_LIBRARY") or Path(__file__).resolve().parents[3] / _BUILT)


def has_kernel(name, device):
    """Whether the operator can run on `device`."""
    load()
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"espalier::{name}", device.type.upper())
