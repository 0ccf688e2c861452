# SPDX-License-Identifier: Apache-2.0
"""Kernels of a GPU prove themselves before Python uses them, where the compiled trainer does not see to that.

Each family is checked in a process of its own with a time limit, as src/espalier/qualify does it and by the same rule: against
float64, an error of at most twice that of the plain form in the same dtype, and equal bits in a second run. Verdicts are kept
under the GPU, the driver, the versions of PyTorch and of the library, and a digest of the sources.

Families: "library" and "ampere" (attention, as ESPALIER_ATTENTION names them), which the compiled trainer checks itself where
it is there; "attention times", which compares only how long both take; "recurrences bfloat16" and "recurrences float32"
(library_recurrences.py), with what they take of time.
"""

import contextlib
import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

LIMIT_SECONDS = 240.0  # Triton and CUTLASS compile meanwhile
TIMES = "attention times"
MOST_RATIO = 2.0  # of our error to that of the plain form (src/espalier/base/error_ratio.h)


class Finding(NamedTuple):
    """checks: results that were compared, 0 where the device does not serve the family; rates: of what was timed."""

    checks: int = 0
    fault: str = ""
    rates: tuple[float, ...] | None = None

    @property
    def is_right(self) -> bool:
        return self.checks > 0 and not self.fault


class Case(NamedTuple):
    """A problem and three functions of it, which give results in order: ours in the dtype, the plain form in it, and the
    exact one, in float64."""

    name: str
    ours: Callable[[], list[torch.Tensor]]
    plain: Callable[[], list[torch.Tensor]]
    exact: Callable[[], list[torch.Tensor]]


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
        from . import recurrence_cases

        with named("ESPALIER_RECURRENCES", "library"):
            finding = judged(recurrence_cases.cases(getattr(torch, dtype), device), getattr(torch, dtype))
        return finding._replace(rates=recurrence_cases.measured(device)) if finding.is_right else finding
    from . import attention_cases

    if family == TIMES:
        rates = attention_cases.measured(device)
        return Finding(0 if rates is None else len(rates), "", rates)
    findings = []
    with named("ESPALIER_ATTENTION", family):
        for each in (torch.bfloat16, torch.float16):
            findings.append(judged(attention_cases.cases(family, each, device), each))
    return Finding(sum(finding.checks for finding in findings), next((f.fault for f in findings if f.fault), ""))


@contextlib.contextmanager
def named(variable: str, value: str) -> Iterator[None]:
    """An environment variable has this value inside."""
    before = os.environ.get(variable)
    os.environ[variable] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def run_child(family: str, device: str, file: str) -> None:
    """What the process of a check does."""
    from . import ops  # noqa: F401

    Path(file).write_text(json.dumps(check(family, device)))


def is_ours_faster(index: int) -> bool:
    """Whether "ampere" has taken less time than "library" on this CUDA device, where it serves both."""
    times = verdict_on(TIMES, index).rates
    return times is not None and times[1] < times[0]


def is_attention_right(index: int) -> bool:
    """Whether the attention that ops.tree_attention takes by itself on this CUDA device is right. A library that is not is
    taken no more."""
    from . import ops

    library, own = (verdict_on(family, index) for family in ("library", "ampere"))
    if library.fault and (registered := ops._registered.pop("attention", None)):
        registered._destroy()
    return not own.fault and (own.checks > 0 or library.is_right)


@functools.cache
def verdict_on(family: str, index: int) -> Finding:
    """What is known about a family on the CUDA device of this index: kept, or found now. Warns once of what is wrong."""
    key = _key(family, index)
    place = folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    if (kept := _read(place, key)) is not None:
        finding = kept
    else:
        finding, is_lasting = _checked(family, f"cuda:{index}")
        if is_lasting:
            _write(place, key, finding)
    if finding.fault:
        warnings.warn(f"espalier: kernels of `{family}` are not used on {torch.cuda.get_device_name(index)}: {finding.fault}",
                      stacklevel=2)  # fmt: skip
    return finding


def _checked(family: str, device: str) -> tuple[Finding, bool]:
    """(finding of a new process, whether it is about the kernels)."""
    if not sys.executable:
        return Finding(1, "sys.executable names no Python that could check them"), False
    code = ("import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
            "from espalier.kernel_checks import run_child; run_child(*sys.argv[2:])")  # fmt: skip
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-c", code, json.dumps([os.fspath(each) for each in sys.path]), family, device, file.name]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return Finding(1, f"their check did not end within {LIMIT_SECONDS:g} s"), True
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            return Finding(1, f"their check ended with status {done.returncode}: {said}"), done.returncode < 0
        return _finding_of(json.loads(Path(file.name).read_text())), True


def _finding_of(values: Any) -> Finding:
    checks, fault, rates = values
    return Finding(int(checks), str(fault), None if rates is None else tuple(map(float, rates)))


def folder() -> Path:
    """Where verdicts are kept: $XDG_CACHE_HOME/espalier/kernels or ~/.cache/espalier/kernels."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "espalier" / "kernels"


def _key(family: str, index: int) -> str:
    from . import library_attention, library_recurrences

    properties = torch.cuda.get_device_properties(index)
    return json.dumps([family, properties.name, properties.major, properties.minor, torch.__version__, _driver(),
                       library_attention.installed(), library_recurrences.installed(), _sources()])  # fmt: skip


def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return ""


@functools.cache
def _sources() -> str:
    """Of the modules that compute, and of the libraries of operators."""
    files = [*sorted(Path(__file__).parent.glob("*.py")), *map(Path, sorted(torch.ops.loaded_libraries))]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def _read(place: Path, key: str) -> Finding | None:
    try:
        found = json.loads(place.read_text())
        if found["key"] != key:
            return None
        return _finding_of(found["finding"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(place: Path, key: str, finding: Finding) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=place.parent, suffix=".part", delete=False) as file:
            json.dump({"key": key, "finding": finding}, file)
        os.replace(file.name, place)
    except OSError:
        return


def forget() -> None:
    """Verdicts are read, or found, again in this process."""
    verdict_on.cache_clear()


def seconds_of(call: Callable[[], None], device: str) -> float:
    """The least of three calls, after one that compiles."""
    taken = []
    for _ in range(4):
        if device != "cpu":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        call()
        if device != "cpu":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def values_of(results: Any) -> list[torch.Tensor]:
    return [each.detach() for each in results]
