# SPDX-License-Identifier: Apache-2.0
"""Which kernels are there on a GPU, and right, and which libraries could be."""

import functools
import json
import os

import torch

from . import attention, causal_conv, gated_delta, ssm_scan
from .recurrences import EXTRA, Library
from .verdicts import ATTENTION, OWN, verdict_on, verdicts_on

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


def own_families() -> list[str]:
    """What the compiled trainer and the operators choose by: kernels of Espalier, and the library of attention where it is
    installed."""
    return [family for family in OWN if family != "library" or attention.installed()]


def verdicts_for_trainer(index: int) -> str:
    """The verdicts on a CUDA device, kept or new, as the compiled trainer reads them (src/espalier/measure/kernel_verdicts.h)."""
    findings = verdicts_on(own_families(), index)
    return json.dumps({"verdicts": {family: finding._asdict() for family, finding in findings.items()}})


@functools.cache
def is_attention_right(index: int) -> bool:
    """Whether some attention is right on this CUDA device that is more than chunks of queries with a mask. From then on,
    operators outside of engines take the kernels that are right there, and no others."""
    is_right = {family: verdict_on(family, index).is_right for family in own_families()}
    own = [family for family in ATTENTION if is_right.get(family)]
    torch.ops.espalier_judge.take_kernels(own, is_right["head"])
    return (os.environ.get("ESPALIER_ATTENTION") or (own or ["masked"])[0]) != "masked"
