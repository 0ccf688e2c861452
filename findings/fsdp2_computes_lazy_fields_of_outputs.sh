#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# FSDP2 of PyTorch 2.12 and later reads every field of a dataclass that a module returns, by getattr, to hook tensors. Up to 2.11 it went
# through pytrees, for which a dataclass that nobody registered is a leaf. A field that is computed when it is first read, such as logits
# [B, T, V] that a loss never needs, is now computed in every forward pass in training, with all its memory and one more node in the graph.
#
# Debian 12, Python 3.11; torch 2.11.0 and 2.12.0 on a CPU, one Gloo process. Seen:
#   2.11.0: computed 0 times in forward
#   2.12.0: computed 1 times in forward
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat > "$folder/lazy.py" <<'PYTHON'
import dataclasses
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    logits: object

    def __getattribute__(self, name):
        value = object.__getattribute__(self, name)
        return value() if name == "logits" and callable(value) else value


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.computed = torch.nn.Linear(4, 4), 0

    def forward(self, x):
        hidden = self.inner(x)

        def logits():
            self.computed += 1
            return hidden * 2

        return Output(hidden.sum(), logits)


dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
model = fully_shard(Model(), mesh=dist.init_device_mesh("cpu", (1,)))
output = model(torch.ones(2, 4))
computed = model.computed
output.loss.backward()
print(f"{torch.__version__.split('+')[0]}: computed {computed} times in forward")
dist.destroy_process_group()
PYTHON
for version in 2.11.0 2.12.0; do
  python3 -m venv --clear "$folder/venv"
  "$folder/venv/bin/pip" install --quiet "torch==$version" numpy==2.4.6
  "$folder/venv/bin/python" "$folder/lazy.py" "$folder/store-$version" 2> /dev/null | tee -a "$folder/seen"
done
diff "$folder/seen" - <<'SEEN'
2.11.0: computed 0 times in forward
2.12.0: computed 1 times in forward
SEEN
