#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# torchtitan 0.3.0 computes routed experts in bfloat16 whatever the model's dtype is: in float32, with mixed_precision_param="float32" as
# well, inputs and weights are rounded, the output is float32 again, and nothing says so. Gradients of these weights have 8 bits.
#
# Debian 12, Python 3.11; torch 2.15.0 on a CPU. Dtype of the output, its error against the same experts in float32, dtype of a gradient,
# and whether rounding it to bfloat16 changes nothing. Seen:
#   torch.float32, 0.008, torch.float32, True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.15.0 torchtitan==0.3.0

OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import sys

import torch
from torchtitan.models.common.moe import GroupedExperts

torch.manual_seed(0)
experts = GroupedExperts(GroupedExperts.Config(dim=16, hidden_dim=32, num_experts=2))
for weight in experts.parameters():
    torch.nn.init.normal_(weight)
tokens, counts = torch.randn(8, 16), torch.tensor([3, 5])
found = experts(tokens, counts)
w1, w2, w3 = (list(weight) for weight in (experts.w1_EFD, experts.w2_EDF, experts.w3_EFD))
exact = torch.cat([(torch.nn.functional.silu(part @ w1[e].T) * (part @ w3[e].T)) @ w2[e].T for e, part in enumerate(tokens.split([3, 5]))])
error = ((found - exact).abs().max() / exact.abs().max()).item()
found.sum().backward()
gradient = experts.w1_EFD.grad
rounded = torch.equal(gradient, gradient.bfloat16().float())
print(found.dtype, round(error, 3), gradient.dtype, rounded)
sys.exit(not (found.dtype == gradient.dtype == torch.float32 and 1e-3 < error < 1e-1 and rounded))
PYTHON
