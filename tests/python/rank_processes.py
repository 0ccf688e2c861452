# SPDX-License-Identifier: Apache-2.0
"""Functions on several ranks over Gloo, each rank a process on the CPU.

    python rank_processes.py MODULE FOLDER RANKS...

runs every function of MODULE in its CHECKS, for each number of ranks, in processes that are forks of this one, so that
libraries are imported once. A check gets a Rank. FOLDER/RANKS.RANK.json says how each went: null, or its traceback.
"""

import importlib
import json
import os
import subprocess
import sys
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

SECONDS = 900  # for all; a loaded machine may be slow, and what hangs ends then
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True)
class Rank:
    rank: int
    size: int


def outcomes(module, folder, numbers, **variables):
    """{(check, ranks): None, or the tracebacks of the ranks that failed} of all checks of a module beside this one."""
    command = [sys.executable, __file__, module, str(folder), *map(str, numbers)]
    process = subprocess.Popen(command, env={**os.environ, **ENVIRONMENT, **variables}, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, start_new_session=True)  # fmt: skip
    try:
        printed, _ = process.communicate(timeout=SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
    found = {}
    for number in numbers:
        files = [Path(folder) / f"{number}.{rank}.json" for rank in range(number)]
        said = [json.loads(file.read_text()) if file.exists() else {} for file in files]
        for name in set().union(*said):
            failed = [f"rank {rank}: {of.get(name, printed)}" for rank, of in enumerate(said) if of.get(name, printed)]
            found[name, number] = "\n".join(failed) or None
    return found or printed


def check_passed(found, name, number):
    """Raises AssertionError unless the check passed on so many ranks. found: of `outcomes`."""
    assert (name, number) in found, f"it did not run, because another failed or the processes did:\n{found}"
    assert found[name, number] is None, found[name, number]


def names_and_ranks(checks):
    """[(check's name, ranks)] of CHECKS."""
    return [(check.__name__, number) for number, of in checks.items() for check in of]


def run(checks, folder, rank, size):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{size}.store", rank=rank, world_size=size,
                            timeout=timedelta(seconds=SECONDS))  # fmt: skip
    said = {}
    for check in checks:
        try:
            check(Rank(rank, size))
            said[check.__name__] = None
        except BaseException:
            said[check.__name__] = traceback.format_exc()
        (folder / f"{size}.{rank}.json").write_text(json.dumps(said))
        failed = torch.tensor([said[check.__name__] is not None], dtype=torch.int32)
        dist.all_reduce(failed)
        if failed:  # ranks may wait for one another from here on
            break
    dist.destroy_process_group()


def main(name, folder, *numbers):
    module = importlib.import_module(name)
    for size in map(int, numbers):
        children = []
        for rank in range(size):
            child = os.fork()
            if child == 0:
                try:
                    run(module.CHECKS[size], Path(folder), rank, size)
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
