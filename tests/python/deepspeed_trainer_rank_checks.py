# SPDX-License-Identifier: Apache-2.0
"""What is checked of trainers with a config of DeepSpeed, on two ranks: Transformers' with `espalier.hf.patch(model)`, TRL's with
`espalier.trl.patch(trainer)`, each against the same run unpatched.

    python rank_processes.py deepspeed_trainer_rank_checks FOLDER 2     with ESPALIER_DEEPSPEED=all: the whole table
"""

import contextlib
import itertools
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from deepspeed_rank_checks import MODEL, MOST, another_forest, apart, set_up  # first: it chooses the accelerator of DeepSpeed

import datasets
import deepspeed
import peft
import pytest
import trl
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file
from torch.utils.data import SequentialSampler
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.utils import logging

import espalier.trl
from espalier.error_ratio import MAX_RATIO, error_ratio
from espalier.hf import patch, sharing
from test_trl import small_words

logging.set_verbosity_error()
logging.disable_progress_bar()

ROWS = 4  # of a micro-batch
STEPS = 4
NUMBERS = itertools.count()  # of folders
SAVED = 2  # the step after which a checkpoint is written


@dataclass(frozen=True)
class Case:
    """One run of a trainer, by the name of its function below. resumed: with a checkpoint, from which it goes on again."""

    stage: int
    trainer: str = "transformers"
    dtype: torch.dtype = torch.float32
    lora: bool = False
    checkpointing: bool = False
    accumulate: int = 1
    resumed: bool = False


def settings_of(case, folder):
    zero = {"stage": case.stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 20000, "overlap_comm": False,
            "stage3_gather_16bit_weights_on_model_save": True}  # fmt: skip
    config = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
              "zero_optimization": zero, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
              "steps_per_print": 10**9, "bf16": {"enabled": "auto"}}  # fmt: skip
    reentry = {"gradient_checkpointing_kwargs": {"use_reentrant": False}} if case.checkpointing else {}
    return {"output_dir": str(folder), "per_device_train_batch_size": ROWS, "gradient_accumulation_steps": case.accumulate,
            "max_steps": STEPS, "logging_steps": 1, "report_to": [], "use_cpu": True, "deepspeed": config, "optim": "sgd",
            "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 1.0, "seed": 1, "disable_tqdm": True,
            "bf16": case.dtype == torch.bfloat16, "gradient_checkpointing": case.checkpointing,
            "save_strategy": "steps" if case.resumed else "no", "save_steps": SAVED, **reentry}  # fmt: skip


def model_of(case):
    """From the disk: where TrainingArguments with ZeRO 3 are there, Transformers partitions it as it loads."""
    model = AutoModelForCausalLM.from_pretrained(Path(sys.argv[2]) / "model", dtype=torch.float32).train()
    if case.lora:
        torch.manual_seed(2)
        if case.checkpointing:
            model.enable_input_require_grads()
        adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, adapter)
    return model


def talks(case):
    """Rows in the order of micro-batches, which alternate between the ranks: those of rank 1 have no prefix in common."""
    generator = torch.Generator().manual_seed(3)
    for batch in range(2 * STEPS * case.accumulate):
        trunk = torch.randint(1, 59, (1 if batch % 2 == 0 else ROWS, 6), generator=generator).expand(ROWS, -1)
        yield from torch.cat([trunk, torch.randint(1, 59, (ROWS, 4), generator=generator)], 1).tolist()


def collate(rows):
    ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids}


def text_of(tokens):
    return " ".join(f"w{token}" for token in tokens)


def transformers(case, settings, is_patched):
    arguments = TrainingArguments(**settings)
    model = model_of(case)
    if is_patched:
        patch(model)
    return Trainer(model, arguments, train_dataset=[{"input_ids": row} for row in talks(case)], data_collator=collate)


def sft(case, settings, is_patched):
    arguments = trl.SFTConfig(**settings)
    rows = datasets.Dataset.from_list([{"input_ids": row} for row in talks(case)])
    trainer = trl.SFTTrainer(model_of(case), arguments, train_dataset=rows, processing_class=small_words())
    return espalier.trl.patch(trainer) if is_patched else trainer


def dpo(case, settings, is_patched):
    arguments = trl.DPOConfig(**settings)
    rows = [{"prompt": text_of(row[:6]) + " ", "chosen": text_of(row[6:8]), "rejected": text_of(row[8:])} for row in talks(case)]
    model = model_of(case)
    reference = None if case.lora else model_of(case)
    trainer = trl.DPOTrainer(model, reference, args=arguments, train_dataset=datasets.Dataset.from_list(rows),
                             processing_class=small_words())  # fmt: skip
    return espalier.trl.patch(trainer) if is_patched else trainer


