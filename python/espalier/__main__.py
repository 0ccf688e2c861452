# SPDX-License-Identifier: Apache-2.0
"""The command `espalier`: the program of espalier-torch where it is installed and fits, else the one that needs no LibTorch.

In a clone, and where `cmake --install` has put the package, it is the program there.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

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


def _is_rank(arguments: list[str]) -> bool:
    """Whether torchrun has started this process as one of several that divide the work of a command."""
    is_divided = bool({*arguments[:1]} & {"train", "rerun", "logprobs", "sample", "verify"})
    return (is_divided and not {"-h", "--help"} & set(arguments) and "LOCAL_RANK" in os.environ
            and int(os.environ.get("WORLD_SIZE", "1")) > 1)  # fmt: skip


def main() -> NoReturn:
    """Becomes the program. Commands written in Python run in this interpreter, unless ESPALIER_PYTHON names another. A rank
    stays in this process, which has the process group."""
    path, variables = program()
    environment = {**os.environ, **variables}
    if _is_rank(sys.argv[1:]):
        from .distributed import command

        version = subprocess.check_output([path, "--version"], env=environment, text=True)
        command.main(sys.argv[1:], version)
    if not environment.get("ESPALIER_PYTHON"):
        environment["ESPALIER_PYTHON"] = sys.executable
    os.execve(path, [str(path), *sys.argv[1:]], environment)


if __name__ == "__main__":
    main()
