#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# With gradient_clipping in float32, engine.get_global_grad_norm() gives the norm for ZeRO 1, 2 and 3, and None for ZeRO 0, which
# clips as well. Trainers that log this value log nothing for ZeRO 0, whatever the norm was.
#
# Ubuntu 24.04 and Debian 12, Python 3.11; deepspeed 0.19.8, torch 2.11.0 on a CPU, one process over Gloo. Norm that is reported, and
# length of the step of SGD with learning rate 1, by stages 0 to 3; the gradient has norm 16, and is clipped to 1. Seen:
#   None, 16, 16, 16; steps 1.0 for all
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.11.0 numpy==2.4.6 setuptools==80.9.0 deepspeed==0.19.8

DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29614 \
  "$folder/venv/bin/python" - <<'PYTHON'
import sys

import deepspeed
import torch

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it would be compiled
deepspeed.init_distributed("gloo", verbose=False)


def step(stage):
    model = torch.nn.Linear(16, 1, bias=False)
    before = model.weight.detach().clone()
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "zero_allow_untested_optimizer": True,
              "zero_optimization": {"stage": stage}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 1.0), config=config)
    engine.backward(engine(torch.ones(4, 16)).sum())
    engine.step()
    norm = engine.get_global_grad_norm()
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        moved = (model.weight.detach() - before).norm().item()
    return None if norm is None else round(float(norm), 3), round(moved, 3)


found = [step(stage) for stage in range(4)]
print("deepspeed", deepspeed.__version__, found)
sys.exit(not (found[0][0] is None and all(norm == 16.0 for norm, _ in found[1:]) and all(moved == 1.0 for _, moved in found)))
PYTHON
