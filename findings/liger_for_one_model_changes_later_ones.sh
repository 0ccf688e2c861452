#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# apply_liger_kernel_to_qwen3(model=...) is for one model, and yet replaces the rotary embedding, the norm and the MLP in the module of
# Transformers: another model that exists already rotates by Liger's kernel from then on, and one that is made later has
# Liger's norms and MLPs as well, and only its loss is that of Transformers. A reference model made after the policy is no plain one.
#
# Ubuntu 24.04 and Debian 12, Python 3.11; liger-kernel 0.8.5, transformers 5.23.0, torch 2.11.0 on a CPU. Seen:
#   a model made before: Qwen3RMSNorm, Qwen3MLP, Qwen3ForCausalLM.forward; one made after: LigerRMSNorm, LigerSwiGLUMLP and the same
#   forward; rotation of both: liger_rotary_pos_emb
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.11.0 numpy==2.4.6 transformers==5.23.0 liger-kernel==0.8.5

"$folder/venv/bin/python" - <<'PYTHON' 2>/dev/null
import importlib.metadata
import sys

from liger_kernel.transformers import apply_liger_kernel_to_qwen3
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3 import modeling_qwen3

config = Qwen3Config(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
                     num_key_value_heads=2, head_dim=8)
before, policy = Qwen3ForCausalLM(config), Qwen3ForCausalLM(config)
apply_liger_kernel_to_qwen3(model=policy)
after = Qwen3ForCausalLM(config)


def kinds(model):
    return [type(model.model.norm).__name__, type(model.model.layers[0].mlp).__name__, model.forward.__func__.__qualname__]


rotation = modeling_qwen3.apply_rotary_pos_emb.__name__
print("liger-kernel", importlib.metadata.version("liger-kernel"), kinds(before), kinds(after), rotation)
forward = "Qwen3ForCausalLM.forward"
sys.exit(not (kinds(before) == ["Qwen3RMSNorm", "Qwen3MLP", forward] and kinds(after) == ["LigerRMSNorm", "LigerSwiGLUMLP", forward]
              and rotation == "liger_rotary_pos_emb"))
PYTHON
