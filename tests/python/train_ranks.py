# SPDX-License-Identifier: Apache-2.0
"""`espalier train` and `espalier rerun` on several ranks, each a fork of one process, so that libraries are imported once.

    python train_ranks.py FOLDER    runs the jobs of FOLDER/jobs.json, those of each lane one after the other

A job has a name, the command and arguments of every rank, and optionally "signal": [rank, number, text], which is sent once the
output of rank 0 has the text, "variables": those of the environment of every rank, and "lane": a number, 0 by default. Lanes run
side by side. FOLDER/NAME.json has the exit statuses (the negative signal where one ended a rank) and what each rank has printed.
"""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from rank_processes import ENVIRONMENT, SECONDS


def outcomes(folder, jobs, **variables):
    """{name: (statuses, outputs)}, by rank. `variables`: of the environment of all."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    here = Path(__file__).resolve()
    path = os.pathsep.join([str(here.parents[2] / "python"), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen([sys.executable, str(here), str(folder)], start_new_session=True,
                               env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path, **variables})  # fmt: skip
    try:
        process.wait(SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
    return {job["name"]: json.loads((folder / f"{job['name']}.json").read_text()) for job in jobs}


ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def start(folder, job, rank, port):
    from espalier.distributed import command

    child = os.fork()
    if child:
        return child
    size = len(job["arguments"])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(job["variables"][rank] if "variables" in job else {})
    output = os.open(folder / f"{job['name']}.{rank}.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    status = 1
    try:
        command.main(job["arguments"][rank])
    except SystemExit as end:
        status = end.code
    os._exit(status)


def run(folder, job):
    size = len(job["arguments"])
    port = free_port()
    children = [start(folder, job, rank, port) for rank in range(size)]
    if "signal" in job:
        rank, number, text = job["signal"]
        output = folder / f"{job['name']}.0.txt"
        output.touch()  # a busy machine may not have started the rank yet
        while text not in output.read_text() and os.waitid(os.P_PID, children[rank], ENDED) is None:
            time.sleep(0.02)
        os.kill(children[rank], number)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    outputs = [(folder / f"{job['name']}.{rank}.txt").read_text() for rank in range(size)]
    (folder / f"{job['name']}.json").write_text(json.dumps([statuses, outputs]))


def lane_process(folder, jobs):
    child = os.fork()
    if child:
        return child
    for job in jobs:
        run(folder, job)
    os._exit(0)


def main(folder):
    import espalier.distributed.command  # noqa: F401  before the forks

    lanes = {}
    for job in json.loads((folder / "jobs.json").read_text()):
        lanes.setdefault(job.get("lane", 0), []).append(job)
    children = [lane_process(folder, jobs) for jobs in lanes.values()]
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
