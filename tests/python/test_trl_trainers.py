# SPDX-License-Identifier: Apache-2.0
"""The table of TRL's trainers in docs/compatibility.md: one step of each, patched against unpatched.

The experimental ones come and go with every version of TRL: with another version than that of the table they are left out."""

import ast
import importlib
import re
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, BloomConfig, BloomForCausalLM

from conftest import REPOSITORY
from espalier import hf
from espalier import trl as espalier_trl
from espalier.errors import Unsupported
from hf_models import make_model
from test_trl import ROUNDING, dpo, grpo, one_step, sft, sft_without_padding, words  # noqa: F401
from trl_experimental import (ANSWERS, PROMPT, a2po, async_distillation, async_grpo, bema_dpo, gkd, gold, iw_opd, named,
                              online_dpo, sdft, sdpo, server_distillation)  # fmt: skip

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
OF_TABLE = trl.__version__.startswith("1.16.")
PAIRS = [{"prompt": PROMPT + " ", "chosen": chosen, "rejected": "w8 w8"} for chosen in ANSWERS]
# Metrics that TRL takes over padding, where a patched model's logits are zeros.
OVER_PADDING = {
    "experimental.orpo.ORPOTrainer": {"logits/chosen", "logits/rejected"},
    "experimental.cpo.CPOTrainer": {"logits/chosen", "logits/rejected"},
    "experimental.online_dpo.OnlineDPOTrainer": {"objective/entropy", "objective/kl", "objective/non_score_reward",
                                                 "objective/rlhf_reward"},
}  # fmt: skip
TABLE = (REPOSITORY / "docs/compatibility.md").read_text().partition("\n## Trainers of TRL\n")[2].partition("\n## ")[0]
ROWS = dict(re.findall(r"^\| `([\w.]+)` \| (same|refused)[:;, ]", TABLE, re.MULTILINE))


def kto(model, words, settings, home=trl):
    rows = [{"prompt": PROMPT + " ", "completion": answer, "label": number % 2 == 0} for number, answer in enumerate(ANSWERS)]
    return home.KTOTrainer(model, make_model("qwen3", seed=4), args=home.KTOConfig(**settings),
                           train_dataset=datasets.Dataset.from_list(rows), processing_class=words)  # fmt: skip


def reward(model, words, settings):
    torch.manual_seed(1)
    model.config.num_labels, model.config.pad_token_id = 1, 59
    scorer = AutoModelForSequenceClassification.from_config(model.config).double().train()
    rows = [{"chosen": f"{PROMPT} {row['chosen']}", "rejected": f"{PROMPT} {row['rejected']}"} for row in PAIRS]
    return trl.RewardTrainer(scorer, trl.RewardConfig(**settings), train_dataset=datasets.Dataset.from_list(rows),
                             processing_class=words)  # fmt: skip


def sampling(kind, config, **more):
    """A trainer that samples, as GRPO's."""

    def make(model, words, settings):
        rows = datasets.Dataset.from_list([{"prompt": PROMPT}] * 4)
        score = lambda completions, **_: [float(len(completion)) for completion in completions]
        arguments = config(**settings, num_generations=4, max_completion_length=6, beta=0.0, **more)
        return kind(model, score, args=arguments, train_dataset=rows, processing_class=words)

    return make


def without_reference(home, **columns):
    """A trainer of pairs that needs no reference model; columns: of each pair, too."""

    def make(model, words, settings):
        kind, config = (named(f"{home}.{home.upper()}{what}") for what in ("Trainer", "Config"))
        rows = datasets.Dataset.from_list([{**pair, **columns} for pair in PAIRS])
        return kind(model, config(**settings, max_length=32), train_dataset=rows, processing_class=words)

    return make


def distillation(model, words, settings, home=trl):
    rows = datasets.Dataset.from_list([{"prompt": PROMPT}] * 4)
    config = home.DistillationConfig(**settings, max_completion_length=6)
    return home.DistillationTrainer(model, make_model("qwen3", seed=4), args=config, train_dataset=rows, processing_class=words)


def in_experimental(make, name):
    """The same by a class of that name which trl.experimental has as well."""
    return lambda *arguments: make(*arguments, home=importlib.import_module(f"trl.experimental.{name}"))


