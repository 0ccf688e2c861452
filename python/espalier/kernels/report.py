# SPDX-License-Identifier: Apache-2.0
"""What `espalier device` says of kernels: the verdicts on a GPU, and the check of one family."""

import os

import torch

from ..errors import InputError
from . import checks
from .libraries import own_families
from .verdicts import ATTENTION, Finding, verdicts_on


def verdicts_of(index: int, again: bool = False) -> dict[str, dict[str, str]]:
    """The verdicts on a CUDA device in words, kept or new: those of "attention" and of other "operators", each by family, and the
    attention that is "taken". Kernels are checked where no verdict is kept, and with `again` anyhow."""
    findings = verdicts_on(own_families(), index, again)
    attention = {family: finding for family, finding in findings.items() if family in ATTENTION}
    best = next((family for family, finding in attention.items() if finding.is_right), "masked")
    return {"attention": {family: text_of(finding) for family, finding in attention.items()},
            "operators": {family: text_of(finding) for family, finding in findings.items() if family not in ATTENTION},
            "taken": {"attention": os.environ.get("ESPALIER_ATTENTION") or best}}  # fmt: skip


def text_of(finding: Finding) -> str:
    """A verdict in words."""
    if finding.fault:
        return f"{'FAILED' if finding.is_lasting else 'not checked'}: {finding.fault}"
    return "passed" if finding.checks else "not for this device"


def checked(family: str, device: str) -> tuple[str, int]:
    """(a line on the check of one family in this process, on a device "cpu", "cuda" or "cuda:N"; the exit status, 1 where the
    family is wrong). Raises InputError where the device cannot be used, or has no such family."""
    index = {"cpu": "", "cuda": "0"}.get(device, device.removeprefix("cuda:"))
    if index and int(index) >= (count := torch.cuda.device_count()):
        raise InputError(f"device: expected cpu or one of {count} GPUs that can be used, received {device}; "
                         "`espalier device` says why")  # fmt: skip
    finding = checks.finding_of(family, f"cuda:{index}" if index else device)
    if finding.fault:
        return f"{family}: FAILED: {finding.fault}", 1
    if not finding.checks:
        return f"{family}: not for {device} in this build", 0
    return f"{family}: passed {finding.checks:,} check{'s' if finding.checks > 1 else ''}", 0
