# SPDX-License-Identifier: Apache-2.0
"""What is known about the kernels of a GPU, by family: found by a separate process with a time limit (checks.py), and kept
under the GPU, the driver, the versions of PyTorch and of the libraries, and a digest of the sources.

Families: "library" and "ampere" (attention, as ESPALIER_ATTENTION names them), which the compiled trainer checks itself where
it is there; "attention times", which compares only how long both take; operators that another library computes in a dtype, as
"gated_delta_rule bfloat16" (libraries.py), with what recurrences take of time.
"""

import functools
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import kept

LIMIT_SECONDS = 600.0  # Triton, CUTLASS and TileLang compile meanwhile
LONGER_SECONDS = {"ssm_scan": 1200.0}  # by operator: a dozen kernels, each tuned among up to eleven configurations
TIMES = "attention times"
LIBRARIES = ("nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "flash-linear-attention", "fla-core", "flash-qla", "tilelang",
             "mamba-ssm", "causal-conv1d", "triton")  # fmt: skip


class Finding(NamedTuple):
    """checks: results that were compared, 0 where the device does not serve the family; rates: of what was timed."""

    checks: int = 0
    fault: str = ""
    rates: tuple[float, ...] | None = None

    @property
    def is_right(self) -> bool:
        return self.checks > 0 and not self.fault


def is_ours_faster(index: int) -> bool:
    """Whether "ampere" is right on this CUDA device and has taken less time than "library", where it serves both."""
    times = verdict_on(TIMES, index).rates
    return times is not None and times[1] < times[0] and verdict_on("ampere", index).is_right


@functools.cache
def verdict_on(family: str, index: int) -> Finding:
    """What is known about a family on the CUDA device of this index: kept, or found now. Warns once of what is wrong."""
    key = _key(family, index)
    path = folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    finding = _read(path, key)
    if finding is None:
        with kept.turn(path):
            finding = _read(path, key)
            if finding is None:
                finding, is_lasting = _checked(family, f"cuda:{index}")
                if is_lasting:
                    kept.write(path, {"key": key, "finding": finding})
    if finding.fault:
        warnings.warn(f"espalier: kernels of `{family}` are not used on {torch.cuda.get_device_name(index)}: {finding.fault}",
                      stacklevel=2)  # fmt: skip
    return finding


def _checked(family: str, device: str) -> tuple[Finding, bool]:
    """(finding of a new process, whether it is about the kernels)."""
    if not sys.executable:
        return Finding(1, "sys.executable names no Python that could check them"), False
    code = ("import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
            "from espalier.kernels.checks import run_child; run_child(*sys.argv[2:])")  # fmt: skip
    limit = LONGER_SECONDS.get(family.partition(" ")[0], LIMIT_SECONDS)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-c", code, json.dumps([os.fspath(each) for each in sys.path]), family, device, file.name]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            return Finding(1, f"their check did not end within {limit:g} s"), True
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            return Finding(1, f"their check ended with status {done.returncode}: {said}"), done.returncode < 0
        return _finding_of(json.loads(Path(file.name).read_text())), True


def _finding_of(values: Any) -> Finding:
    checks, fault, rates = values
    return Finding(int(checks), str(fault), None if rates is None else tuple(map(float, rates)))


def folder() -> Path:
    """Where verdicts are kept."""
    return kept.folder("kernels")


def _read(path: Path, key: str) -> Finding | None:
    found = kept.read(path)
    try:
        return _finding_of(found["finding"]) if found["key"] == key else None
    except (ValueError, KeyError, TypeError):
        return None


def _key(family: str, index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    return json.dumps([family, properties.name, properties.major, properties.minor, torch.__version__, _driver(),
                       *map(version_of, LIBRARIES), _sources()])  # fmt: skip


def version_of(package: str) -> str:
    """The version of a distribution that is installed; "" where it is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return ""


@functools.cache
def _sources() -> str:
    """Of what computes and judges: this folder, the operators, their library, and the rule."""
    here = Path(__file__).parent
    libraries = map(Path, torch.ops.loaded_libraries)
    files = [*sorted(here.glob("*.py")), here.parent / "ops.py", here.parent / "error_ratio.py", *sorted(libraries)]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def forget() -> None:
    """Verdicts are read, or found, again in this process."""
    verdict_on.cache_clear()