def grpo(case, settings, is_patched):
    arguments = trl.GRPOConfig(**settings, num_generations=ROWS, max_completion_length=6)
    rows = datasets.Dataset.from_list([{"prompt": text_of(row[:6])} for row in talks(case)])
    score = lambda completions, **_: [float(len(completion) + len(set(completion))) for completion in completions]
    trainer = trl.GRPOTrainer(model_of(case), score, args=arguments, train_dataset=rows, processing_class=small_words())
    return espalier.trl.patch(trainer) if is_patched else trainer


def results(case, folder, is_patched, start=None):
    """(losses, gradient norms, sums of parameters) of a run, from a checkpoint where there is a `start`."""
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    trainer = globals()[case.trainer](case, settings_of(case, folder), is_patched)
    if case.trainer in ("transformers", "sft"):
        trainer._get_train_sampler = lambda dataset=None: SequentialSampler(trainer.train_dataset)
    torch.manual_seed(6)
    trainer.train(resume_from_checkpoint=start)
    log = [line for line in trainer.state.log_history if "loss" in line]
    losses, norms, sums = [line["loss"] for line in log], [float(line.get("grad_norm") or 0) for line in log], []
    for parameter in trainer.model.parameters():
        with deepspeed.zero.GatheredParameters([parameter]) if case.stage == 3 else contextlib.nullcontext():
            sums.append(parameter.detach().double().abs().sum().item())
    if is_patched:
        assert dist.get_rank() or sharing(trainer.model).ratio > 1.3, sharing(trainer.model)
    if case.resumed:
        trainer.save_model(str(folder / "last"))
        dist.barrier()  # the first rank writes it
    trainer.model_wrapped.destroy()
    return losses, norms, sums


def same(ours, theirs, case):
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=MOST, abs=1e-8), case


def weights_of(folder):
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def compare(case):
    """In bfloat16 the errors of both against float32. Goes on from a checkpoint patched, and from that of the unpatched run."""
    folder = folder_of(case)
    theirs, ours = results(case, folder / "unpatched", False), results(case, folder / "patched", True)
    if case.dtype != torch.float32:
        exact = results(replace(case, dtype=torch.float32), folder / "exact", False)
        for mine, other, right in zip(ours, theirs, exact, strict=True):
            patched, unpatched = apart(mine, right), apart(other, right)
            assert error_ratio(patched, unpatched, torch.finfo(case.dtype).eps / 2) <= MAX_RATIO, (case, patched, unpatched)
        return
    same(ours, theirs, case)
    assert len(ours[0]) == STEPS and (case.stage == 0 or all(ours[1]))
    if case.resumed:
        torch.testing.assert_close(weights_of(folder / "patched/last"), weights_of(folder / "unpatched/last"), rtol=1e-5,
                                   atol=1e-7)  # fmt: skip
        for name in ("patched", "unpatched"):
            again = results(case, folder / f"again_{name}", True, str(folder / name / f"checkpoint-{SAVED}"))
            same([each[SAVED:] for each in again[:2]] + [again[2]], [each[SAVED:] for each in theirs[:2]] + [theirs[2]], case)


def folder_of(case):
    """A new folder for the runs of a case, which the ranks share, beside the model: in that of rank_processes.py."""
    folder = Path(sys.argv[2]) / str(next(NUMBERS))
    folder.mkdir(exist_ok=True)
    return folder


def whole_table():
    cases = [Case(stage) for stage in range(4)]
    for stage in (2, 3):
        base = Case(stage)
        cases += [replace(base, dtype=torch.bfloat16), replace(base, accumulate=2), replace(base, lora=True),
                  replace(base, checkpointing=True), replace(base, lora=True, checkpointing=True),
                  replace(base, resumed=True), replace(base, resumed=True, lora=True)]  # fmt: skip
        for trainer in ("sft", "dpo", "grpo"):
            cases += [replace(base, trainer=trainer), replace(base, trainer=trainer, lora=True)]
        cases.append(replace(base, trainer="sft", accumulate=2, checkpointing=True, dtype=torch.bfloat16))
    return cases


SHORT = [Case(2, accumulate=2), Case(3, lora=True, checkpointing=True), Case(2, "sft", lora=True), Case(3, "sft")]


def set_up_trainers(rank):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # Accelerate wants them, where there is a group already
    set_up(rank)
    if rank.rank == 0:
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL)).save_pretrained(Path(sys.argv[2]) / "model")
    dist.barrier()


def runs_are_the_same(rank):
    for case in whole_table() if os.environ.get("ESPALIER_DEEPSPEED") == "all" else SHORT:
        compare(case)


def another_forest_is_seen_by_trainers(rank):
    """The negative control: tokens that see other branches."""
    folder = folder_of(Case(2))
    theirs = results(Case(2), folder / "unpatched", False)
    with another_forest():
        ours = results(Case(2), folder / "patched", True)
    assert ours[0][0] != pytest.approx(theirs[0][0], rel=1e-4)


CHECKS = {2: [set_up_trainers, runs_are_the_same, another_forest_is_seen_by_trainers]}
