# SPDX-License-Identifier: Apache-2.0
"""Every objective: loss and gradients of the command line against plain PyTorch through Transformers, and the same formulas
against TRL."""

import json
import math
import random
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import objective_formulas as formulas
import transformers_reference as reference
from conftest import seed_of
from espalier import Engine
from small_models import MODELS, write_rows

OBJECTIVES = ["sft", "ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "reinforce", "opd", "dpo", "ipo", "kto", "simpo", "orpo"]
STRATEGIES = ["partition", "tree-packing", "sequence-packing"]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, espalier):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODELS["qwen3"]))
    espalier("init", "--config", folder / "config.json", "--out", folder / "model", "--seed", seed_of(3),
             "--dtype", "float64")  # fmt: skip
    return folder / "model"


def sampled_rows():
    """Two groups that share a system prompt, in which trained tokens are shared by answers with different rewards."""
    rng = random.Random(seed_of(5))
    tokens = lambda n: [rng.randrange(61) for _ in range(n)]
    system = tokens(4)
    rows = []
    for group in range(2):
        prompt = system + tokens(3)
        begun = tokens(3)  # by both of the answers below
        for answer in (begun + tokens(4), begun + tokens(2), tokens(5), begun):
            ids = prompt + answer
            mask = [0] * len(prompt) + [1] * len(answer)
            if len(answer) > 5:
                mask[-3] = 0  # two turns
            row = {"input_ids": ids, "loss_mask": mask, "group_id": f"g{group}", "reward": rng.uniform(-1, 2)}
            row["ref_logprobs"] = [0.0] + [rng.uniform(-6, -2) for _ in ids[1:]]
            if len(rows) % 4 != 2:
                row["logprobs"] = [None] + [rng.uniform(-6, -2) for _ in ids[1:]]
            rows.append(row)
    return rows


def rows_with_turn_rewards():
    rows = sampled_rows()
    rng = random.Random(seed_of(7))
    for row in rows:
        del row["reward"]
        row["turn_rewards"] = [rng.uniform(-1, 2) for _ in range(formulas.turns_of(row)[-1] + 1)]
    return rows


def rows_of_a_teacher():
    """Rows that share trained tokens, and have other teachers' tokens there."""
    rows = sampled_rows()
    rng = random.Random(seed_of(8))
    for row in rows:
        ids = row["input_ids"]
        row["ref_topk_ids"] = [[], *(rng.sample(range(61), 3) for _ in ids[1:])]
        row["ref_topk_logprobs"] = [[], *([rng.uniform(-4, -1.2) for _ in range(3)] for _ in ids[1:])]
    return rows


def paired_rows():
    """Pairs that share prompts, and trained tokens."""
    rng = random.Random(seed_of(6))
    tokens = lambda n: [rng.randrange(61) for _ in range(n)]
    system = tokens(4)
    rows = []
    for pair in range(3):
        prompt = system + tokens(2) if pair < 2 else rows[0]["input_ids"][:6]  # two pairs of one prompt
        begun = tokens(2)
        for chosen, answer in ((pair % 2 == 0, begun + tokens(3)), (pair % 2 == 1, begun + tokens(4))):
            ids = prompt + answer
            rows.append({"input_ids": ids, "loss_mask": [0] * len(prompt) + [1] * len(answer), "pair_id": f"p{pair}",
                         "chosen": chosen, "ref_logprobs": [0.0] + [rng.uniform(-6, -2) for _ in ids[1:]]})  # fmt: skip
    return rows


def labelled_rows():
    """For kto: pairs without their names, and two rows that only estimate the reference point."""
    rows = paired_rows()
    for row in rows:
        del row["pair_id"]
    free = [{key: value for key, value in row.items() if key != "chosen"} for row in rows[:2]]
    for row in free:
        row["ref_logprobs"] = [value - 3 for value in row["ref_logprobs"]]
        row["ref_logprobs"][0] = 0.0
    return rows + free


def policy(kind, **options):
    return lambda rows, logprobs: formulas.policy_loss(kind, rows, logprobs, **options)


