# SPDX-License-Identifier: Apache-2.0
"""What a patched model pays, per forward pass, to see whether other code has changed its layers.

    PYTHONPATH=python python bench/hf_look.py [--layers 28] [--rounds 2000]

Prints the median and the fastest time of Patch.look, which runs before each batch, for a Qwen3 as it is, with LoRA on all its
linear layers, and with a hook of Accelerate on each layer; of the look at the head; and of the settings of training that are read
there as well.
"""

import argparse
import statistics
import time

import peft
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from transformers import Qwen3Config, Qwen3ForCausalLM

import espalier
from espalier.hf.families import backbone_of, check_training, modules_with_settings, unwrapped

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make(kind, layers):
    config = Qwen3Config(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=8)  # fmt: skip
    model = Qwen3ForCausalLM(config).train()
    if kind == "LoRA":
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=LINEARS, task_type="CAUSAL_LM"))
    if kind == "Accelerate":
        for layer in model.model.layers:
            add_hook_to_module(layer, ModelHook())
    return espalier.hf.patch(model)


def milliseconds(function, rounds):
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        function()
        times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times), min(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=2000)
    arguments = parser.parse_args()
    ids = torch.arange(1, 9).expand(2, 8)
    print("median and fastest [ms]     look at layers      look at the head       settings of training")
    for kind in ("plain", "LoRA", "Accelerate"):
        model = make(kind, arguments.layers)
        model(input_ids=ids, labels=ids)
        inner, backbone = unwrapped(model), backbone_of(model)
        look = milliseconds(lambda: backbone._espalier.look(backbone, ids), arguments.rounds)  # noqa: B023
        head = milliseconds(lambda: backbone._espalier.may_share_head(inner, backbone), arguments.rounds)  # noqa: B023
        watched = modules_with_settings(backbone)
        settings = milliseconds(lambda: check_training(watched), arguments.rounds // 20)  # noqa: B023
        print(f"{kind:<12} {len(list(backbone.modules())):7}" + "".join(f"   {median:8.3f} {fastest:8.3f}"
                                                                          for median, fastest in (look, head, settings)))  # fmt: skip


if __name__ == "__main__":
    main()
