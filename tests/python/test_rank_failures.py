# SPDX-License-Identifier: Apache-2.0
"""A rank that fails while others wait for it: they end within seconds, with its message."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engines import init_model
from rank_processes import ENVIRONMENT

pytest.importorskip("transformers")
SECONDS = 300  # a test that waits longer has failed

BEGIN = """
import sys, time
sys.path[:0] = sys.argv[4:]
import torch, torch.distributed as dist
from datetime import timedelta
folder, rank, place = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2,
                        timeout=timedelta(seconds=3000))
"""

IN_A_STEP = BEGIN + """
from rank_checks import *

model = sharded("llama", dtype=torch.float32, reshard_after_forward=True)
ranks = Ranks(model, mode="zero3")
for number in range(2):
    with ranks.step(None, [0]) as step:
        try:
            for _ in step:
                if rank == 1 and number == 1:
                    raise KeyError("not there")
                if place == "in a collective":
                    loss_of(model, packed(rows_of_a_step())).backward()
        except KeyError as error:
            if not step.__exit__(type(error), error, None):
                print("failed", flush=True)
                time.sleep(100000)
"""

BETWEEN_STEPS = BEGIN + """
from rank_checks import *

ranks = Ranks(sharded("llama", dtype=torch.float32, reshard_after_forward=True), mode=place)
for number in range(3):
    if rank == 1 and number == 2:
        raise KeyError("not there")
    with ranks.step(None, [0]) as step:
        for _ in step:
            loss_of(ranks.held.model, packed(rows_of_a_step())).backward()
"""

BETWEEN_CALLS = BEGIN + """
import espalier

engine = espalier.Engine(place, dtype="float64", threads=1, process_group=dist.group.WORLD)
engine.forward_backward([[1, 2, 3], [1, 2, 4]])
if rank == 1:
    raise KeyError("not there")
engine.optim_step()
while True:  # wherever it has come to
    engine.sample([[1, 2, 3]], max_new_tokens=2)
"""


def start(program, folder, place):
    here = Path(__file__).parent
    command = [sys.executable, "-c", program, str(folder)]
    return [subprocess.Popen([*command, str(rank), place, str(here), str(here.parents[1] / "python")],
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                             env={**os.environ, **ENVIRONMENT}) for rank in range(2)]  # fmt: skip


@pytest.mark.parametrize("place", ["in a collective", "at the end of the step"])
def test_the_others_end_with_its_message(tmp_path, place):
    processes = start(IN_A_STEP, tmp_path, place)
    try:
        _, printed = processes[0].communicate(timeout=SECONDS)
        assert processes[1].stdout.readline() == "failed\n"
        assert processes[1].poll() is None  # it has not ended
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert processes[0].returncode == 1, printed
    assert "espalier.distributed: rank 1: KeyError: 'not there'; rank 0 waits for it" in printed


def ends_of(processes):
    """[(exit status, stderr)], by rank."""
    try:
        return [(process.returncode, printed) for process in processes for _, printed in [process.communicate(timeout=SECONDS)]]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize("mode", ["gathered", "zero3"])
def test_an_exception_between_steps_ends_all(tmp_path, mode):
    (status, printed), (its_status, _) = ends_of(start(BETWEEN_STEPS, tmp_path, mode))
    assert status == its_status == 1
    assert "rank 1: KeyError: 'not there'" in printed, printed


def test_an_exception_between_calls_of_engines_ends_all(tmp_path, espalier):
    model = init_model(espalier, tmp_path / "model")
    (status, printed), (its_status, _) = ends_of(start(BETWEEN_CALLS, tmp_path, str(model)))
    assert status == its_status == 1
    assert "RankError: rank 1: KeyError: 'not there'" in printed or "InputError: rank 1: KeyError: 'not there'" in printed, printed


def test_a_program_ends_while_its_alarm_listens():
    """A thread that comes back from the store after the interpreter has gone would end the process with an error."""
    program = """
import torch, torch.distributed as dist
from espalier.distributed import Ranks, alarm
alarm.SECONDS_BETWEEN = 0
dist.init_process_group("gloo")
ranks = Ranks(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1)))
dist.barrier()
"""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python", sys.executable, "-c"]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(Path(__file__).parents[2] / "python")}
    for _ in range(2):
        done = subprocess.run([*command, program], env=environment, capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0, done.stderr