# Name of the case: flags, rows, formula.
CASES = {
    "ppo": ([], sampled_rows, policy("ppo", normalize="token")),
    "grpo-of-the-paper": (["--normalize", "sequence", "--kl-coef", 0.04, "--dual-clip", 3], sampled_rows,
                          policy("grpo", normalize="sequence", kl_coef=0.04, dual_clip=3)),
    "grpo-group": (["--normalize", "group", "--turn-discount", 0.5, "--kl-coef", 0.1, "--kl-estimator", "k2"], sampled_rows,
                   policy("grpo", normalize="group", discount=0.5, kl_coef=0.1, kl_estimator="k2")),
    "dr_grpo": ([], sampled_rows, policy("dr_grpo", normalize="sequence-sum", scale=False)),
    "dr_grpo-constant": (["--normalize", 64], sampled_rows, policy("dr_grpo", normalize=64, scale=False)),
    "dapo": ([], sampled_rows, policy("dapo", normalize="token", clip_high=0.28)),
    "grpo-turn-rewards": (["--turn-discount", 0.5], rows_with_turn_rewards, policy("grpo", normalize="token", discount=0.5)),
    "reinforce-turn-rewards": ([], rows_with_turn_rewards, policy("reinforce", normalize="sequence-sum",
                                                                  baseline="leave-one-out", scale=False)),
    "gspo": (["--clip-low", 0.3, "--clip-high", 0.4], sampled_rows,
             policy("gspo", normalize="sequence", clip_low=0.3, clip_high=0.4)),
    "cispo": ([], sampled_rows, policy("cispo", normalize="token", clip_low=1, clip_high=4)),
    "reinforce": ([], sampled_rows, policy("reinforce", normalize="sequence-sum", baseline="leave-one-out", scale=False)),
    "reinforce-truncated": (["--importance-weights", "truncate", "--baseline", "none"], sampled_rows,
                            policy("reinforce", normalize="sequence-sum", baseline="none", scale=False,
                                   weights="truncate")),
    "grpo-masked": (["--importance-weights", "mask", "--importance-level", "sequence", "--importance-cap", 1e6,
                     "--importance-floor", 0], sampled_rows,
                    policy("grpo", normalize="token", weights="mask", level="sequence", cap=1e6, floor=0)),
    "opd": ([], sampled_rows, formulas.opd_loss),
    "dpo": ([], paired_rows, lambda rows, p: formulas.preference_loss("dpo", rows, p, beta=0.1)),
    "ipo": (["--beta", 0.3], paired_rows, lambda rows, p: formulas.preference_loss("ipo", rows, p, beta=0.3)),
    "simpo": ([], paired_rows, lambda rows, p: formulas.preference_loss("simpo", rows, p, beta=2.0, margin=1.0)),
    "orpo": ([], paired_rows, lambda rows, p: formulas.preference_loss("orpo", rows, p, beta=0.1)),
    "kto": (["--chosen-weight", 1.5], labelled_rows,
            lambda rows, p: formulas.kto_loss(rows, p, beta=0.1, chosen_weight=1.5)),
    "kto-own-point": ([], lambda: labelled_rows()[:-2], lambda rows, p: formulas.kto_loss(rows, p, beta=0.1)),
}  # fmt: skip


def objective_of(case):
    return case.partition("-")[0]


def train(espalier, model_folder, rows, out, objective, flags, steps=1, budget=16):
    data = write_rows(out.with_suffix(".jsonl"), rows)
    espalier("train", "--model", model_folder, "--data", data, "--out", out, "--dtype", "float64", "--objective", objective,
             *flags, "--token-budget", budget, "--optimizer", "sgd", "--learning-rate", 1 if steps == 1 else 0.05,
             "--max-grad-norm", 0, "--steps", steps, "--no-calibration")  # fmt: skip
    return reference.read_rows(out / "metrics.jsonl"), load_file(out / f"checkpoints/step_{steps}/model.safetensors")


