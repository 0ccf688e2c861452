# SPDX-License-Identifier: Apache-2.0
"""What is known about the kernels of a GPU, by family: found by a separate process with a time limit (checks.py), and kept in one
file for the GPU, its driver, PyTorch and the build of the operators. The compiled trainer reads it
(src/espalier/measure/kernel_verdicts.h).

Families: "library", "ampere" and "masked" (attention, as ESPALIER_ATTENTION names them); "head", "distribution" and "products",
of Espalier itself as well; "attention times", which compares only how long the first two take; operators that another library
computes in a dtype, as "gated_delta_rule bfloat16" (libraries.py), with what recurrences take of time.
"""

import contextlib
import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import kept
from ..torch_package import version_of

LIMIT_SECONDS = 600.0  # Triton, CUTLASS and TileLang compile meanwhile
LONGER_SECONDS = {"ssm_scan": 1200.0}  # by operator: a dozen kernels, each tuned among up to eleven configurations
TIMES = "attention times"
ATTENTION = ("library", "ampere", "masked")  # in order of preference
OPERATORS = ("head", "distribution", "products")
OWN = (*ATTENTION, *OPERATORS)  # what the compiled trainer knows
LIBRARIES = ("nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "flash-linear-attention", "fla-core", "flash-qla", "tilelang",
             "mamba-ssm", "causal-conv1d", "triton")  # fmt: skip


class Finding(NamedTuple):
    """What a check has found.

    checks      results that were compared, 0 where the device does not serve the family
    fault       "" where there is none
    rates       of what was timed
    is_lasting  whether it is about the kernels: not where the check could not be made, as for want of memory"""

    checks: int = 0
    fault: str = ""
    rates: tuple[float, ...] | None = None
    is_lasting: bool = True

    @property
    def is_right(self) -> bool:
        return self.checks > 0 and not self.fault


_known: dict[tuple[str, int], Finding] = {}  # in this process, by family and device
_told: set[tuple[str, int]] = set()  # what has been warned of


def is_ours_faster(index: int) -> bool:
    """Whether "ampere" is right on this CUDA device and has taken less time than "library", where it serves both."""
    times = verdict_on(TIMES, index).rates
    return times is not None and times[1] < times[0] and verdict_on("ampere", index).is_right


def verdict_on(family: str, index: int) -> Finding:
    """What is known about a family on the CUDA device of this index: kept, or found now. Warns once of what is wrong."""
    finding = verdicts_on([family], index)[family]
    if finding.fault and (family, index) not in _told and not _is_named(family):
        _told.add((family, index))
        warnings.warn(f"espalier: {_said(family, torch.cuda.get_device_name(index))}: {finding.fault}", stacklevel=2)
    return finding


def _is_named(family: str) -> bool:
    """Whether the environment says what runs, whatever the verdict."""
    return bool(os.environ.get({**dict.fromkeys(ATTENTION, "ESPALIER_ATTENTION"), "head": "ESPALIER_HEAD"}.get(family, "")))


def _said(family: str, device: str) -> str:
    if family in ("distribution", "products"):
        return f"`{family}` cannot be trusted on {device}, and nothing stands in for it"
    return f"kernels of `{family}` are not used on {device}"


def verdicts_on(families: Sequence[str], index: int, again: bool = False) -> dict[str, Finding]:
    """What is known about families on a CUDA device, by family: kept, or found now, as all are with `again`. A process that needs
    the same meanwhile waits for it."""
    for family in families if again else ():
        _known.pop((family, index), None)
        _told.discard((family, index))
    if any((family, index) not in _known for family in families):
        _known.update({(family, index): finding for family, finding in _kept_or_new(families, index, again).items()})
    return {family: _known[family, index] for family in families}


def _kept_or_new(families: Sequence[str], index: int, again: bool) -> dict[str, Finding]:
    key = _key(index)
    path = folder() / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]}.json"
    findings = {} if again else _read(path, key)
    if all(family in findings for family in families):
        return findings
    with kept.turn(path):
        findings = {} if again else _read(path, key)
        lacking = [family for family in families if family not in findings]
        if set(lacking) & set(OWN):
            said = f"espalier: checking the kernels on {key['device']} (once for this build; kept in {path})"
            print(said, file=sys.stderr, flush=True)
        for family in lacking:
            findings[family] = _checked(family, f"cuda:{index}")
            verdict = {**findings[family]._asdict(), "sources": _sources()}
            is_kept = kept.write(path, {"key": key, "verdicts": {**_verdicts_in(path, key), family: verdict}})
            if not is_kept and family == lacking[-1]:
                warnings.warn(f"espalier: the verdicts on kernels cannot be kept in {path}", stacklevel=2)
    return findings


