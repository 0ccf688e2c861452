# SPDX-License-Identifier: Apache-2.0
"""Holds libespalier_ops.so, which `import espalier.ops` loads. Without the package espalier, after `import torch`:
torch.ops.load_library(espalier_ops.library())."""

from pathlib import Path


def library():
    """The file of the operators."""
    return Path(__file__).with_name("libespalier_ops.so")