def expect_step(before, after, gradients):
    everything = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    for name, gradient in gradients.items():
        step = before[name] - after[name]
        rounding = torch.finfo(torch.float64).eps * before[name].norm()
        error = max((step - gradient).norm() - rounding, 0)
        assert error <= 1e-12 * max(gradient.norm(), 1e-6 * everything), name


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", CASES)
def test_one_step_is_the_gradient_of_the_formula(espalier, model_folder, tmp_path, case, strategy):
    flags, make_rows, formula = CASES[case]
    rows = make_rows()
    metrics, after = train(espalier, model_folder, rows, tmp_path / "run", objective_of(case),
                           [*flags, "--strategy", strategy], budget=7 if strategy == "partition" else 16)  # fmt: skip
    model = reference.load_model(model_folder, torch.float64)
    with reference.norms_in_model_dtype(torch.float64):
        loss = formula(rows, [reference.token_logprobs(model, row["input_ids"]) for row in rows])
        gradients = reference.gradients(model, loss)
    assert metrics[0]["loss"] == pytest.approx(loss.item(), rel=1e-11, abs=1e-13)
    expect_step(load_file(model_folder / "model.safetensors"), after, gradients)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_answers_of_which_the_model_is_certain(tmp_path, dtype):
    """Every objective has a finite loss and gradient where log-probabilities round to 0, and where they are thousands below."""
    torch.manual_seed(seed_of(9))
    model = LlamaForCausalLM(LlamaConfig(vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                         num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2))  # fmt: skip
    with torch.no_grad():
        model.lm_head.weight.mul_(2000)
        logits = model(input_ids=torch.tensor([[5, 6, 7, 8]])).logits[0, -1].double()
    model.save_pretrained(tmp_path)
    logprobs, ends = logits.log_softmax(-1), (int(logits.argmax()), int(logits.argmin()))
    assert logprobs[ends[0]] > -1e-30 and logprobs[ends[1]] < -1000
    engine = Engine(tmp_path, dtype=dtype)
    for first, second in ((0, 1), (1, 0), (0, 0), (1, 1)):
        rows = [{"input_ids": [5, 6, 7, 8, ends[end]], "loss_mask": [0, 0, 0, 0, 1], "pair_id": "p", "chosen": number == 0,
                 "group_id": "g", "reward": float(number == 0)} for number, end in enumerate((first, second))]  # fmt: skip
        # On policy, and of a reference that is as certain of the other answer.
        scores = engine.logprobs(rows)
        for number, row in enumerate(rows):
            row["logprobs"] = np.minimum(scores[number].astype(float), 0)
            row["ref_logprobs"] = [0.0] * 4 + [min(float(scores[1 - number][-1]), 0.0)]
        for objective in OBJECTIVES:
            metrics = engine.forward_backward(rows, objective)
            assert all(math.isfinite(value) for value in metrics.values()), (objective, first, second, metrics)
            engine.zero_gradients()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", ["grpo", "dual-clip", "gspo"])
def test_clipped_terms_have_no_gradient_however_large_their_ratio(espalier, model_folder, tmp_path, case, dtype):
    """Ratios of e^700 and more, which no float64 holds, train as those of e^20 do: not at all."""
    flags = {"grpo": ["--objective", "grpo"], "dual-clip": ["--objective", "grpo", "--dual-clip", 3],
             "gspo": ["--objective", "gspo"]}[case]  # fmt: skip
    results = []
    for behaviour in (-40, -720, -1e4, -1e300):
        rows = sampled_rows()
        for index, row in enumerate(rows):
            if index % 4 == 2:
                continue  # has none
            advantage = {"grpo": 1.5, "gspo": 1.5, "dual-clip": -1.5}[case]
            row |= {"logprobs": [None] + [behaviour] * (len(row["input_ids"]) - 1), "advantage": advantage}
        for row in rows:
            row.setdefault("advantage", 0.5)
            del row["reward"]
        out = tmp_path / f"run{behaviour}"
        data = write_rows(out.with_suffix(".jsonl"), rows)
        common = ["--model", model_folder, "--data", data, *flags, "--token-budget", 16, "--dtype", dtype, "--no-calibration"]
        espalier("train", *common, "--out", out, "--optimizer", "sgd", "--learning-rate", 0.1, "--steps", 2)
        results.append(([(line["loss"], line["grad_norm"], line["clip_fraction"])
                         for line in reference.read_rows(out / "metrics.jsonl")],
                        load_file(out / "checkpoints/step_2/model.safetensors")))  # fmt: skip
        report = json.loads(espalier("verify", *common, "--json").stdout)
        assert report["passed"]
    (metrics, weights), *others = results
    assert all(grad_norm > 0 and clip_fraction > 0.5 for _, grad_norm, clip_fraction in metrics)
    for other_metrics, other_weights in others:
        assert other_metrics == metrics
        assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


