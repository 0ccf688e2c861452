# SPDX-License-Identifier: Apache-2.0
"""Tells servers of samples, vLLM or SGLang, to load published weights: `python -m espalier.publish`."""

from .names import adapter_name

__all__ = ["adapter_name"]
