# SPDX-License-Identifier: Apache-2.0
"""Five steps of a small model by other trainers as they are published, with the line for Espalier and without it.

Where a package is not installed its tests are skipped; the nightly workflow installs each (scripts/versions.py)."""

import json
import os
import re
import subprocess
import sys

import pytest

QUESTION = "You are an agent of an airline, and you answer in one word. " * 3 + "What is the number?"
STEPS = 5
CONFIG = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96,
          "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6,
          "max_position_embeddings": 4096, "rope_theta": 10000.0, "tie_word_embeddings": False}  # fmt: skip


@pytest.fixture(scope="module")
def desk(tmp_path_factory, espalier):
    """A folder with a model and rows that share a prompt, as each trainer takes them."""
    folder = tmp_path_factory.mktemp("desk")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    espalier("init", "--config", folder / "config.json", "--out", folder / "model", "--tokenizer", "bytes")
    answers = [f"It is {number}." for number in range(8)]
    chats = [{"messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": answer}]} for answer in answers]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    alpaca = [{"instruction": QUESTION, "input": "", "output": answer} for answer in answers]
    (folder / "alpaca.json").write_text(json.dumps(alpaca))
    (folder / "dataset_info.json").write_text(json.dumps({"tiny": {"file_name": "alpaca.json"}}))
    return folder


def needs(name):
    return pytest.importorskip(name, reason=f"needs the package {name}, which CI installs nightly")


def run(desk, *words, **variables):
    """What a Python prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables}
    done = subprocess.run([sys.executable, *map(str, words)], cwd=desk, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def figures(said):
    """Loss and gradient norm of each step."""
    number = r"'?([\d.e+-]+)'?"
    return [float(each) for found in re.findall(rf"'loss': {number}, 'grad_norm': {number}", said) for each in found]


def check(plain, patched):
    theirs, mine = figures(plain), figures(patched)
    assert len(theirs) == 2 * STEPS and mine == pytest.approx(theirs, rel=2e-3)  # they print four digits
    assert "espalier" not in plain
    tokens, encoded = re.search(rf"espalier: {STEPS} batches, ([\d,]+) tokens, ([\d,]+) encoded", patched).groups()
    assert int(tokens.replace(",", "")) > 3 * int(encoded.replace(",", ""))
    assert len(re.findall(r"^espalier: \w+ trains Qwen3Model on trees of tokens$", patched, re.MULTILINE)) == 1


SWIFT = """--model model --model_type qwen3 --template qwen3 --dataset chats.jsonl --tuner_type full --torch_dtype float32 --max_steps 5
    --per_device_train_batch_size 4 --gradient_accumulation_steps 1 --logging_steps 1 --save_strategy no --use_cpu true
    --learning_rate 1e-4 --report_to none --dataset_num_proc 1 --dataloader_num_workers 1 --split_dataset_ratio 0
    --add_version false --output_dir out_swift""".split()


def test_swift(desk):
    needs("swift.pipelines")
    plugin = run(desk, "-m", "espalier.plugins.swift").strip()
    plain = run(desk, "-m", "swift.cli.sft", *SWIFT)
    check(plain, run(desk, "-m", "swift.cli.sft", *SWIFT, "--external_plugins", plugin))


FACTORY = """
model_name_or_path: model
stage: sft
do_train: true
finetuning_type: full
dataset: tiny
dataset_dir: .
template: qwen3
output_dir: out_factory
overwrite_output_dir: true
per_device_train_batch_size: 4
max_steps: 5
logging_steps: 1
save_strategy: "no"
report_to: none
use_cpu: true
bf16: false
preprocessing_num_workers: 1
lr_scheduler_type: constant
learning_rate: 1.0e-4
use_reentrant_gc: false
"""


def test_llama_factory(desk):
    needs("llamafactory")
    (desk / "run.yaml").write_text(FACTORY)
    words = ["-m", "llamafactory.cli", "train", "run.yaml"]
    plain = run(desk, *words, DISABLE_VERSION_CHECK="1")
    check(plain, run(desk, "-m", "espalier.launch", "--", sys.executable, *words, DISABLE_VERSION_CHECK="1"))


AXOLOTL = """
base_model: ./model
datasets: [{path: chats.jsonl, type: chat_template, ds_type: json}]
chat_template: tokenizer_default
dataset_prepared_path: prepared
sequence_len: 2048
sample_packing: false
eval_sample_packing: false
sdp_attention: true
micro_batch_size: 4
gradient_accumulation_steps: 1
max_steps: 5
optimizer: adamw_torch
learning_rate: 1.0e-4
lr_scheduler: constant
bf16: false
fp16: false
output_dir: out_axolotl
logging_steps: 1
save_strategy: "no"
gradient_checkpointing: false
dataset_num_proc: 1
"""


def test_axolotl(desk):
    needs("axolotl.train")
    said = []
    for line in ("", "plugins: [espalier.plugins.axolotl.EspalierPlugin]\n"):
        (desk / "axolotl.yaml").write_text(line + AXOLOTL)
        said.append(run(desk, "-m", "axolotl.cli.train", "axolotl.yaml", AXOLOTL_DO_NOT_TRACK="1"))
    check(*said)


# verl's engine needs a GPU: what it calls to make its model ready, and what it does with logits, on a CPU.
VERL = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
from verl.workers.config import HFModelConfig
from verl.workers.engine.fsdp import transformer_impl

HFModelConfig(path="model", external_lib=sys.argv[1] if sys.argv[1:] else None, override_config={"attn_implementation": "eager"})
model = AutoModelForCausalLM.from_pretrained("model", attn_implementation="eager", dtype=torch.float32)
transformer_impl.apply_monkey_patch(model=model, use_remove_padding=True, ulysses_sp_size=1, use_fused_kernels=False,
                                    fused_kernels_backend=None)
rows = [[*range(40), 50 + answer, 60, 70 + answer] for answer in range(8)]
ids = torch.tensor([sum(rows, [])])
positions = torch.cat([torch.arange(len(row)) for row in rows]).unsqueeze(0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(5):
    logits = model(input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False).logits.squeeze(0)
    logits.div_(0.7)
    loss = -torch.log_softmax(logits, -1).gather(1, torch.roll(ids, -1, 1).T).mean()
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print({'loss': loss.item(), 'grad_norm': norm.item()})
"""


def test_verl(desk):
    needs("verl.workers.engine.fsdp.transformer_impl")
    (desk / "step.py").write_text(VERL)
    theirs, said = figures(run(desk, "step.py")), run(desk, "step.py", "espalier.plugins.verl")
    assert len(theirs) == 2 * STEPS and figures(said) == pytest.approx(theirs, rel=1e-4)
    assert "espalier: Qwen3ForCausalLM runs on trees of tokens\n" in said
    assert "espalier: 5 batches, 1,720 tokens, 320 encoded: 5.38x\n" in said