def test_an_error_names_the_ratio_that_nothing_clips(espalier, model_folder, tmp_path):
    logprobs = [None, -1, -800, -800]
    rows = [{"input_ids": [1, 2, 3, 4], "trajectory_id": "clipped", "logprobs": logprobs, "advantage": 1},
            {"input_ids": [1, 2, 5, 6], "trajectory_id": "unbounded", "logprobs": logprobs, "advantage": -1}]
    done = espalier("train", "--model", model_folder, "--data", write_rows(tmp_path / "rows.jsonl", rows), "--objective",
                    "grpo", "--out", tmp_path / "run", "--steps", 1, check=False)  # fmt: skip
    assert done.returncode == 1
    assert "expected finite numbers; token 2 of trajectory `unbounded` (row 1) has log-probability" in done.stderr
    assert "but `logprobs` of the data say -800: a policy ratio of inf" in done.stderr


def test_the_comparison_notices_another_advantage(espalier, model_folder, tmp_path):
    """Negative control: the same formula with another baseline."""
    rows = sampled_rows()
    metrics, _ = train(espalier, model_folder, rows, tmp_path / "run", "reinforce", [])
    model = reference.load_model(model_folder, torch.float64)
    with reference.norms_in_model_dtype(torch.float64), torch.no_grad():
        loss = formulas.policy_loss("reinforce", rows, [reference.token_logprobs(model, row["input_ids"]) for row in rows],
                                    normalize="sequence-sum", baseline="mean", scale=False)  # fmt: skip
    assert abs(metrics[0]["loss"] - loss.item()) > 1e-4


@pytest.mark.parametrize("entropy", [0, 0.05])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("form", ["rest", "renormalize"])
def test_distillation_over_the_teachers_tokens(espalier, model_folder, tmp_path, form, strategy, entropy):
    rows = rows_of_a_teacher()
    metrics, after = train(espalier, model_folder, rows, tmp_path / "run", "opd",
                           ["--ref-topk", form, "--strategy", strategy, "--entropy-coef", entropy],
                           budget=7 if strategy == "partition" else 16)  # fmt: skip
    model = reference.load_model(model_folder, torch.float64)
    with reference.norms_in_model_dtype(torch.float64):
        logits = [model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1] for row in rows]
        loss = formulas.opd_topk_loss(rows, [torch.log_softmax(each, -1) for each in logits], form=form)
        plain = loss.item()
        if entropy:
            loss = loss + formulas.entropy_bonus(rows, entropies_of(model, rows), entropy, "token")
        gradients = reference.gradients(model, loss)
    assert metrics[0]["loss"] == pytest.approx(loss.item(), rel=1e-11, abs=1e-13)
    assert metrics[0]["reverse_kl"] == pytest.approx(plain, rel=1e-11)  # the weights are all 1
    assert 0 < metrics[0]["topk_mass"] < 1
    expect_step(load_file(model_folder / "model.safetensors"), after, gradients)


@pytest.mark.parametrize("form", ["rest", "renormalize"])
def test_verify_proves_distillation_over_the_teachers_tokens(espalier, model_folder, tmp_path, form):
    data = write_rows(tmp_path / "rows.jsonl", rows_of_a_teacher())
    result = espalier("verify", "--model", model_folder, "--data", data, "--objective", "opd", "--ref-topk", form,
                      "--token-budget", 16, "--json")  # fmt: skip
    report = json.loads(result.stdout)
    assert report["passed"] and report["grad_rel_error_max"] <= 1e-12 and report["loss_rel_error"] <= 1e-12


def entropies_of(model, rows):
    logits = [model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1] for row in rows]
    return [torch.distributions.Categorical(logits=each).entropy() for each in logits]