TRAINERS = {
    "SFTTrainer": [sft, sft_without_padding],
    "DPOTrainer": [dpo],
    "KTOTrainer": [kto],
    "RewardTrainer": [reward],
    "GRPOTrainer": [grpo],
    "RLOOTrainer": [sampling(trl.RLOOTrainer, trl.RLOOConfig)],
    "DistillationTrainer": [distillation],
    "experimental.a2po.A2POTrainer": [a2po],
    "experimental.async_distillation.AsyncDistillationTrainer": [async_distillation],
    "experimental.async_grpo.AsyncGRPOTrainer": [async_grpo],
    "experimental.bema_for_ref_model.DPOTrainer": [bema_dpo],
    "experimental.cpo.CPOTrainer": [without_reference("cpo")],
    "experimental.distillation.DistillationTrainer": [in_experimental(distillation, "distillation")],
    "experimental.gkd.GKDTrainer": [gkd(0.0), gkd(1.0)],
    "experimental.gmpo.GMPOTrainer": [sampling(named("gmpo.GMPOTrainer"), named("gmpo.GMPOConfig"))],
    "experimental.gold.GOLDTrainer": [gold(0.0), gold(1.0), gold(0.0, use_uld_loss=True)],
    "experimental.iw_opd.IWOPDTrainer": [iw_opd(1.0), iw_opd(0.0, distillation_objective="jsd", beta=0.5, loss_top_k=0)],
    "experimental.kto.KTOTrainer": [in_experimental(kto, "kto")],
    "experimental.online_dpo.OnlineDPOTrainer": [online_dpo],
    "experimental.orpo.ORPOTrainer": [without_reference("orpo")],
    "experimental.sdft.SDFTTrainer": [sdft],
    "experimental.sdpo.SDPOTrainer": [sdpo(), sdpo(distillation_weight=0.0)],
    "experimental.server_distillation.ServerDistillationTrainer": [server_distillation],
    "experimental.tpo.TPOTrainer": [without_reference("tpo", reference="w3 w4 w5")],
}  # fmt: skip


def trainers_of(package):
    """The names of all trainers in the sources of TRL, those of trl.experimental with their package."""
    found = set()
    for file in package.rglob("*.py"):
        folders = file.relative_to(package).parts[:-1]
        home = ".".join(folders) + "." if folders[:1] == ("experimental",) else ""
        classes = (node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef))
        found |= {home + name for name in classes if name.endswith("Trainer") and not name.startswith("_")}
    return found


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


@pytest.mark.skipif(not OF_TABLE, reason="the table is that of TRL 1.16")
def test_the_table_has_all_of_them():
    """Those of the TRL that is installed: a new one is to be tried."""
    assert trainers_of(Path(trl.__file__).parent) == ROWS.keys() == TRAINERS.keys()


def test_a_trainer_that_the_table_lacks_is_found(tmp_path):
    """Negative control."""
    (tmp_path / "experimental" / "new").mkdir(parents=True)
    (tmp_path / "experimental" / "new" / "new_trainer.py").write_text("class NewTrainer(_BaseTrainer):\n    pass\n")
    assert trainers_of(tmp_path) == {"experimental.new.NewTrainer"}


@pytest.mark.parametrize("name, number", [(name, number) for name, makers in TRAINERS.items() for number in range(len(makers))])
def test_a_trainer_is_as_the_table_says(name, number, words, tmp_path):
    if not OF_TABLE and name.startswith("experimental."):
        pytest.skip("the table is that of TRL 1.16")
    make, trainers, said = TRAINERS[name][number], [], []

    def kept(change):
        def changed(trainer):
            trainers.append(trainer)
            return change(trainer)

        return changed

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if ROWS.get(name) == "refused":
            with pytest.raises(Unsupported, match=name.split(".")[-1]):
                one_step(make, words, tmp_path, kept(espalier_trl.patch))
            assert len(trainers) == 1 and not hasattr(trainers[0].model, "_espalier")
            return
        theirs = one_step(make, words, tmp_path, kept(lambda trainer: trainer))
        ours = one_step(make, words, tmp_path, kept(espalier_trl.patch))
        said = [str(warning.message) for warning in caught]
    assert ours == pytest.approx(theirs, rel=ROUNDING, abs=ROUNDING) and theirs[1] > 1e-3
    lines = [next(line for line in trainer.state.log_history if "grad_norm" in line) for trainer in trainers]
    assert lines[1]["espalier/ratio"] > 1.2
    differ = {metric for metric, value in lines[0].items() if not depends_on_time(metric) and isinstance(value, float)
              and lines[1][metric] != pytest.approx(value, rel=ROUNDING, abs=ROUNDING, nan_ok=True)}  # fmt: skip
    assert differ == OVER_PADDING.get(name, set())
    warned = [each for each in said if "padding" in each and each.startswith("espalier.trl")]
    assert len(warned) == (1 if differ else 0) and all(metric in warned[0] for metric in differ)


def depends_on_time(metric):
    return "time" in metric or metric.startswith("perf/")
