# SPDX-License-Identifier: Apache-2.0
"""Five steps of a small model by other trainers as they are published, with the line for Espalier and without it.

Where a package is not installed its tests are skipped; the nightly workflow installs each (scripts/versions.py)."""

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import REPOSITORY
from rank_processes import ENVIRONMENT
from wrappers import path_with

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
    (folder / "site").mkdir()
    (folder / "site/sitecustomize.py").write_text(SITE)
    return folder


# DeepSpeed's operator for memory that ranks of a CPU share would be compiled.
SITE = """
from espalier.launch.hooks import when_imported

when_imported("deepspeed.comm.torch", lambda module: setattr(module, "build_shm_op", lambda: None))
"""


def of_deepspeed(desk):
    """What a trainer with a config of DeepSpeed finds in its environment, on two ranks of a CPU."""
    path = os.pathsep.join(map(str, [desk / "site", path_with("deepspeed"), REPOSITORY / "python"]))
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # torchrun of this Python
    return {**ENVIRONMENT, "PYTHONPATH": path, "PATH": programs, "DS_ACCELERATOR": "cpu", "NPROC_PER_NODE": "2",
            "MASTER_PORT": str(free_port())}  # fmt: skip


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


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
SWIFT += ["--gradient_checkpointing_kwargs", '{"use_reentrant": false}']


def test_swift(desk):
    needs("swift.pipelines")
    plugin = run(desk, "-m", "espalier.plugins.swift").strip()
    plain = run(desk, "-m", "swift.cli.sft", *SWIFT)
    check(plain, run(desk, "-m", "swift.cli.sft", *SWIFT, "--external_plugins", plugin))


@pytest.mark.parametrize("stage", [2, 3])
def test_swift_with_deepspeed(desk, stage):
    package = needs("swift.pipelines")
    config = json.loads((Path(package.__file__).parents[1] / f"config/zero{stage}.json").read_text())
    del config["train_batch_size"]  # with it, loading under ZeRO 3 fails on a CPU, unpatched as well
    (desk / "zero.json").write_text(json.dumps(config))
    plugin = run(desk, "-m", "espalier.plugins.swift").strip()
    words = ["-m", "swift.cli.main", "sft", *SWIFT, "--fp16", "false", "--bf16", "false", "--deepspeed", "zero.json"]
    plain = run(desk, *words, **of_deepspeed(desk))
    check(plain, run(desk, *words, "--external_plugins", plugin, **of_deepspeed(desk)))


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
    check(plain, run(desk, "-m", "espalier", "launch", "--", sys.executable, *words, DISABLE_VERSION_CHECK="1"))


@pytest.mark.parametrize("stage", [2, 3])
def test_llama_factory_with_deepspeed(desk, stage):
    needs("llamafactory")
    config = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
              "gradient_clipping": "auto", "zero_optimization": {"stage": stage, "overlap_comm": False}}  # fmt: skip
    (desk / "zero.json").write_text(json.dumps(config))
    (desk / "run.yaml").write_text(FACTORY + "deepspeed: zero.json\n")
    words = ["-m", "llamafactory.cli", "train", "run.yaml"]
    variables = {"DISABLE_VERSION_CHECK": "1", "FORCE_TORCHRUN": "1"}
    plain = run(desk, *words, **variables, **of_deepspeed(desk))
    check(plain, run(desk, "-m", "espalier", "launch", "--", sys.executable, *words, **variables, **of_deepspeed(desk)))


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


