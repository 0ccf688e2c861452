#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Once an engine of DeepSpeed has had AutoTP, engines without it can no longer be made in the process, not even after destroy() of the
# first, nor for other models: the mode is a global of the package, and the new engine asks for a partition that it does not have.
#
# Ubuntu 24.04 and Debian 12, Python 3.11; deepspeed 0.19.8, torch 2.11.0 on a CPU, two processes over Gloo. An engine without AutoTP,
# then one with autotp_size 2, then one without for an unrelated model. Seen:
#   made, made, AttributeError: 'NoneType' object has no attribute 'get_model_parallel_rank'
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.11.0 numpy==2.4.6 setuptools==80.9.0 transformers==5.23.0 accelerate==1.15.0 \
  deepspeed==0.19.8

cat > "$folder/engines.py" <<'PYTHON'
import os
import sys

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it would be compiled
os.environ |= {"RANK": sys.argv[1], "LOCAL_RANK": sys.argv[1]}
deepspeed.init_distributed("gloo", verbose=False)
SMALL = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)


def made(**more):
    config = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 1}, **more}
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    try:
        engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config)
    except AttributeError as error:
        return f"AttributeError: {error}"
    engine.destroy()
    return "made"


found = [made(), made(tensor_parallel={"autotp_size": 2}), made()]
print("deepspeed", deepspeed.__version__, found, flush=True)
seen = found[:2] == ["made", "made"] and found[2].startswith("AttributeError: 'NoneType' object has no attribute")
torch.distributed.barrier()  # the first process serves the others until here
os._exit(0 if seen else 1)
PYTHON
export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29616
timeout 300 "$folder/venv/bin/python" "$folder/engines.py" 0 &
timeout 300 "$folder/venv/bin/python" "$folder/engines.py" 1
wait $!
