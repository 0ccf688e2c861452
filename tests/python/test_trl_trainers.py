# SPDX-License-Identifier: Apache-2.0
"""The table of TRL's trainers in docs/compatibility.md: one step of each, patched against unpatched."""

import importlib
import re
import warnings

import pytest
import torch
from transformers import AutoModelForSequenceClassification, BloomConfig, BloomForCausalLM

from conftest import REPOSITORY
from espalier import hf
from espalier import trl as espalier_trl
from espalier.errors import Unsupported
from hf_models import make_model
from test_trl import ANSWERS, PROMPT, ROUNDING, dpo, grpo, one_step, sft, sft_without_padding, words  # noqa: F401

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
PAIRS = [{"prompt": PROMPT + " ", "chosen": chosen, "rejected": "w8 w8"} for chosen in ANSWERS]
# Metrics that TRL averages over padding, where a patched model's logits are zeros.
OVER_PADDING = {name: {"logits/chosen", "logits/rejected"} for name in ("ORPOTrainer", "CPOTrainer")}
TABLE = (REPOSITORY / "docs/compatibility.md").read_text().partition("\n## Trainers of TRL\n")[2].partition("\n## ")[0]
ROWS = dict(re.findall(r"^\| `(\w+)`[^|]*\| (same|refused)[:;, ]", TABLE, re.MULTILINE))


def kto(model, words, settings):
    rows = [{"prompt": PROMPT + " ", "completion": answer, "label": number % 2 == 0} for number, answer in enumerate(ANSWERS)]
    return trl.KTOTrainer(model, make_model("qwen3", seed=4), args=trl.KTOConfig(**settings),
                          train_dataset=datasets.Dataset.from_list(rows), processing_class=words)  # fmt: skip


def reward(model, words, settings):
    torch.manual_seed(1)
    model.config.num_labels, model.config.pad_token_id = 1, 59
    scorer = AutoModelForSequenceClassification.from_config(model.config).double().train()
    rows = [{"chosen": f"{PROMPT} {row['chosen']}", "rejected": f"{PROMPT} {row['rejected']}"} for row in PAIRS]
    return trl.RewardTrainer(scorer, trl.RewardConfig(**settings), train_dataset=datasets.Dataset.from_list(rows),
                             processing_class=words)  # fmt: skip


def sampling(name, config, home="trl", **more):
    """A trainer that samples, as GRPO's."""

    def make(model, words, settings):
        kind, config_kind = (getattr(importlib.import_module(home), each) for each in (name, config))
        rows = datasets.Dataset.from_list([{"prompt": PROMPT}] * 4)
        score = lambda completions, **_: [float(len(completion)) for completion in completions]
        arguments = config_kind(**settings, num_generations=4, max_completion_length=6, beta=0.0, **more)
        return kind(model, score, args=arguments, train_dataset=rows, processing_class=words)

    return make


def without_reference(name, config, home, **columns):
    """A trainer of pairs that needs no reference model; columns: of each pair, too."""

    def make(model, words, settings):
        kind, config_kind = (getattr(importlib.import_module(home), each) for each in (name, config))
        rows = datasets.Dataset.from_list([{**pair, **columns} for pair in PAIRS])
        return kind(model, config_kind(**settings, max_length=32), train_dataset=rows, processing_class=words)

    return make


def distillation(model, words, settings):
    rows = datasets.Dataset.from_list([{"prompt": PROMPT}] * 4)
    config = trl.DistillationConfig(**settings, max_completion_length=6)
    return trl.DistillationTrainer(model, make_model("qwen3", seed=4), args=config, train_dataset=rows, processing_class=words)


TRAINERS = {
    "SFTTrainer": [sft, sft_without_padding],
    "DPOTrainer": [dpo],
    "KTOTrainer": [kto],
    "RewardTrainer": [reward],
    "GRPOTrainer": [grpo],
    "RLOOTrainer": [sampling("RLOOTrainer", "RLOOConfig")],
    "DistillationTrainer": [distillation],
    "GMPOTrainer": [sampling("GMPOTrainer", "GMPOConfig", "trl.experimental.gmpo")],
    "ORPOTrainer": [without_reference("ORPOTrainer", "ORPOConfig", "trl.experimental.orpo")],
    "CPOTrainer": [without_reference("CPOTrainer", "CPOConfig", "trl.experimental.cpo")],
    "TPOTrainer": [without_reference("TPOTrainer", "TPOConfig", "trl.experimental.tpo", reference="w3 w4 w5")],
}


def test_a_teacher_is_patched(words, tmp_path):
    trainer = distillation(make_model("qwen3"), words, dict(output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False))
    espalier_trl.patch(trainer)
    assert hf.sharing(trainer.teacher_model).batches == 0


def test_a_teacher_that_cannot_be_patched_is_left_as_it_is(words, tmp_path):
    trainer = distillation(make_model("qwen3"), words, dict(output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False))
    trainer.teacher_model = BloomForCausalLM(BloomConfig(vocab_size=len(words), hidden_size=16, n_layer=2, n_head=2)).eval()
    with pytest.warns(UserWarning, match="teacher_model is left as it is, and encodes every row: .*bloom"):
        espalier_trl.patch(trainer)
    assert hf.sharing(trainer.model).batches == 0


def test_the_table_has_all_of_them():
    assert ROWS.keys() == TRAINERS.keys()


@pytest.mark.parametrize("name, number", [(name, number) for name, makers in TRAINERS.items() for number in range(len(makers))])
def test_a_trainer_is_as_the_table_says(name, number, words, tmp_path):
    make, trainers = TRAINERS[name][number], []

    def kept(change):
        def changed(trainer):
            trainers.append(change(trainer))
            return trainer

        return changed

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = one_step(make, words, tmp_path, kept(lambda trainer: trainer))
        if ROWS.get(name) == "refused":
            with pytest.raises(Unsupported):
                one_step(make, words, tmp_path, kept(espalier_trl.patch))
            return
        ours = one_step(make, words, tmp_path, kept(espalier_trl.patch))
    assert ours == pytest.approx(theirs, rel=ROUNDING, abs=ROUNDING) and theirs[1] > 1e-3
    lines = [next(line for line in trainer.state.log_history if "grad_norm" in line) for trainer in trainers]
    assert lines[1]["espalier/ratio"] > 1.2
    differ = {metric for metric, value in lines[0].items() if "time" not in metric and isinstance(value, float)
              and lines[1][metric] != pytest.approx(value, rel=ROUNDING, abs=ROUNDING)}  # fmt: skip
    assert differ == OVER_PADDING.get(name, set())
