#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A model of Transformers whose config has a pad_token_id cannot be made by from_config inside of deepspeed.zero.Init: the embedding is
# partitioned as soon as it is made, and then the row of the padding token is set to zero in what is left of it on this rank.
# Without pad_token_id it works, and so does from_pretrained, which loads weights in another way.
#
# Ubuntu 24.04 and Debian 12, Python 3.11; transformers 5.23.0, deepspeed 0.19.8, torch 2.11.0 on a CPU, one process over Gloo. Seen:
#   without pad_token_id made; with it IndexError: index 0 is out of bounds for dimension 0 with size 0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.11.0 numpy==2.4.6 setuptools==80.9.0 transformers==5.23.0 accelerate==1.15.0 \
  deepspeed==0.19.8

DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29613 \
  "$folder/venv/bin/python" - <<'PYTHON'
import sys

import deepspeed
import transformers
from transformers import AutoModelForCausalLM, Qwen3Config

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it would be compiled
deepspeed.init_distributed("gloo", verbose=False)
small = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
             head_dim=8)
zero = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}


def made(**more):
    try:
        with deepspeed.zero.Init(config_dict_or_path=zero):
            AutoModelForCausalLM.from_config(Qwen3Config(**small, **more))
        return "made"
    except IndexError as error:
        return f"IndexError: {error}"


found = [made(), made(pad_token_id=0)]
print("transformers", transformers.__version__, "deepspeed", deepspeed.__version__, found)
sys.exit(not (found[0] == "made" and found[1].startswith("IndexError: index 0 is out of bounds")))
PYTHON
