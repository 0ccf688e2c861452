# SPDX-License-Identifier: Apache-2.0
"""Several sources in one step: loss and gradients of the command line against the weighted sum of plain PyTorch."""

import json

import pytest
from safetensors.torch import load_file

import objective_formulas as formulas
import torch
import transformers_reference as reference
from small_models import write_rows
from test_objectives import (STRATEGIES, expect_step, model_folder, paired_rows, rows_of_a_teacher,  # noqa: F401
                             sampled_rows)  # fmt: skip

# Of each source: objective, flags, weight, rows, formula of (rows, log-probabilities, distributions).
SOURCES = {
    "grpo": ("grpo", {"clip_high": 0.28}, 0.7, sampled_rows,
             lambda rows, p, all: formulas.policy_loss("grpo", rows, p, normalize="token", clip_high=0.28)),
    "chats": ("sft", {"normalize": "sequence"}, 1.5, lambda: sampled_rows()[2:6],
              lambda rows, p, all: -sum((c * each).sum() for c, each in zip(formulas.coefficients(rows, "sequence"), p))),
    "dpo": ("dpo", {"beta": 0.3}, 2, paired_rows, lambda rows, p, all: formulas.preference_loss("dpo", rows, p, beta=0.3)),
    "teacher": ("opd", {"ref-topk": "rest"}, 0.5, rows_of_a_teacher,
                lambda rows, p, all: formulas.opd_topk_loss(rows, all, form="rest")),
}  # fmt: skip


def write_mix(folder, names, **changes):
    folder.mkdir(exist_ok=True)
    text = ""
    for name in names:
        objective, flags, weight, make_rows, _ = SOURCES[name]
        values = {"name": name, "data": str(write_rows(folder / f"{name}.jsonl", make_rows())), "objective": objective,
                  "weight": weight, **flags, **changes.get(name, {})}  # fmt: skip
        lines = (f"{key} = {json.dumps(value)}\n" for key, value in values.items() if value is not None)
        text += "[[mix]]\n" + "".join(lines)
    (folder / "mix.toml").write_text(text)
    return folder / "mix.toml"


def train(espalier, model_folder, mix, out, *flags, steps=1, rate=1):
    return espalier("train", "--model", model_folder, "--mix", mix, "--out", out, "--dtype", "float64", "--optimizer", "sgd",
                    "--learning-rate", rate, "--max-grad-norm", 0, "--steps", steps, *flags)  # fmt: skip


@pytest.mark.parametrize("names", [("grpo", "chats"), ("dpo", "grpo"), ("grpo", "chats", "dpo", "teacher")])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_is_the_weighted_sum_of_its_sources(espalier, model_folder, tmp_path, names, strategy):
    mix = write_mix(tmp_path / "data", names)
    train(espalier, model_folder, mix, tmp_path / "run", "--strategy", strategy,
          "--token-budget", 7 if strategy == "partition" else 16)  # fmt: skip
    metrics, = reference.read_rows(tmp_path / "run" / "metrics.jsonl")
    model = reference.load_model(model_folder, torch.float64)
    with reference.norms_in_model_dtype(torch.float64):
        total = 0
        for name in names:
            *_, weight, make_rows, formula = SOURCES[name]
            rows = make_rows()
            logits = [model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1] for row in rows]
            loss = formula(rows, [reference.token_logprobs(model, row["input_ids"]) for row in rows],
                           [torch.log_softmax(each, -1) for each in logits])  # fmt: skip
            assert metrics[f"loss/{name}"] == pytest.approx(loss.item(), rel=1e-11, abs=1e-13)
            total = total + weight * loss
        gradients = reference.gradients(model, total)
    assert metrics["loss"] == pytest.approx(total.item(), rel=1e-11, abs=1e-13)
    after = load_file(tmp_path / "run/checkpoints/step_1/model.safetensors")
    expect_step(load_file(model_folder / "model.safetensors"), after, gradients)


def test_verify_proves_a_mix(espalier, model_folder, tmp_path):
    mix = write_mix(tmp_path / "data", SOURCES)
    report = json.loads(espalier("verify", "--model", model_folder, "--mix", mix, "--token-budget", 16, "--json").stdout)
    assert report["passed"] and report["grad_rel_error_max"] <= 1e-12


