# SPDX-License-Identifier: Apache-2.0
"""The compiled half of Espalier that needs PyTorch. `import espalier` and the command `espalier` find it. Without the package
espalier, after `import torch`: torch.ops.load_library(espalier_torch.library())."""

from pathlib import Path


def library():
    """The file of the operators."""
    return Path(__file__).with_name("libespalier_ops.so")
