# SPDX-License-Identifier: Apache-2.0
"""Which program `espalier` is."""

import importlib.util
import os
import sys
from pathlib import Path

from . import torch_package


def program() -> tuple[Path, dict[str, str]]:
    """The program, and what its environment has beside ours."""
    package = Path(__file__).resolve().parent
    core = package / "bin/espalier-core"
    if not core.is_file():
        places = [package.parents[1] / "bin/espalier", *(prefix / "bin/espalier" for prefix in package.parents[3:4])]
        for place in places:
            if place.is_file():
                return place, {}
        sys.exit(f"espalier: expected a program at {' or '.join(map(str, [core, *places]))}, found none; run `make build` in a "
                 "clone, or `pip install espalier-train`")  # fmt: skip
    folder = torch_package.find()
    if folder is None:
        return core, {}
    if fault := torch_package.fault_of(folder, torch_package.installed_torch()):
        return core, {"ESPALIER_WITHOUT_LIBTORCH": fault}
    return folder / "bin/espalier", _library_path(folder)


def _library_path(folder: Path) -> dict[str, str]:
    """Where LibTorch lies, unless it is beside the package, where the program finds it."""
    torch = importlib.util.find_spec("torch")
    libraries = Path(torch.origin).resolve().parent / "lib" if torch and torch.origin else None
    if libraries is None or libraries == folder.parent / "torch/lib":
        return {}
    before = os.environ.get("LD_LIBRARY_PATH")
    return {"LD_LIBRARY_PATH": f"{libraries}:{before}" if before else str(libraries)}
