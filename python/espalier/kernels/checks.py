# SPDX-License-Identifier: Apache-2.0
"""The judge of kernels: results are compared with float64 by the one rule (error_ratio.py), second runs by their bits, and what
our own kernels write has guards around it. verdicts.py keeps what is found. docs/architecture/cuda-kernels.md has the families.
"""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from ..error_ratio import MAX_RATIO, error_ratio
from ..errors import InputError
from . import attention_cases, operator_cases, recurrence_cases
from .cases import Case, Results, named
from .verdicts import ATTENTION, OPERATORS, OWN, TIMES, Finding, limit_of

MAX_FLOAT64_ERROR = 1e-12  # relative to the exact values


class _Errors:
    """Of one result, pooled over cases: sums of squares, and the case with the largest error by value."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.ours = self.plain = self.exact = self.floor = 0.0
        self.worst, self.worst_name = -1.0, ""

    def add(self, name: str, ours: Tensor, plain: Tensor, exact: Tensor, floor: float) -> None:
        error, plain_error, size = (float(values.square().sum()) for values in (ours - exact, plain - exact, exact))
        self.ours, self.plain, self.exact = self.ours + error, self.plain + plain_error, self.exact + size
        self.floor += floor**2 * size
        if (mean := error / max(exact.numel(), 1)) > self.worst:
            self.worst, self.worst_name = mean, name

    def fault(self) -> str:
        """What is wrong; "" where nothing is."""
        if self.dtype == torch.float64:
            error = (self.ours / (self.exact or 1)) ** 0.5
            fault = f"expected an error of at most {MAX_FLOAT64_ERROR:g}, received {error:.3g}"
            return "" if error <= MAX_FLOAT64_ERROR else f"{fault}, worst on {self.worst_name}"
        # error_ratio takes half of a unit roundoff.
        least = max(torch.finfo(self.dtype).eps / 2 * self.exact**0.5, 2 * self.floor**0.5)
        ratio = error_ratio(self.ours**0.5, self.plain**0.5, least)
        fault = f"expected an error of at most {MAX_RATIO:g} times the plain form's, received {ratio:.3g} times"
        return "" if ratio <= MAX_RATIO else f"{fault}, worst on {self.worst_name}"


def judged(cases: Iterator[Case]) -> Finding:
    """What is wrong with our results over all cases."""
    checks, pooled = 0, dict[str, _Errors]()
    for case in cases:
        ours, is_within = _guarded(case)
        if not is_within:
            return Finding(checks, f"writes beyond its outputs, on {case.name}")
        again = ours if case.same_bits is not None and not case.same_bits else case.ours()
        plain, exact = case.plain(), case.exact()
        for name, right in exact.items():
            checks += 1
            title = f"{case.kind}: {name}" if case.kind else name
            mine, beside, right = ours[name], plain[name], right.double().cpu()
            if mine.shape != right.shape or mine.dtype != beside.dtype or not bool(mine.isfinite().all()):
                return Finding(checks, f"{title}: not finite, or of another shape or dtype, on {case.name}")
            if (case.same_bits is None or name in case.same_bits) and not torch.equal(_bits(mine), _bits(again[name])):
                return Finding(checks, f"{title}: other bits in another run, on {case.name}")
            errors = pooled.setdefault(title, _Errors(mine.dtype))
            errors.add(case.name, mine.double().cpu(), beside.double().cpu(), right, case.floors.get(name, 0.0))
    faults = (f"{title}: {fault}" for title, errors in pooled.items() if (fault := errors.fault()))
    return Finding(checks, next(faults, ""))


def _guarded(case: Case) -> tuple[Results, bool]:
    """(our results, whether all that our own kernels have written lies within what they had)."""
    torch.ops.espalier_judge.guard_outputs(True)
    try:
        ours = case.ours()
    finally:
        broken = torch.ops.espalier_judge.guard_outputs(False)
    return ours, broken == 0


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8) if values.dim() else values


def families(device: str) -> list[str]:
    """Those of Espalier itself on a device."""
    return [*(ATTENTION if device.startswith("cuda") else ["cpu"]), *OPERATORS]


def check(family: str, device: str) -> Finding:
    """Checks a family in this process. Raises InputError where the device has none such."""
    operator, _, name = family.partition(" ")
    if operator in recurrence_cases.PROBLEMS:
        dtype: torch.dtype = getattr(torch, name)
        with named("ESPALIER_RECURRENCES", "library"):
            finding = judged(recurrence_cases.cases(operator, dtype, device))
        if operator not in recurrence_cases.TIMED or not finding.is_right:
            return finding
        return finding._replace(rates=recurrence_cases.measured(operator, dtype, device))
    if family == TIMES:
        rates = attention_cases.measured(device)
        return Finding(0 if rates is None else len(rates), "", rates)
    if family in operator_cases.CASES:
        with named("ESPALIER_HEAD", "kernels"):
            return _check_each([(dtype, 0) for dtype in operator_cases.DTYPES], family, device)
    if family not in ("library", *families(device)):
        raise InputError(f"expected a family of kernels of {device}: {', '.join(families(device))}; received {family}")
    dtypes, dims = attention_cases.SERVED[family]
    with named("ESPALIER_ATTENTION", family if family in ATTENTION else "masked"):
        return _check_each([(dtype, dim) for dtype in dtypes for dim in dims], family, device)


def _check_each(kinds: list[tuple[torch.dtype, int]], family: str, device: str) -> Finding:
    """Each dtype, and size of heads where there are any, by itself, up to the first fault."""
    checks = 0
    for dtype, dim in kinds:
        cases = attention_cases.cases(dim, dtype, device) if dim else operator_cases.CASES[family](dtype, device)
        finding = judged(cases)
        checks += finding.checks
        if finding.fault:
            place = f"{str(dtype).removeprefix('torch.')}{f', head dimension {dim}' if dim else ''}"
            return Finding(checks, f"{place}: {finding.fault}")
    return Finding(checks)


def run_child(family: str, device: str, file: str) -> None:
    """What the process of a check does."""
    signal.alarm(int(limit_of(family)))  # nobody waits any more for a check whose parent was killed
    Path(file).write_text(json.dumps(finding_of(family, device)._asdict()))


def finding_of(family: str, device: str) -> Finding:
    """Checks a family in this process, whose settings become those of an engine. Kernels of our own that fail are wrong."""
    if family in OWN:
        _keep_full_precision()
    try:
        finding = check(family, device)
        if device != "cpu":
            torch.cuda.synchronize(device)
    except RuntimeError as error:
        if family not in OWN or "out of memory" in str(error):  # which says nothing about kernels
            raise
        return Finding(1, str(error).partition("\n")[0])
    return finding


def _keep_full_precision() -> None:
    """As src/espalier/runtime/device.cpp does, and what cuBLAS needs under deterministic algorithms."""
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
