# SPDX-License-Identifier: Apache-2.0
"""Checks of kernels on a GPU, for Python (verdicts.py), much as src/espalier/qualify does them: against float64 by the one rule
(error_ratio.py), and equal bits of the forward pass in a second run. docs/architecture/cuda-kernels.md has the differences.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from ..error_ratio import MAX_RATIO, error_ratio
from . import attention_cases, recurrence_cases
from .cases import OUT, Case, named
from .verdicts import TIMES, Finding


def judged(cases: Iterator[Case], dtype: torch.dtype) -> Finding:
    """What is wrong with our results over all cases, those of one name pooled."""
    checks, pooled, terms = 0, dict[str, list[float]](), dict[str, int]()
    for case in cases:
        ours, again, plain, exact = case.ours(), case.ours(), case.plain(), case.exact()
        terms |= {name: max(count, terms.get(name, 0)) for name, count in case.terms.items()}
        for name, right in exact.items():
            checks += 1
            mine, right = ours[name], right.double().cpu()
            if mine.shape != right.shape or not bool(mine.isfinite().all()):
                return Finding(checks, f"{name}: not finite, or of another shape, on {case.name}")
            if name == OUT and not torch.equal(mine, again[name]):
                return Finding(checks, f"{name}: other bits in another run, on {case.name}")
            sums = pooled.setdefault(name, [0.0, 0.0, 0.0])
            for place, values in enumerate((mine.double().cpu() - right, plain[name].double().cpu() - right, right)):
                sums[place] += float(values.square().sum())
    for name, sums in pooled.items():
        our_error, plain_error, size = (each**0.5 for each in sums)
        sum_error = terms.get(name, 0) ** 0.5 * torch.finfo(torch.float32).eps / 2  # error_of_sum of qualify/operator_family.h
        ratio = error_ratio(our_error, plain_error, max(torch.finfo(dtype).eps / 2, sum_error), size)
        if not ratio <= MAX_RATIO:
            return Finding(checks, f"{name}: expected an error of at most {MAX_RATIO:g} times the plain form's, "
                                   f"received {ratio:.3g} times")  # fmt: skip
    return Finding(checks)


def check(family: str, device: str) -> Finding:
    """Checks a family in this process."""
    operator, _, name = family.partition(" ")
    if operator in recurrence_cases.PROBLEMS:
        dtype: torch.dtype = getattr(torch, name)
        with named("ESPALIER_RECURRENCES", "library"):
            finding = judged(recurrence_cases.cases(operator, dtype, device), dtype)
        if operator not in recurrence_cases.TIMED or not finding.is_right:
            return finding
        return finding._replace(rates=recurrence_cases.measured(operator, dtype, device))
    if family == TIMES:
        rates = attention_cases.measured(device)
        return Finding(0 if rates is None else len(rates), "", rates)
    with named("ESPALIER_ATTENTION", family):
        return _check_attention(attention_cases.HEAD_DIMS[family], device)


def _check_attention(dims: tuple[int, ...], device: str) -> Finding:
    """Each dtype and size of heads by itself, up to the first fault."""
    checks = 0
    for dtype in (torch.bfloat16, torch.float16):
        for dim in dims:
            finding = judged(attention_cases.cases(dim, dtype, device), dtype)
            checks += finding.checks
            if finding.fault:
                name = str(dtype).removeprefix("torch.")
                return Finding(checks, f"{name}, head dimension {dim}: {finding.fault}")
    return Finding(checks)


def run_child(family: str, device: str, file: str) -> None:
    """What the process of a check does."""
    Path(file).write_text(json.dumps(check(family, device)))
