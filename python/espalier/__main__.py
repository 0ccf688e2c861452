# SPDX-License-Identifier: Apache-2.0
"""The command `espalier`: the program of espalier-torch where it is installed and fits, else the one that needs no LibTorch.

In a clone, and where `cmake --install` has put the package, it is the program there.
"""

import os
import subprocess
import sys
from typing import NoReturn

from .program import program


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
