# SPDX-License-Identifier: Apache-2.0
"""Rows that were sampled at a temperature, or from fewer tokens than all: what they say of it, and how they are trained."""

import re
import warnings

import numpy as np
import pytest
import torch

import espalier as package
import objective_formulas as formulas
import transformers_reference as reference
from conftest import seed_of
from engines import engine_of, init_model, transformers_gradients, worst_error
from small_models import write_rows

PROMPTS = [[5, 6, 7, 8, 9], [5, 6, 7, 12], [14, 15]]
WITH_RATIOS = ["ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "reinforce", "opd"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, espalier):
    return init_model(espalier, tmp_path_factory.mktemp("qwen3"))


def scored(rows):
    for number, row in enumerate(rows):
        row |= {"reward": float(number % 2), "ref_logprobs": row["logprobs"]}
    return rows


def mixed_rows(engine, **options):
    """Of three temperatures, sharing prompts; of equal groups."""
    params = {"samples": 2, "max_new_tokens": 6, "stop_ids": []} | options
    return scored([row | {"group_id": row["group_id"]} for seed, temperature in enumerate((0.5, 1.0, 1.7))
                   for row in engine.sample(PROMPTS, seed=seed_of(seed), temperature=temperature, **params)])  # fmt: skip


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_the_ratio_of_fresh_rows_is_1(espalier, tmp_path, kind):
    engine = engine_of(init_model(espalier, tmp_path, kind))
    rows = mixed_rows(engine)
    assert [row.get("temperature") for row in rows[::6]] == [0.5, None, 1.7]
    for row, again in zip(rows, engine.logprobs(rows), strict=True):
        assert np.abs(again - row["logprobs"])[row["loss_mask"] == 1].max() <= 1e-12
    for objective in WITH_RATIOS:
        metrics = engine.forward_backward(rows, objective)
        assert max(abs(metrics[name] - 1) for name in ("ratio_mean", "ratio_min", "ratio_max")) <= 1e-11, objective
    # Negative control: without what the rows say.
    plain = [{name: value for name, value in row.items() if name != "temperature"} for row in rows]
    assert engine.forward_backward(plain, "grpo")["ratio_max"] > 1.1


@pytest.mark.parametrize("objective", ["grpo", "dpo", "sft"])
def test_loss_and_gradient_are_those_of_divided_logits(folder, objective):
    """With ratios that are not 1, against Transformers in float64; `sft` compares with nothing that is recorded."""
    engine = engine_of(folder)
    rng = np.random.default_rng(seed_of(4))
    rows = mixed_rows(engine)
    for number, row in enumerate(rows):
        noise = np.where(row["loss_mask"] == 1, rng.uniform(-0.3, 0.3, len(row["loss_mask"])), 0)
        row["logprobs"] = np.minimum(row["logprobs"] + noise, 0)
        row["ref_logprobs"] = row["logprobs"]
        row |= {"pair_id": f"p{number // 2}", "chosen": number % 2 == 0} if objective == "dpo" else {}
    plain = [{name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in row.items()} for row in rows]

    def loss_of(model, divided=True):
        logprobs = []
        for row in plain:
            ids, temperature = row["input_ids"], row.get("temperature", 1.0) if divided and objective != "sft" else 1.0
            logits = model(input_ids=torch.tensor([ids])).logits[0, :-1] / temperature
            logprobs.append(torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1))
        if objective == "dpo":
            return formulas.preference_loss("dpo", plain, logprobs, beta=0.1)
        if objective == "sft":
            weights = [torch.tensor(row["loss_mask"][1:], dtype=torch.float64) for row in plain]
            return -sum((p * w).sum() for p, w in zip(logprobs, weights)) / sum(w.sum() for w in weights)
        return formulas.policy_loss("grpo", plain, logprobs, normalize="token")

    metrics = engine.forward_backward(rows, objective)
    loss, gradients = transformers_gradients(folder, loss_of)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-11, abs=1e-13)
    assert worst_error(engine.gradients(), gradients) <= 1e-11
    # Negative control: logits that are not divided.
    other = transformers_gradients(folder, lambda model: loss_of(model, divided=False))[1]
    assert (worst_error(engine.gradients(), other) > 1e-3) == (objective != "sft")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_low_precision_has_the_ratio_of_rounding(folder, dtype):
    engine = engine_of(folder, dtype=dtype)
    metrics = engine.forward_backward(mixed_rows(engine), "grpo")
    assert abs(metrics["ratio_mean"] - 1) < (1e-5 if dtype == "float32" else 0.02)


def test_a_function_gets_the_log_probabilities_of_the_row(folder):
    engine = engine_of(folder)
    rows = mixed_rows(engine)
    found = []

    def loss(logprobs, positions):
        found.extend(zip(logprobs, positions, strict=True))
        return -torch.cat(logprobs).mean()

    engine.forward_backward(rows, loss)
    for row, (logprobs, positions) in zip(rows, found, strict=True):
        assert np.abs(logprobs.detach().numpy() - row["logprobs"][positions.numpy()]).max() <= 1e-12


