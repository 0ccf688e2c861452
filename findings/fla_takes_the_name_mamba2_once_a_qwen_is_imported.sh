#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Where flash-linear-attention is installed, Transformers imports it with the module of Qwen3.5, and fla registers models of its own under
# names that Transformers has, over those. AutoConfig and AutoModelForCausalLM then give fla's mamba2 (and mamba), in the same process that
# a moment before gave those of Transformers, which run on a CPU as fla's do not.
#
# Ubuntu 24.04 and Debian 12, Python 3.11; flash-linear-attention 0.6.0, transformers 5.23.0, torch 2.11.0 on a CPU. Seen:
#   before: transformers.models.mamba2.modeling_mamba2; after `import ...modeling_qwen3_5`: fla.models.mamba2.modeling_mamba2
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.11.0 numpy==2.4.6 transformers==5.23.0 flash-linear-attention==0.6.0 fla-core==0.6.0

"$folder/venv/bin/python" - <<'PYTHON' 2>/dev/null
import importlib
import importlib.metadata
import sys

from transformers import AutoConfig, AutoModelForCausalLM


def home_of_mamba2():
    config = AutoConfig.for_model("mamba2", vocab_size=64, hidden_size=32, num_hidden_layers=1, num_heads=8, head_dim=8, state_size=8,
                                  n_groups=1)
    return type(AutoModelForCausalLM.from_config(config)).__module__


before = home_of_mamba2()
importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
after = home_of_mamba2()
print("flash-linear-attention", importlib.metadata.version("flash-linear-attention"), "before:", before, "after:", after)
sys.exit(not (before == "transformers.models.mamba2.modeling_mamba2" and after == "fla.models.mamba2.modeling_mamba2"))
PYTHON