@pytest.mark.parametrize("case, normalize", [("ppo", "token"), ("gspo", "sequence"), ("dpo", "sequence-sum")])
def test_the_entropy_bonus_is_that_of_the_distributions(espalier, model_folder, tmp_path, case, normalize):
    flags, make_rows, formula = CASES[case]
    rows = make_rows()
    metrics, after = train(espalier, model_folder, rows, tmp_path / "run", objective_of(case),
                           [*flags, "--entropy-coef", 0.05])  # fmt: skip
    model = reference.load_model(model_folder, torch.float64)
    with reference.norms_in_model_dtype(torch.float64):
        entropies = entropies_of(model, rows)
        loss = formula(rows, [reference.token_logprobs(model, row["input_ids"]) for row in rows])
        loss = loss + formulas.entropy_bonus(rows, entropies, 0.05, normalize)
        gradients = reference.gradients(model, loss)
    assert metrics[0]["loss"] == pytest.approx(loss.item(), rel=1e-11)
    with_loss = torch.cat([h[formulas.weights_of(row) > 0] for row, h in zip(rows, entropies)])
    assert metrics[0]["entropy"] == pytest.approx(with_loss.mean().item(), rel=1e-11)
    expect_step(load_file(model_folder / "model.safetensors"), after, gradients)


@pytest.mark.parametrize("case", ["dapo", "gspo", "kto", "dpo"])
def test_several_steps_are_those_of_plain_training(espalier, model_folder, tmp_path, case):
    flags, make_rows, formula = CASES[case]
    rows = make_rows()
    metrics, after = train(espalier, model_folder, rows, tmp_path / "run", objective_of(case), flags, steps=4)
    model = reference.load_model(model_folder, torch.float64)
    with reference.norms_in_model_dtype(torch.float64):
        for step in range(4):
            loss = formula(rows, [reference.token_logprobs(model, row["input_ids"]) for row in rows])
            assert metrics[step]["loss"] == pytest.approx(loss.item(), rel=1e-9, abs=1e-12)
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()))):
                    parameter -= 0.05 * gradient
    for name, value in model.named_parameters():
        assert (after[name] - value).norm() <= 1e-10 * value.norm(), name


@pytest.mark.parametrize("objective", ["grpo", "gspo", "cispo", "reinforce"])
@pytest.mark.parametrize("normalize", ["token", "sequence", "sequence-sum", "group"])
def test_copies_are_a_weight(espalier, model_folder, tmp_path, objective, normalize):
    """K copies of all rows are K times the weight: the means stay what they are."""
    rows = sampled_rows()
    for row in rows:
        row["advantage"] = row.pop("reward")
    flags = ["--normalize", normalize, "--strategy", "partition"]
    once = train(espalier, model_folder, rows, tmp_path / "once", objective, flags)
    thrice = train(espalier, model_folder, rows * 3, tmp_path / "thrice", objective, flags)
    assert once[0][0]["loss"] == pytest.approx(thrice[0][0]["loss"], rel=1e-11)
    assert once[0][0]["tree_tokens"] == thrice[0][0]["tree_tokens"]
    for name, value in once[1].items():
        assert (value - thrice[1][name]).norm() <= 1e-11 * value.norm(), name


@pytest.mark.parametrize("objective", ["sft", "dapo", "cispo", "reinforce"])
def test_copies_of_a_row_are_its_weight(espalier, model_folder, tmp_path, objective):
    rows = sampled_rows()
    for row in rows:
        row["advantage"] = row.pop("reward")
    weighted = [dict(row) for row in rows]
    weighted[1]["loss_weights"] = [3 * weight for weight in weighted[1].pop("loss_mask")]
    flags = ["--normalize", "token", "--strategy", "partition"]
    copied = train(espalier, model_folder, [*rows, rows[1], rows[1]], tmp_path / "copied", objective, flags)
    heavy = train(espalier, model_folder, weighted, tmp_path / "heavy", objective, flags)
    assert copied[0][0]["loss"] == pytest.approx(heavy[0][0]["loss"], rel=1e-11)
    for name, value in copied[1].items():
        assert (value - heavy[1][name]).norm() <= 1e-11 * value.norm(), name


# ---- Bad input -----------------------------------------------------------------------------------------------------


