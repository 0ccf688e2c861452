#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# engine.destroy() of ZeRO 3 leaves the parameters of the model partitioned. A forward pass of the model still works and is right,
# since its dictionaries of parameters gather what is read from them, while state_dict() before that pass holds empty tensors.
#
# Ubuntu 24.04 and Debian 12, Python 3.11; deepspeed 0.19.8, torch 2.11.0 on a CPU, one process over Gloo. Seen:
#   shapes in state_dict (0,) and (0,); the output as before
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.11.0 numpy==2.4.6 setuptools==80.9.0 deepspeed==0.19.8

DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29612 \
  "$folder/venv/bin/python" - <<'PYTHON'
import sys

import deepspeed
import torch

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it would be compiled
deepspeed.init_distributed("gloo", verbose=False)
model = torch.nn.Linear(8, 2)
expected = model(torch.ones(2, 8)).detach()
config = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True,
          "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config)
engine(torch.ones(2, 8))
engine.destroy()
shapes = [tuple(value.shape) for value in model.state_dict().values()]
output = model(torch.ones(2, 8)).detach()
print("deepspeed", deepspeed.__version__, "shapes", shapes, "output", tuple(output.shape), torch.equal(output, expected))
sys.exit(not (shapes == [(0,), (0,)] and torch.allclose(output, expected)))
PYTHON
