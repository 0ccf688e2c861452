#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# torch.autograd.grad gives nothing for the weights of an MLP in tiles of verl (use_tiled_mlp), though they are asked for and in use. It
# adds their gradients to weight.grad instead, which autograd.grad leaves alone otherwise: a probe of gradients reads zeros, and the next
# optimizer step has the gradients of the probe in it. The gradient of the input comes as it should.
#
# Ubuntu 24.04 and Debian 12, Python 3.11; verl 0.9.1, torch 2.11.0 on a CPU. Seen:
#   plain: weights get their gradients, and .grad stays None; in tiles: None for the weights, and .grad has what was asked for
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.11.0 numpy==2.4.6
"$folder/venv/bin/pip" install --quiet --no-deps verl==0.9.1

"$folder/venv/bin/python" - <<'PYTHON' 2>/dev/null
import importlib.metadata
import importlib.util
import sys

import torch

file = importlib.metadata.distribution("verl").locate_file("verl/models/transformers/tiled_mlp.py")
spec = importlib.util.spec_from_file_location("tiled_mlp", file)  # verl itself imports far more
tiled_mlp = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tiled_mlp)

torch.manual_seed(0)
mlp, hidden = torch.nn.Linear(4, 4, bias=False), torch.randn(6, 4, requires_grad=True)


def asked(output):
    mlp.weight.grad = None
    return *torch.autograd.grad(output.square().sum(), [hidden, mlp.weight], allow_unused=True), mlp.weight.grad


of_hidden, of_weight, left = asked(mlp(hidden))
tiled_of_hidden, tiled_of_weight, tiled_left = asked(
    tiled_mlp.TiledMLP.apply(lambda module, x: module(x), mlp, hidden, 2, list(mlp.parameters())))
print("verl", importlib.metadata.version("verl"), "plain:", of_weight is not None, left, "in tiles:", tiled_of_weight,
      tiled_left is not None)
sys.exit(not (left is None and tiled_of_weight is None and torch.allclose(tiled_left, of_weight)
              and torch.allclose(tiled_of_hidden, of_hidden)))
PYTHON