def without(rows, field):
    return [{key: value for key, value in row.items() if key != field} for row in rows]


@pytest.mark.parametrize("objective, rows, flags, message", [
    ("dpo", lambda: paired_rows()[:-1], [], "pair p2: expected a chosen and a rejected trajectory, received row 4 alone"),
    ("dpo", lambda: without(paired_rows(), "ref_logprobs"), [], "objective dpo expects `ref_logprobs`; received none"),
    ("simpo", lambda: without(paired_rows(), "pair_id"), [], "a preference expects `pair_id` and `chosen`"),
    ("kto", lambda: without(labelled_rows(), "chosen"), [], "objective kto expects `chosen`; received none"),
    ("grpo", lambda: without(sampled_rows(), "reward"), [], "received none of them"),
    ("grpo", lambda: without(sampled_rows(), "group_id"), [], "received `reward` without `group_id`"),
    ("opd", sampled_rows, ["--ref-topk", "rest"], "opd with ref-topk rest expects `ref_topk_ids`"),
    ("sft", sampled_rows, ["--ref-topk", "rest"], "ref-topk: expected objective opd, received sft"),
    ("grpo", lambda: without(sampled_rows(), "ref_logprobs"), ["--kl-coef", 0.1], "expects `ref_logprobs`; received none"),
    ("gspo", lambda: without(sampled_rows(), "logprobs"), ["--importance-weights", "mask"], "expects `logprobs`"),
    ("dpo", paired_rows, ["--normalize", "token"], "normalize: objective dpo expects sequence-sum or a number"),
    ("sft", paired_rows, ["--kl-coef", 0.1], "kl-coef: expected an objective with advantages"),
])  # fmt: skip
def test_rows_that_an_objective_cannot_use_are_refused(espalier, model_folder, tmp_path, objective, rows, flags, message):
    data = write_rows(tmp_path / "rows.jsonl", rows())
    failed = espalier("train", "--model", model_folder, "--data", data, "--out", tmp_path / "run", "--objective", objective,
                      *flags, "--steps", 1, check=False)  # fmt: skip
    assert failed.returncode == 1 and message in failed.stderr, failed.stderr
    assert not (tmp_path / "run/checkpoints").exists()


def test_rewards_without_a_signal_are_a_warning(espalier, model_folder, tmp_path):
    rows = sampled_rows()
    for row in rows:
        row["reward"] = 1.0
    data = write_rows(tmp_path / "rows.jsonl", rows)
    done = espalier("train", "--model", model_folder, "--data", data, "--out", tmp_path / "run", "--objective", "grpo",
                    "--steps", 1)  # fmt: skip
    assert "warning: all advantages are 0: objective grpo trains nothing" in done.stderr
    metrics = reference.read_rows(tmp_path / "run/metrics.jsonl")[0]
    assert metrics["groups"] == metrics["groups_without_signal"] == 2 and metrics["reward_std"] == 0
    rows[0]["reward"], rows[1]["group_id"] = 2.0, "alone"
    data = write_rows(tmp_path / "rows.jsonl", rows)
    done = espalier("verify", "--model", model_folder, "--data", data, "--objective", "grpo")
    assert "warning: 1 of 3 groups has only one trajectory" in done.stderr
    assert "warning: 2 of 3 groups have no signal" in done.stderr


# ---- TRL -----------------------------------------------------------------------------------------------------------


def padded(values, length):
    return torch.stack([torch.cat([v, torch.zeros(length - len(v), dtype=torch.float64)]) for v in values])


def random_logprobs(rows):
    generator = torch.Generator().manual_seed(seed_of(8))
    return [-0.5 - 3 * torch.rand(len(row["input_ids"]) - 1, generator=generator, dtype=torch.float64) for row in rows]


def single_process():
    accelerator = MagicMock()
    accelerator.gather = accelerator.gather_for_metrics = lambda value: value
    accelerator.reduce = lambda value, reduction: value
    accelerator.device, accelerator.num_processes = torch.device("cpu"), 1
    return accelerator


def outputs_of(logprobs, mask):
    """Of a model as TRL patches it; all but the log-probabilities is for its metrics."""
    zeros = torch.zeros_like(mask)
    return SimpleNamespace(log_probs=logprobs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool(), aux_loss=None)