def test_the_run_can_be_started_again_and_resumed(espalier, model_folder, tmp_path):
    mix = write_mix(tmp_path / "data", ["grpo", "dpo"])
    train(espalier, model_folder, mix, tmp_path / "first", "--batch-size", 5, "--shuffle", "groups", "--save-every", 3,
          steps=6, rate=0.1)  # fmt: skip
    mix.unlink()  # the run has its own
    config = (tmp_path / "first/config.toml").read_text()
    assert f'mix = "{tmp_path}/first/mix.toml"' in config and "clip-high" not in config
    espalier("train", "--config", tmp_path / "first/config.toml", "--out", tmp_path / "second")
    assert (tmp_path / "first/mix.toml").read_text() == (tmp_path / "second/mix.toml").read_text()
    whole = load_file(tmp_path / "first/checkpoints/step_6/model.safetensors")
    again = load_file(tmp_path / "second/checkpoints/step_6/model.safetensors")
    assert all(torch.equal(value, again[name]) for name, value in whole.items())
    changed = (tmp_path / "first/mix.toml").read_text().replace("weight = 2.0", "weight = 3.0")
    (tmp_path / "other.toml").write_text(changed)
    result = espalier("train", "--config", tmp_path / "first/config.toml", "--mix", tmp_path / "other.toml", "--resume",
                      check=False)  # fmt: skip
    assert result.returncode == 1 and "mix" in result.stderr


def test_a_run_keeps_its_mix_or_that_it_has_none(espalier, model_folder, tmp_path):
    mix = write_mix(tmp_path / "data", ["grpo"])
    common = ["train", "--model", model_folder, "--dtype", "float64"]
    plain, mixed = [*common, "--data", tmp_path / "data/grpo.jsonl", "--shuffle", "groups"], [*common, "--mix", mix]
    for name, command in ("plain", plain), ("mixed", mixed):
        espalier(*command, "--out", tmp_path / name, "--steps", 1)
    for name, command, was, variables in (("mixed", plain, "1 source", {}),
                                          ("plain", mixed, "none", {"MALLOC_PERTURB_": "254"})):  # fmt: skip
        failed = espalier(*command, "--out", tmp_path / name, "--steps", 2, "--resume", check=False, variables=variables)
        assert failed.returncode == 1 and f"--resume: mix was {was} in the run, received" in failed.stderr, failed.stderr
        assert [folder.name for folder in (tmp_path / name / "checkpoints").iterdir()] == ["step_1"]


BAD = {
    "no weight": ({"weight": 0}, "source grpo: weight: expected a finite number above 0, received 0"),
    "a text as weight": ({"weight": "2"}, "source grpo: key `weight`: expected a number above 0, received \"2\""),
    "an unknown objective": ({"objective": "grp"}, "source grpo: --objective: expected sft, ppo"),
    "no objective": ({"objective": None}, "source grpo: expected the key `objective`, received a table without it"),
    "an unknown key": ({"clip": 1}, "source grpo: unknown key `clip`: expected name, data, weight or a flag of objectives"),
    "no data": ({"data": "none.jsonl"}, "source grpo: cannot open none.jsonl"),
    "missing fields": ({"objective": "dpo", "clip_high": None}, "source grpo: "),
    "an option of another": ({"objective": "sft", "kl_coef": 0.1}, "source grpo: --kl-coef: expected an objective"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_faults_name_the_source(espalier, model_folder, tmp_path, case):
    change, message = BAD[case]
    mix = write_mix(tmp_path / "data", ["chats", "grpo"], grpo=change)
    result = espalier("verify", "--model", model_folder, "--mix", mix, check=False)
    assert result.returncode == 1 and message in result.stderr, result.stderr


def test_data_or_a_mix(espalier, model_folder, tmp_path):
    mix = write_mix(tmp_path / "data", ["chats"])
    for flags, code, message in (([], 2, "--data is required"), (["--mix", mix, "--data", mix], 1, "cannot be combined with --data"),
                                 (["--mix", mix, "--objective", "sft"], 1, "cannot be combined with --objective")):  # fmt: skip
        result = espalier("verify", "--model", model_folder, *flags, check=False)
        assert result.returncode == code and message in result.stderr, result.stderr


@pytest.mark.parametrize("flag", ["--eval-data", "--reference-model"])
def test_what_one_objective_is_for_is_refused_beside_a_mix(espalier, model_folder, tmp_path, flag):
    mix = write_mix(tmp_path / "data", ["chats"])
    more = tmp_path / "data/chats.jsonl" if flag == "--eval-data" else model_folder
    result = espalier("train", "--model", model_folder, "--mix", mix, "--out", tmp_path / "run", flag, more, check=False)
    assert result.returncode == 1 and f"{flag}: cannot be combined with --mix" in result.stderr, result.stderr
    assert not (tmp_path / "run").exists()
