# SPDX-License-Identifier: Apache-2.0
"""Training a PyTorch model on a plan: `espalier.Step`."""

from .step import Step

__all__ = ["Step"]
