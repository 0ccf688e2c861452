# SPDX-License-Identifier: Apache-2.0
"""Liger's forwards of models with a head, which compute logits and their cross-entropy in one kernel, for every row.

Without labels such a forward is that of Transformers, so that shared_head.py computes the loss of distinct tokens with it."""

import inspect
import sys
from collections.abc import Mapping
from typing import Any

from .origin import home_of

_MODELS = "liger_kernel.transformers.model."
_FUNCTIONS = "liger_kernel.transformers.functional"
# Of the loss, those that shared_head.py knows as well, and the dtype in which the kernel adds up gradients of its chunks.
_KNOWN = ("ignore_index", "accum_dtype")
OPTIONS = ("skip_logits", "accum_dtype")  # which the forward of Transformers does not take


def is_fused(forward: Any) -> bool:
    """Whether it is Liger's forward of a causal language model, as a function or bound to a model."""
    return getattr(forward, "__name__", None) == "lce_forward" and home_of(forward).startswith(_MODELS)


def is_served(batch: Mapping[str, Any]) -> bool:
    """Whether Liger's loss of a batch, if there is one, is the mean of -log p of `labels`, with no option that changes it or
    returns more. batch: the arguments that are not None."""
    if "labels" not in batch:
        return "shift_labels" not in batch and not batch.get("skip_logits")
    if batch.get("return_dict", True) is False:  # which has places for what is None
        return False
    function = sys.modules[_FUNCTIONS].liger_fused_linear_cross_entropy  # which takes what the loss does not name
    return not any(name in batch and name not in _KNOWN for name in inspect.signature(function).parameters)
