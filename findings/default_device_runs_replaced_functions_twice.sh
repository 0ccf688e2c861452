#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Functions of torch.nn.functional dispatch to PyTorch's function modes by the name that they have in that module. A wrapper put
# there, which calls the function that it replaces, so runs twice inside `with torch.device(...)`, after
# torch.set_default_device, and in any other function mode: its change is made twice, and a counter counts double. Functions of C
# in the same module, such as linear, run once.
#
# Ubuntu 24.04 and Debian 12, Python 3.11; torch 2.11.0 on a CPU. Calls of a wrapper in one forward pass. Seen:
#   embedding 1, layer_norm 1, cross_entropy 1, linear 1; in a device 2, 2, 2, 1; with a default device 2, 2, 2, 1
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.11.0 numpy==2.4.6

"$folder/venv/bin/python" - <<'PYTHON'
import contextlib
import sys

import torch
from torch import nn

counts = {}


def counted(name):
    stock = getattr(nn.functional, name)

    def wrapper(*args, **kwargs):
        counts[name] += 1
        return stock(*args, **kwargs)

    setattr(nn.functional, name, wrapper)
    counts[name] = 0


for name in ("embedding", "layer_norm", "cross_entropy", "linear"):
    counted(name)
model = nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 7))


def calls(mode):
    counts.update(dict.fromkeys(counts, 0))
    with mode:
        nn.CrossEntropyLoss()(model(torch.tensor([1, 2])), torch.tensor([2, 3]))
    return list(counts.values())


plain, in_device = calls(contextlib.nullcontext()), calls(torch.device("cpu"))
torch.set_default_device("cpu")
by_default = calls(contextlib.nullcontext())
print("torch", torch.__version__, list(counts), plain, in_device, by_default)
sys.exit(not (plain == [1, 1, 1, 1] and in_device == by_default == [2, 2, 2, 1]))
PYTHON
