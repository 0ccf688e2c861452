#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The first engine of ZeRO 3 in a process puts its own function in the place of torch.nn.functional.linear. engine.destroy() does not
# take it back: linear layers that DeepSpeed has never seen, made before or after, go through it for the rest of the process.
#
# Ubuntu 24.04 and Debian 12, Python 3.11; deepspeed 0.19.8, torch 2.11.0 on a CPU, one process over Gloo. Module of the function
# and gradient function of an unrelated nn.Linear. Seen:
#   before: torch._C._nn, AddmmBackward0; after destroy: deepspeed.runtime.zero.linear, LinearFunctionForZeroStage3Backward
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.11.0 numpy==2.4.6 setuptools==80.9.0 deepspeed==0.19.8

DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29611 \
  "$folder/venv/bin/python" - <<'PYTHON'
import sys

import deepspeed
import torch

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it would be compiled
unrelated = torch.nn.Linear(8, 2)


def seen():
    output = unrelated(torch.ones(2, 8))
    return torch.nn.functional.linear.__module__, type(output.grad_fn).__name__


before = seen()
deepspeed.init_distributed("gloo", verbose=False)
model = torch.nn.Linear(8, 2)
config = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 3}}
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config)
engine.destroy()
after = seen()
print("deepspeed", deepspeed.__version__, "before", before, "after destroy", after)
sys.exit(not (before[1] == "AddmmBackward0" and after == ("deepspeed.runtime.zero.linear", "LinearFunctionForZeroStage3Backward")))
PYTHON
