# SPDX-License-Identifier: Apache-2.0
"""A rank that fails while others wait for it in a collective: they end, though it does not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rank_processes import ENVIRONMENT

pytest.importorskip("transformers")
SECONDS = 300  # a test that waits longer has failed

PROGRAM = """
import sys, time
sys.path[:0] = sys.argv[4:]
import torch, torch.distributed as dist
from datetime import timedelta
folder, rank, place = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2,
                        timeout=timedelta(seconds=3000))
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


@pytest.mark.parametrize("place", ["in a collective", "at the end of the step"])
def test_the_others_end_with_its_message(tmp_path, place):
    here = Path(__file__).parent
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    processes = [subprocess.Popen([*command, str(rank), place, str(here), str(here.parents[1] / "python")],
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                  env={**os.environ, **ENVIRONMENT}) for rank in range(2)]  # fmt: skip
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
