#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Since PyTorch 2.14 clamp and clamp_max have the gradient 0 at the limit itself, and half of it where the limit is a tensor; up to 2.13 it
# was 1 for both. In bfloat16 many values lie at a limit (the next ones to 7 are 6.97 and 7.03), so models with clamped activations, such
# as gpt_oss, train with other gradients after an upgrade, and code of one's own that imitates clamp has to follow.
#
# Ubuntu 24.04 and Debian 12, Python 3.11; torch 2.13.0 and 2.15.0 on a CPU. Seen:
#   2.13.0: number 1.0, tensor 1.0, hardtanh 0.0
#   2.15.0: number 0.0, tensor 0.5, hardtanh 0.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat > "$folder/limits.py" <<'PYTHON'
import torch


def gradient(call):
    x = torch.tensor([7.0], dtype=torch.bfloat16, requires_grad=True)
    call(x).sum().backward()
    return x.grad.item()


number = gradient(lambda x: x.clamp(-7.0, 7.0))
tensor = gradient(lambda x: x.clamp(max=torch.tensor(7.0, dtype=torch.bfloat16)))
hardtanh = gradient(lambda x: torch.nn.functional.hardtanh(x, -7.0, 7.0))
print(f"{torch.__version__.split('+')[0]}: number {number}, tensor {tensor}, hardtanh {hardtanh}")
PYTHON
for version in 2.13.0 2.15.0; do
  python3 -m venv --clear "$folder/venv"
  "$folder/venv/bin/pip" install --quiet "torch==$version" numpy==2.4.6
  "$folder/venv/bin/python" "$folder/limits.py" | tee -a "$folder/seen"
done
diff "$folder/seen" - <<'SEEN'
2.13.0: number 1.0, tensor 1.0, hardtanh 0.0
2.15.0: number 0.0, tensor 0.5, hardtanh 0.0
SEEN
