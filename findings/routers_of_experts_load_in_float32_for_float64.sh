#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Transformers 5.24 makes routers of deepseek_v3, glm4_moe and nemotron_h in float32 and loads them so whatever dtype is asked for: a model
# that is loaded with dtype=torch.float64 has routers in float32, which have lost digits of a float64 checkpoint, and float64 comparisons
# of gradients stop at 1e-8. FSDP2 then refuses a layer, as its parameters have two dtypes. Up to 5.23 all weights had the dtype asked for.
#
# Debian 12, Python 3.11; torch 2.11.0 on a CPU. Seen:
#   5.23.0: router float64, exact True
#   5.24.0: router float32, exact False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat > "$folder/routers.py" <<'PYTHON'
import sys

import torch
import transformers
from transformers import AutoModelForCausalLM, Glm4MoeConfig

transformers.logging.set_verbosity_error()
config = Glm4MoeConfig(vocab_size=16, hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=2,
                       num_attention_heads=2, num_key_value_heads=1, head_dim=8, n_routed_experts=4, num_experts_per_tok=2,
                       n_shared_experts=1, first_k_dense_replace=1)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config).double()
router = model.model.layers[1].mlp.gate.weight
with torch.no_grad():
    router.copy_(torch.randn(router.shape, dtype=torch.float64))
model.save_pretrained(sys.argv[1])
loaded = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float64).model.layers[1].mlp.gate.weight
dtype = str(loaded.dtype).removeprefix("torch.")
print(f"{transformers.__version__}: router {dtype}, exact {loaded.double().equal(router)}")
PYTHON
python3 -m venv "$folder/venv"
for version in 5.23.0 5.24.0; do
  "$folder/venv/bin/pip" install --quiet "transformers==$version" torch==2.11.0 numpy==2.4.6
  "$folder/venv/bin/python" "$folder/routers.py" "$folder/model-$version" 2> /dev/null | tee -a "$folder/seen"
done
diff "$folder/seen" - <<'SEEN'
5.23.0: router float64, exact True
5.24.0: router float32, exact False
SEEN