# OpenRLHF's actor, its strategy and its loss, on one rank of a CPU. What its run needs a GPU for is left out: FlashAttention, of
# which it takes functions that remove padding, and AdamW of DeepSpeed, which would be compiled.
OPENRLHF = """
import os, sys, types
from importlib.machinery import ModuleSpec
from types import SimpleNamespace as Named
import deepspeed, torch
from einops import rearrange
from transformers import AutoModelForCausalLM

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
torch.set_num_threads(1)


def unpad_input(values, mask):
    places = mask.flatten().nonzero().flatten()
    ends = mask.sum(1, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return values.flatten(0, 1)[places], places, torch.nn.functional.pad(ends, (1, 0)), int(mask.sum(1).max()), mask.sum(1)


def pad_input(values, places, batch, length):
    return values.new_zeros(batch * length, *values.shape[1:]).index_copy(0, places, values).unflatten(0, (batch, length))


padding = {"index_first_axis": lambda values, places: values[places], "pad_input": pad_input, "rearrange": rearrange,
           "unpad_input": unpad_input}
for name, holds in {"": {}, ".utils": {}, ".bert_padding": padding, ".utils.distributed": {"all_gather": None}}.items():
    module = sys.modules["flash_attn" + name] = types.ModuleType("flash_attn" + name)
    module.__spec__ = ModuleSpec("flash_attn" + name, None)
    module.__dict__.update(holds)
from openrlhf.models import Actor, PolicyLoss
from openrlhf.utils.deepspeed import DeepspeedStrategy

initialize = deepspeed.initialize


def with_adam_of_torch(config, model_parameters, **more):
    settings = config.pop("optimizer")["params"]
    zero = config["zero_optimization"]
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
               "zero_optimization": {name: zero[name] for name in zero if not name.startswith("offload")}}
    more["optimizer"] = torch.optim.AdamW(model_parameters, lr=settings["lr"])
    return initialize(config=config, **more)


deepspeed.initialize = with_adam_of_torch
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
deepspeed.init_distributed("gloo", verbose=False)
stage, is_packed, how = int(sys.argv[1]), bool(int(sys.argv[2])), sys.argv[3]
given = Named(ds=Named(param_dtype="fp32"), train=Named(dynamic_batch_enable=False), local_rank=0)
strategy = DeepspeedStrategy(max_norm=1.0, micro_train_batch_size=8, train_batch_size=8, zero_stage=stage, args=given)
model = AutoModelForCausalLM.from_pretrained("model", attn_implementation="sdpa", dtype=torch.float32)
model.config.use_cache = False  # as Actor does where it loads a model
actor = Actor(model, temperature=0.7)
actor.packing_samples = is_packed
if how != "plain":
    import espalier
if how in ("actor", "model"):
    espalier.hf.patch(actor if how == "actor" else actor.model)
adam = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
actor, optimizer, _ = strategy.prepare((actor, {"optim": "adam", "adam": adam, "lr_scheduler": "constant", "scheduler_steps": 9}))
if how == "after":
    espalier.hf.patch(actor)
loss_of = PolicyLoss()
generator = torch.Generator().manual_seed(5)
draw = lambda *shape: torch.randn(*shape, generator=generator)
for step in range(5):
    prompt = torch.randint(1, 500, (1, 20), generator=generator).expand(8, -1)
    rows = torch.cat([prompt, torch.randint(1, 500, (8, 6), generator=generator)], 1)
    mask = torch.ones_like(rows)
    mask[::2, -2:] = 0
    action = mask[:, -6:].bool()
    log_probs, output = actor(rows, action, attention_mask=mask, return_output=True, return_entropy=True)
    loss = loss_of(log_probs, log_probs.detach() + 0.1 * draw(8, 6), draw(8, 6), action_mask=action)[0]
    loss = loss - 0.01 * (output.entropy[:, -6:] * action).sum() / action.sum()
    strategy.backward(loss, actor, optimizer)
    strategy.optimizer_step(optimizer, actor, None)
    print({'loss': loss.item(), 'grad_norm': strategy.get_grad_norm(actor)})
if how != "plain":
    print(espalier.hf.sharing(actor))
"""


@pytest.mark.parametrize("stage, is_packed, how", [(2, 0, "actor"), (2, 1, "model"), (3, 0, "after"), (3, 1, "actor")])
def test_openrlhf(desk, stage, is_packed, how):
    if importlib.util.find_spec("openrlhf") is None:
        pytest.skip("needs the package openrlhf, which CI installs nightly")
    (desk / "openrlhf_step.py").write_text(OPENRLHF)
    theirs = figures(run(desk, "openrlhf_step.py", stage, is_packed, "plain", **of_deepspeed(desk)))
    said = run(desk, "openrlhf_step.py", stage, is_packed, how, **of_deepspeed(desk))
    assert len(theirs) == 2 * STEPS and figures(said) == pytest.approx(theirs, rel=1e-4)
    assert re.search(r"^5 batches, 1,000 tokens, \d+ encoded: 3\.\d+x$", said, re.MULTILINE), said
