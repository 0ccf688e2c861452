# SPDX-License-Identifier: Apache-2.0
"""Trainers with a config of DeepSpeed on two ranks over Gloo: the checks of deepspeed_trainer_rank_checks.py, and `espalier launch`."""

import json
import os
import subprocess
import sys

import pytest

from conftest import REPOSITORY
from rank_processes import ENVIRONMENT, check_passed, outcomes
from wrappers import path_with

pytestmark = pytest.mark.nightly
CHECKS = ["set_up_trainers", "runs_are_the_same", "another_forest_is_seen_by_trainers"]
PROGRAM = """
import json, os, sys
import deepspeed, torch
from accelerate.state import AcceleratorState, GradientState
from transformers import AutoModelForCausalLM, Qwen3Config, Trainer, TrainingArguments

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it would be compiled
torch.set_num_threads(1)
CONFIG = Qwen3Config(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, head_dim=8)
ROWS = [{"input_ids": [*range(20), 40 + answer, 41, 50 + answer]} for answer in range(8)]


def collate(rows):
    ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids}


def lines_of(stage, train):
    AcceleratorState._reset_state()
    GradientState._reset_state()
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "zero_optimization": zero,
              "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    settings = TrainingArguments("out", per_device_train_batch_size=4, max_steps=3, logging_steps=1, report_to=[], use_cpu=True,
                                 save_strategy="no", disable_tqdm=True, optim="sgd", learning_rate=0.1, deepspeed=config)
    torch.manual_seed(3)
    trainer = Trainer(AutoModelForCausalLM.from_config(CONFIG), settings, train_dataset=ROWS, data_collator=collate)
    train(trainer)
    trainer.model_wrapped.destroy()
    return [line for line in trainer.state.log_history if "loss" in line]


launched = Trainer.train
found = {stage: [lines_of(stage, getattr(launched, "__wrapped__", None)), lines_of(stage, launched)] for stage in (2, 3)}
if os.environ["RANK"] == "0":
    with open("found.json", "w") as file:
        json.dump(found, file)
torch.distributed.barrier()
sys.stderr.flush()
os._exit(0)  # Gloo may abort or hang where a group ends
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return outcomes("deepspeed_trainer_rank_checks", folder, [2], PYTHONPATH=path_with("deepspeed"))


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_ranks(found, name):
    check_passed(found, name, 2)


def test_the_checks_are_all(found):
    assert {name for name, _ in found} == set(CHECKS)


WORKERS = "2" if os.environ.get("ESPALIER_DEEPSPEED") == "all" else "1"
TORCHRUN = ["torch.distributed.run", "--nproc-per-node", WORKERS, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]


def test_espalier_launch(tmp_path):
    """Workers of torchrun, one in the short form, run the same training twice: without the patch of `espalier launch` and with it."""
    path = os.pathsep.join([path_with("deepspeed"), str(REPOSITORY / "python")])
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-m", "espalier", "launch", "--", sys.executable, "-m", *TORCHRUN, "program.py"], cwd=tmp_path,
                          env=environment, capture_output=True, text=True, timeout=600)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("espalier: Trainer trains Qwen3Model on trees of tokens\n") == 2, done.stderr
    for theirs, ours in json.loads((tmp_path / "found.json").read_text()).values():
        assert len(ours) == len(theirs) == 3
        for mine, other in zip(ours, theirs, strict=True):
            assert mine["espalier/ratio"] > 2 and "espalier/ratio" not in other
            assert [mine[name] for name in ("loss", "grad_norm")] == pytest.approx([other[name] for name in ("loss", "grad_norm")], 1e-5)