@pytest.mark.parametrize("loss_type, level, case", [
    ("grpo", "token", policy("grpo", normalize="sequence", kl_coef=0.04, dual_clip=3)),
    ("dapo", "token", policy("dapo", normalize="token", clip_high=0.28, kl_coef=0.04)),
    ("grpo", "sequence", policy("gspo", normalize="sequence")),
    ("cispo", "token", policy("cispo", normalize="token", clip_low=1, clip_high=4, kl_coef=0.04)),
    ("dr_grpo", "token", policy("dr_grpo", normalize=8 * 9, kl_coef=0.04)),
])  # fmt: skip
def test_policy_gradients_are_those_of_trl(loss_type, level, case):
    trl = pytest.importorskip("trl")
    rows = sampled_rows()
    logprobs = random_logprobs(rows)
    for row, p in zip(rows, logprobs):
        row["logprobs"] = [None] + (p + 0.5 * torch.randn_like(p)).tolist()
    for row in rows:  # one stretch of loss, the end
        first = row["loss_mask"].index(1)
        row["loss_mask"] = [0] * first + [1] * (len(row["input_ids"]) - first)
    begins = [row["loss_mask"].index(1) for row in rows]
    longest = max(len(row["input_ids"]) - begin for row, begin in zip(rows, begins))
    of_completions = lambda values: padded([v[begin - 1:] for v, begin in zip(values, begins)], longest)
    mask = of_completions([formulas.weights_of(row) for row in rows])
    clip_high = {"dapo": 0.28, "cispo": 5.0}.get(loss_type, 0.2)  # of cispo TRL's is the bound itself
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (of_completions(logprobs), torch.zeros_like(mask), None),
        accelerator=single_process(), model=SimpleNamespace(training=True), _metrics=MagicMock(), aux_loss_enabled=False,
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level=level, loss_type=loss_type,
        beta=0.0 if level == "sequence" else 0.04, epsilon_low=0.2, epsilon_high=clip_high, use_vllm=False,
        args=SimpleNamespace(delta=3.0 if (loss_type, level) == ("grpo", "token") else None, use_bias_correction_kl=False),
        current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False, max_completion_length=9)  # fmt: skip
    trainer.args.steps_per_generation = 1
    inputs = {
        "prompt_ids": torch.zeros(len(rows), 1), "prompt_mask": torch.ones(len(rows), 1),
        "completion_ids": torch.zeros_like(mask), "completion_mask": mask,
        "advantages": torch.stack([a[0] for a in formulas.advantages(rows)]),
        "old_per_token_logps": of_completions([formulas.tensor(row["logprobs"][1:]) for row in rows]),
        "ref_per_token_logps": of_completions([formulas.tensor(row["ref_logprobs"][1:]) for row in rows]),
        "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    trl_loss = trl.GRPOTrainer._compute_loss(trainer, None, inputs)
    assert trl_loss.item() == pytest.approx(case(rows, logprobs).item(), rel=1e-12)


def sides_of(rows, logprobs):
    """Log-probabilities and masks [rows, longest], chosen rows first, then the rejected ones in the same order of pairs."""
    pairs = sorted({row["pair_id"] for row in rows})
    order = [next(i for i, row in enumerate(rows) if row["pair_id"] == pair and row["chosen"] == side)
             for side in (True, False) for pair in pairs]  # fmt: skip
    longest = max(len(p) for p in logprobs)
    of = lambda values: padded([values[i] for i in order], longest)
    mask = of([formulas.weights_of(row) for row in rows])
    reference_logprobs = of([formulas.tensor(row["ref_logprobs"][1:]) for row in rows])
    return of(logprobs) * mask, mask, (reference_logprobs * mask).sum(1)


@pytest.mark.parametrize("kind, loss_type, beta", [("dpo", "sigmoid", 0.1), ("ipo", "ipo", 0.3)])
def test_pairs_are_those_of_trl(kind, loss_type, beta):
    trl = pytest.importorskip("trl")
    rows = paired_rows()
    logprobs = random_logprobs(rows)
    ours = formulas.preference_loss(kind, rows, logprobs, beta=beta)
    of_tokens, mask, of_reference = sides_of(rows, logprobs)
    whole_mask = torch.cat([torch.zeros(len(rows), 1), mask], 1)
    outputs = outputs_of(of_tokens, mask)
    trainer = MagicMock()
    trainer.configure_mock(
        accelerator=single_process(), model=SimpleNamespace(training=True), aux_loss_enabled=False, ld_alpha=None,
        precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=[loss_type], loss_weights=[1.0], beta=beta,
        use_weighting=False, label_smoothing=0.0, _total_train_tokens=0, _tp_size=1)  # fmt: skip
    chosen, rejected = of_reference.chunk(2)
    inputs = {"input_ids": torch.zeros_like(whole_mask).long(), "attention_mask": torch.ones_like(whole_mask).long(),
              "completion_mask": whole_mask, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}  # fmt: skip
    theirs = trl.DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    assert theirs.item() == pytest.approx(ours.item(), rel=1e-12)


def test_single_trajectories_are_those_of_trl():
    trl = pytest.importorskip("trl")
    rows = labelled_rows()
    logprobs = random_logprobs(rows)
    for row, p in zip(rows[-2:], logprobs[-2:]):
        row["ref_logprobs"] = [0.0] + (p - 0.3).tolist()
    ours = formulas.kto_loss(rows, logprobs, beta=0.1, chosen_weight=1.5)
    labelled = rows[:-2]
    longest = max(len(p) for p in logprobs)
    mask = padded([formulas.weights_of(row) for row in labelled], longest)
    sums = [(formulas.weights_of(row) * p).sum() for row, p in zip(rows, logprobs)]
    references = [(formulas.weights_of(row) * formulas.tensor(row["ref_logprobs"][1:])).sum() for row in rows]
    outputs = outputs_of(padded(logprobs[:-2], longest) * mask, mask)
    trainer = MagicMock()
    trainer.configure_mock(
        accelerator=single_process(), model=SimpleNamespace(training=True), aux_loss_enabled=False, loss_type="kto", beta=0.1,
        precompute_ref_logps=True, calculate_KL=True, desirable_weight=1.5, undesirable_weight=1.0, _total_train_tokens=0,
        _tp_size=1)  # fmt: skip
    trainer._compute_kl_logps = lambda *_: torch.stack(sums[-2:])
    whole_mask = torch.cat([torch.zeros(len(labelled), 1), mask], 1)
    inputs = {"input_ids": torch.zeros_like(whole_mask).long(), "attention_mask": torch.ones_like(whole_mask).long(),
              "completion_mask": whole_mask, "label": torch.tensor([row["chosen"] for row in labelled]),
              "ref_logps": torch.stack(references[:-2]), "ref_KL_logps": torch.stack(references[-2:])}  # fmt: skip
    theirs = trl.KTOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    assert theirs.item() == pytest.approx(ours.item(), rel=1e-12)


def test_orpo_and_simpo_are_those_of_trl():
    orpo = pytest.importorskip("trl.experimental.orpo")
    cpo = pytest.importorskip("trl.experimental.cpo")
    rows = paired_rows()
    logprobs = random_logprobs(rows)
    of_tokens, mask, _ = sides_of(rows, logprobs)
    chosen, rejected = (of_tokens.sum(1) / mask.sum(1)).chunk(2)
    trainer = SimpleNamespace(beta=0.4, accelerator=single_process(), loss_type="simpo", simpo_gamma=0.7, label_smoothing=0.0,
                              alpha=0.0)  # fmt: skip
    losses = orpo.ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)[0]
    ours = formulas.preference_loss("orpo", rows, logprobs, beta=0.4)
    assert (-chosen - losses).mean().item() == pytest.approx(ours.item(), rel=1e-6)  # TRL computes it in float32
    trainer.beta = 2.0
    losses = cpo.CPOTrainer.cpo_loss(trainer, chosen, rejected)[0]
    ours = formulas.preference_loss("simpo", rows, logprobs, beta=2.0, margin=0.7)
    assert losses.mean().item() == pytest.approx(ours.item(), rel=1e-12)
