# SPDX-License-Identifier: Apache-2.0
"""Checks of kernels on a GPU, for Python (kernel_verdicts.py), as src/espalier/qualify does them and by the same rule: against
float64, an error of at most twice that of the plain form in the same dtype, and equal bits in a second run.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from . import attention_cases, recurrence_cases
from .kernel_cases import Case, named
from .kernel_verdicts import TIMES, Finding

MOST_RATIO = 2.0  # of our error to that of the plain form (src/espalier/base/error_ratio.h)


def judged(cases: Iterator[Case], dtype: torch.dtype) -> Finding:
    """What is wrong with our results over all cases, each kind of them pooled."""
    checks, pooled = 0, dict[int, list[float]]()
    for case in cases:
        ours, again, plain, exact = case.ours(), case.ours(), case.plain(), case.exact()
        for kind, (mine, other, theirs, right) in enumerate(zip(ours, again, plain, exact)):
            checks += 1
            right = right.double().cpu()
            if mine.shape != right.shape or not bool(mine.isfinite().all()):
                return Finding(checks, f"{case.name}: result {kind} is not finite, or of another shape")
            if kind == 0 and not torch.equal(mine, other):
                return Finding(checks, f"{case.name}: other bits in another run")
            sums = pooled.setdefault(kind, [0.0, 0.0, 0.0])
            for place, values in enumerate((mine.double().cpu() - right, theirs.double().cpu() - right, right)):
                sums[place] += float(values.square().sum())
    for kind, (mine_squared, plain_squared, exact_squared) in pooled.items():
        least = torch.finfo(dtype).eps / 4 * exact_squared**0.5  # half a unit roundoff
        ratio = max(mine_squared**0.5, least) / max(plain_squared**0.5, least, 1e-300)
        if not ratio <= MOST_RATIO:
            return Finding(checks, f"result {kind}: expected an error of at most {MOST_RATIO:g} times the plain form's, "
                                   f"received {ratio:.3g} times")  # fmt: skip
    return Finding(checks)


def check(family: str, device: str) -> Finding:
    """Checks a family in this process."""
    kind, _, dtype = family.partition(" ")
    if kind == "recurrences":
        with named("ESPALIER_RECURRENCES", "library"):
            finding = judged(recurrence_cases.cases(getattr(torch, dtype), device), getattr(torch, dtype))
        return finding._replace(rates=recurrence_cases.measured(device)) if finding.is_right else finding
    if family == TIMES:
        rates = attention_cases.measured(device)
        return Finding(0 if rates is None else len(rates), "", rates)
    findings = []
    with named("ESPALIER_ATTENTION", family):
        for each in (torch.bfloat16, torch.float16):
            findings.append(judged(attention_cases.cases(family, each, device), each))
    return Finding(sum(finding.checks for finding in findings), next((f.fault for f in findings if f.fault), ""))


def run_child(family: str, device: str, file: str) -> None:
    """What the process of a check does."""
    Path(file).write_text(json.dumps(check(family, device)))