def _checked(family: str, device: str) -> Finding:
    """The finding of a new process."""
    if not sys.executable:
        return Finding(1, "sys.executable names no Python that could check it", is_lasting=False)
    code = ("import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
            "from espalier.kernels.checks import run_child; run_child(*sys.argv[2:])")  # fmt: skip
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        paths = json.dumps([os.fspath(folder) for folder in sys.path])
        limit = limit_of(family)
        status, last_line = _ended([sys.executable, "-c", code, paths, family, device, file.name], limit)
        if status is None:
            return Finding(1, f"its check did not end within {limit:g} s")
        if status:
            how = f"ended with status {status}" if status > 0 else f"was killed by signal {-status} ({signal.strsignal(-status)})"
            return Finding(1, f"its check {how}: {last_line or 'it said nothing'}", is_lasting=status < 0)
        finding = _finding_of(kept.read(Path(file.name)))
    return finding or Finding(1, "its check ended without a finding")


def limit_of(family: str) -> float:
    """Seconds that the check of a family may take."""
    return LONGER_SECONDS.get(family.partition(" ")[0], LIMIT_SECONDS)


def _operators() -> str:
    """The library of operators that this process has loaded, which may be another one than it would find."""
    files = (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libespalier_ops" in line)
    return next(files, os.environ.get("ESPALIER_OPS", ""))


def _ended(command: Sequence[str], limit: float) -> tuple[int | None, str]:
    """(the status with which a process ends, None where it does not within `limit` seconds; its last line on standard error)."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
                                   env={**os.environ, "ESPALIER_OPS": _operators()})  # fmt: skip
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # one that is stuck in a driver may not die
                    process.wait(5)
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
    return status, lines[-1] if lines else ""


def _finding_of(values: Any) -> Finding | None:
    """The finding in what was read; None where it is damaged."""
    try:
        rates = values["rates"]
        return Finding(int(values["checks"]), str(values["fault"]), None if rates is None else tuple(map(float, rates)),
                       bool(values["is_lasting"]))  # fmt: skip
    except (ValueError, KeyError, TypeError):
        return None


def folder() -> Path:
    """Where verdicts are kept."""
    return kept.folder("kernels")


def _verdicts_in(path: Path, key: dict[str, Any]) -> dict[str, Any]:
    found = kept.read(path)
    is_right = isinstance(found, dict) and found.get("key") == key and isinstance(found.get("verdicts"), dict)
    return found["verdicts"] if is_right else {}


def _read(path: Path, key: dict[str, Any]) -> dict[str, Finding]:
    """The findings that last, of the same sources and libraries."""
    findings = {}
    for family, values in _verdicts_in(path, key).items():
        finding = _finding_of(values)
        if finding is not None and finding.is_lasting and values.get("sources") == _sources():
            findings[family] = finding
    return findings


def _key(index: int) -> dict[str, Any]:
    """What a file of verdicts is about, as `verdict_key` of the compiled trainer has it."""
    properties = torch.cuda.get_device_properties(index)
    return {"device": properties.name, "compute_capability": 10 * properties.major + properties.minor, "driver": _driver(),
            "torch": torch.__version__.partition("+")[0], "cuda": torch.version.cuda or "",
            "build": torch.ops.espalier_judge.build()}  # fmt: skip


def _driver() -> str:
    try:
        return Path("/sys/module/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return ""


@functools.cache
def _sources() -> str:
    """A digest of what judges, and of what is judged beside the build of the operators: this folder, and libraries."""
    here = Path(__file__).parent
    files = [*sorted(here.glob("*.py")), here.parent / "ops.py", here.parent / "error_ratio.py"]
    texts = [*(file.read_bytes() for file in files), *(version_of(package).encode() for package in LIBRARIES)]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


def forget() -> None:
    """Verdicts are read, or found, again in this process."""
    _known.clear()
    _told.clear()
