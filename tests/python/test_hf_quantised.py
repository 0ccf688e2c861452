# SPDX-License-Identifier: Apache-2.0
"""Models that bitsandbytes has quantised, with LoRA: the same loss and gradients on trees as on rows. Runs where bitsandbytes is
installed."""

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from espalier.hf import patch, sharing, unpatch
from hf_models import branching_rows, make_model, padded, sums_of

pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")
SETTINGS = {"4 bits": dict(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32), "8 bits": dict(load_in_8bit=True)}


@pytest.mark.parametrize("bits", SETTINGS)
def test_adapters_on_quantised_layers(bits, tmp_path):
    make_model("qwen3", torch.float32).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=BitsAndBytesConfig(**SETTINGS[bits]),
                                                 dtype=torch.float32, device_map="cpu")  # fmt: skip
    torch.manual_seed(3)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    layer = model.base_model.model.model.layers[0].mlp.down_proj
    assert type(layer).__module__.startswith("bitsandbytes.")
    batch = padded(branching_rows())
    theirs = sums_of(model.train(), [batch])
    ours = sums_of(patch(model), [batch])
    assert sharing(model).ratio > 1.5
    # Activations are quantised to 8 bits by rows of the matrix, so rows and trees round alike, but for float32.
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    for name, gradient in theirs[1].items():
        error = (ours[1][name] - gradient).norm() / gradient.norm()
        assert error < 1e-3, f"{name}: {error:.1e}"
    unpatch(model)
