#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# gpt-oss of Transformers 5.23.0 does not hand position_ids to the functions that make its masks. So packed rows, which
# position_ids tell apart in Llama and Qwen3, see each other, and use_cache=False, which is enough there, changes nothing.
# Padding-free collators of trainers pack so.
#
# Ubuntu 24.04 and Debian 12, Python 3.11; torch 2.11.0 on a CPU, transformers 5.23.0. Largest difference of logits between a
# row packed behind another and the row alone, random weights, float32. Seen:
#   llama 2.4e-07, qwen3 7.2e-07, gpt_oss 4.4
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.11.0 transformers==5.23.0

"$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

small = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
             vocab_size=64, pad_token_id=0, eos_token_id=1, initializer_range=0.2)
more = {"gpt_oss": dict(num_local_experts=4, num_experts_per_tok=2, layer_types=["full_attention"] * 2)}


def difference(kind):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **small, **more.get(kind, {}))).eval()
    first, second = torch.arange(2, 7)[None], torch.arange(10, 17)[None]
    positions = torch.tensor([[*range(5), *range(7)]])
    with torch.no_grad():
        alone = model(input_ids=second, use_cache=False).logits
        packed = model(input_ids=torch.cat([first, second], 1), position_ids=positions, use_cache=False).logits[:, 5:]
    return (alone - packed).abs().max().item()


found = {kind: difference(kind) for kind in ("llama", "qwen3", "gpt_oss")}
print("transformers", transformers.__version__, found)
sys.exit(not (found["llama"] < 1e-5 and found["qwen3"] < 1e-5 and found["gpt_oss"] > 0.01))
PYTHON
