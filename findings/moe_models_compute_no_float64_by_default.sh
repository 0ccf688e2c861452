#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A mixture of experts of Transformers cannot compute in float64 as it is made: its experts go through torch's grouped_mm, which has no
# float64 on a CPU. Dense models can, so a check of gradients in float64 fails for these families alone. With
# experts_implementation="eager" or "batched_mm" they can, too.
#
# Ubuntu 24.04 and Debian 12, Python 3.11; transformers 5.24.0, torch 2.11.0 on a CPU; a small qwen3_moe in float64. Seen:
#   default: RuntimeError: Expected mat_a to be Float32, BFloat16 or Float16 matrix, got Double
#   eager: computed, batched_mm: computed
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.11.0 numpy==2.4.6 transformers==5.24.0

cat > "$folder/experts.py" <<'PYTHON'
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

SMALL = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
             head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)


def outcome(**more):
    model = Qwen3MoeForCausalLM._from_config(Qwen3MoeConfig(**SMALL), **more).double()
    try:
        model(input_ids=torch.tensor([[1, 2, 3]]))
    except RuntimeError as error:
        return f"RuntimeError: {str(error).splitlines()[0]}"
    return "computed"


default, others = outcome(), [outcome(experts_implementation=name) for name in ("eager", "batched_mm")]
print("default:", default)
print("eager:", others[0], "batched_mm:", others[1])
assert "got Double" in default and others == ["computed"] * 2
PYTHON
"$folder/venv/bin/python" "$folder/experts.py"
