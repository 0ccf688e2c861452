#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# With "compile": {"deepcompile": true} and ZeRO 0, engine.compile() is torch.compile: DeepCompile stays off, which only a line at level
# INFO says. engine.is_deepcompile_enabled() goes on to say True, engine.is_deepcompile_active() says False.
#
# Ubuntu 24.04 and Debian 12, Python 3.11; deepspeed 0.19.8, torch 2.11.0 on a CPU, one process over Gloo. Enabled, active, compiled;
# the backend that torch.compile got. Seen:
#   True, False, True; eager
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.11.0 numpy==2.4.6 setuptools==80.9.0 deepspeed==0.19.8

DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29615 \
  "$folder/venv/bin/python" - <<'PYTHON'
import sys
from unittest import mock

import deepspeed
import torch

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it would be compiled
deepspeed.init_distributed("gloo", verbose=False)
model = torch.nn.Linear(8, 2)
config = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 0},
          "compile": {"deepcompile": True}}
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config)
with mock.patch.object(torch, "compile", wraps=torch.compile) as compiled:
    engine.compile(backend="eager")
engine.backward(engine(torch.ones(2, 8)).sum())
engine.step()
found = engine.is_deepcompile_enabled(), engine.is_deepcompile_active(), engine.is_compiled, compiled.call_args.kwargs["backend"]
print("deepspeed", deepspeed.__version__, *found)
sys.exit(found != (True, False, True, "eager"))
PYTHON