def test_the_commands_agree_with_the_rows(espalier, folder, tmp_path):
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"input_ids": ids} for ids in PROMPTS])
    common = ["--model", folder, "--dtype", "float64"]
    for name in ("rows.jsonl", "rows.safetensors"):
        done = espalier("sample", *common, "--data", prompts, "--samples", 2, "--temperature", 0.6, "--max-new-tokens", 6,
                        "--ignore-stop-ids", "-o", tmp_path / name)  # fmt: skip
        assert float(re.search(r"differ by (\S+) at most", done.stdout)[1]) < 1e-12 and "note" not in done.stderr
        rows = package.read(tmp_path / name)
        assert rows.temperature.tolist() == [0.6] * 6 and rows[0]["temperature"] == 0.6
        package.write(tmp_path / "scored.jsonl", scored([rows[number] for number in range(len(rows))]))
        train = [*common, "--data", tmp_path / "scored.jsonl", "--objective", "grpo"]
        out = tmp_path / f"run of {name}"
        espalier("train", *train, "--out", out, "--steps", 1, "--no-calibration")
        [metrics] = reference.read_rows(out / "metrics.jsonl")
        assert metrics["ratio_min"] == pytest.approx(1, abs=1e-11) and metrics["ratio_max"] == pytest.approx(1, abs=1e-11)
        assert '"passed": true' in espalier("verify", *train, "--json").stdout
    # The reference's log-probabilities are at the temperature of the row, too: the divergence from itself is 0.
    bare = [{name: value for name, value in row.items() if name != "ref_logprobs"}
            for row in reference.read_rows(tmp_path / "scored.jsonl")]  # fmt: skip
    data = write_rows(tmp_path / "bare.jsonl", bare)
    espalier("train", *common, "--data", data, "--objective", "grpo", "--kl-coef", 0.1, "--reference-model", folder, "--out",
             tmp_path / "kl", "--steps", 1, "--no-calibration")  # fmt: skip
    assert reference.read_rows(tmp_path / "kl/metrics.jsonl")[0]["ref_kl"] == pytest.approx(0, abs=1e-12)


def test_rows_from_fewer_tokens_say_so_once(espalier, folder, tmp_path):
    engine = engine_of(folder)
    rows = scored(engine.sample(PROMPTS, samples=2, max_new_tokens=6, stop_ids=[], top_p=0.8, top_k=20, seed=1))
    assert all(row["top_p"] == 0.8 and row["top_k"] == 20 and "temperature" not in row for row in rows)
    with pytest.warns(UserWarning, match=r"6 of 6 trajectories were sampled .*; of all that this engine sampled, by 0\.\d+ nats"):
        engine.forward_backward(rows, "grpo")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.forward_backward(rows, "grpo")
        engine_of(folder).forward_backward(rows, "sft")  # has no ratio
        engine_of(folder).forward_backward([row | {"top_p": 1.0, "top_k": 0} for row in rows], "grpo")
    data = tmp_path / "rows.jsonl"
    package.write(data, [{name: value for name, value in row.items() if name != "top_k"} for row in rows])
    done = espalier("train", "--model", folder, "--data", data, "--objective", "grpo", "--out", tmp_path / "run", "--steps", 1)
    assert done.stderr.count("sampled with temperature 0, top_k or top_p") == 1
    assert "lower than those of the tokens that were left, by 0.223 nats at most" in done.stderr


def test_a_row_has_one_temperature(folder):
    engine = engine_of(folder)
    [row] = engine.sample(PROMPTS[:1], max_new_tokens=3, stop_ids=[], temperature=0.5)
    [longer] = engine.sample([row], max_new_tokens=3, stop_ids=[], temperature=0.5, whole_rows=True)
    assert longer["temperature"] == 0.5 and longer["loss_mask"].sum() == 6
    with pytest.raises(package.InputError, match=r"trajectory 0/sample-0: temperature: expected 0\.5, that of .*received 1"):
        engine.sample([row], max_new_tokens=3, stop_ids=[], whole_rows=True)


@pytest.mark.parametrize("field, value, expected", [
    ("temperature", -1.0, "a number >= 0"), ("top_k", 0.5, "a whole number >= 0"), ("top_p", 0.0, "a number above 0 and at most 1"),
])  # fmt: skip
def test_values_out_of_range_are_named(field, value, expected, tmp_path):
    with pytest.raises(package.InputError, match=f"field `{field}`: expected {expected}"):
        package.trajectories([{"input_ids": [1, 2], field: value}])
    with pytest.raises(package.InputError, match=f"{field}.*expected {expected}"):
        package.io.write_rows([{"input_ids": [1, 2], field: value}], tmp_path / "rows.jsonl")
