# SPDX-License-Identifier: Apache-2.0
"""Which libraries of kernels are there on a GPU, and right, and which could be."""

from .. import ops
from . import attention, causal_conv, gated_delta, ssm_scan
from .recurrences import EXTRA, Library
from .verdicts import verdict_on

OPERATORS = (gated_delta.LIBRARY, ssm_scan.LIBRARY, causal_conv.LIBRARY)  # those of operators other than attention


def has_attention(index: int) -> bool:
    """Whether cudnn.flex_attention is installed, serves the CUDA device of this index, and is right on it."""
    return bool(attention.installed()) and attention.is_served(index) and verdict_on("library", index).is_right


def has_operator(library: Library, index: int) -> bool:
    """Whether a library is installed, and right on the CUDA device of this index in bfloat16."""
    return bool(library.installed()) and verdict_on(library.family(library.dtypes[0]), index).is_right


def missing_on(index: int) -> str:
    """What installing the extra would add on this CUDA device; "" where nothing."""
    lacking = []
    if attention.is_served(index) and not attention.installed():
        lacking.append("cudnn.flex_attention for attention")
    lacking += [f"{library.package} for {library.title}" for library in OPERATORS
                if library.command == EXTRA and not library.installed()]  # fmt: skip
    return f"{EXTRA} adds {' and '.join(lacking)}" if lacking else ""


def is_attention_right(index: int) -> bool:
    """Whether the attention that ops.tree_attention takes by itself on this CUDA device is right. A library that is not is
    taken no more."""
    library, own = (verdict_on(family, index) for family in ("library", "ampere"))
    if library.fault and (registered := ops._registered.pop("attention", None)):
        registered._destroy()
    return not own.fault and (own.checks > 0 or library.is_right)
