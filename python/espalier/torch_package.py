# SPDX-License-Identifier: Apache-2.0
"""The package espalier_torch of the distribution espalier-torch: where it lies, and whether it fits. None of it is loaded."""

import importlib.metadata
import importlib.util
import json
from pathlib import Path

INSTALL = "pip install 'espalier-train[torch]'"


def find() -> Path | None:
    """The package's folder; None where it is not installed."""
    spec = importlib.util.find_spec("espalier_torch")
    return Path(spec.origin).resolve().parent if spec and spec.origin else None


def version_of(distribution: str) -> str:
    """The version of a distribution that is installed; "" where it is not."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def installed_torch() -> str | None:
    """The version of PyTorch that is installed."""
    return version_of("torch") or None


def built(folder: Path) -> dict[str, str]:
    """What the compiled trainer in `folder` was built for: version, torch and cuda; empty where there is none."""
    try:
        properties: dict[str, str] = json.loads((folder / "built.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return properties


def fault_of(folder: Path, torch: str | None) -> str | None:
    """Why the package in `folder` cannot be used with PyTorch `torch`, in one line; None where it can."""
    from .native import __version__

    version, its_torch = (built(folder).get(name, "none") for name in ("version", "torch"))
    if version != __version__:
        return (f"espalier-torch: expected version {__version__}, that of espalier-train, received {version} in "
                f"{folder}; run {INSTALL}")  # fmt: skip
    if torch is None:
        return f"espalier-torch: expected PyTorch {_minor(its_torch)}, which is not installed; run {INSTALL}"
    if _minor(torch) != _minor(its_torch):
        return (f"espalier-torch: expected PyTorch {_minor(its_torch)}, against which {folder} was built, received "
                f"{torch}; run {INSTALL} 'torch=={_minor(torch)}.*', or install PyTorch {_minor(its_torch)}")  # fmt: skip
    return None


def check(folder: Path, torch: str | None) -> None:
    """Raises ImportError, with the fault, where the package does not fit."""
    if fault := fault_of(folder, torch):
        raise ImportError(fault)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
