# SPDX-License-Identifier: Apache-2.0
"""FLOPs and seconds of plans and distributions by a model's config.json: those of `espalier plan`, and by hand."""

import json

import numpy as np
import pytest
from transformers import GPT2Config

import espalier as package
from espalier.distributed.share import share_of
from hf_models import make_model
from small_models import MODELS, MORE_FAMILIES, WINDOWS_AND_ROPES, random_rows, write_rows

KINDS = ["llama", "mistral", "olmo3", "qwen3_moe", "gpt_oss", "qwen3_5", "granitemoehybrid", "nemotron_h", "deepseek_v3"]
RATES = {"format_version": 1, "origin": "measured", "seconds_per": {
    "micro_batch": 0.003, "layer": 1e-4, "layer_token": 3e-6, "layer_pair": 1.25e-8, "layer_attention_piece": 7e-6,
    "logit_row": 1 / 3e5}}  # fmt: skip


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", random_rows(7, "grpo"))


def folder_of(kind, folder):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps((MODELS | WINDOWS_AND_ROPES | MORE_FAMILIES)[kind]))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_costs_what_the_command_says(kind, espalier, rows_file, tmp_path):
    """FLOPs, seconds by built-in rates and by those of a file, and what ranks get, all to the last bit."""
    model, rates = folder_of(kind, tmp_path / "model"), tmp_path / "rates.json"
    rates.write_text(json.dumps(RATES))
    rows = package.read(rows_file)
    forest, mask = package.build(rows), rows.loss_weights
    for flags, costs in [([], model), (["--cost-model", rates], package.costs(model, cost_model=rates))]:
        for strategy in ("partition", "tree-packing", "auto"):
            said = json.loads(espalier("plan", "--data", rows_file, "--model", model, "--token-budget", 20, "--strategy",
                                       strategy, "--ranks", 3, "--no-calibration", "--json", *flags).stdout)
            plan = package.plan(forest, token_budget=20, strategy=strategy, model=costs, loss_mask=mask)
            ours = json.loads(json.dumps(plan.to_dict()))
            for batch in ours["micro_batches"]:
                del batch["context_tokens"]
            for batch in said["micro_batches"]:
                del batch["predicted_peak_bytes"]
            assert {key: said[key] for key in ours} == ours
            assert (plan.flops, plan.seconds) == (said["flops"]["plan"], said["predicted_seconds"])
            assert said["prediction_counts"] == "FLOPs" and plan.speedup_over_sequence_packing > 1
            distribution = package.distribute(forest, 3, model=costs)
            assert said["distribution"]["seconds"] == distribution.seconds
            assert [(share["trajectories"], share["predicted_seconds"]) for share in said["distribution"]["ranks"]] == [
                (share.trajectories.tolist(), share.seconds) for share in distribution]  # fmt: skip


def by_hand(tokens, pairs, predicting):
    """FLOPs of llama-like layers of the sizes below: a multiply-add is two, backward takes twice as many for weights.
    Scores and logits are computed again in backward. The last layer runs predicting tokens only, after attention."""
    hidden, intermediate, layers, query, key, vocab = 8, 12, 3, 8, 4, 50
    after_attention = query * hidden + 3 * hidden * intermediate
    weights = hidden * (query + 2 * key) + after_attention
    return (6 * (layers * weights * tokens - after_attention * (tokens - predicting)) + 14 * query * layers * pairs
            + 8 * hidden * vocab * predicting)  # fmt: skip


def test_flops_by_hand(tmp_path):
    """A prompt of 4 tokens with two answers of 2, which carry the loss."""
    config = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 3,
              "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2, "vocab_size": 50,
              "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "hidden_act": "silu"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    forest, mask = package.build([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8]]), [[0, 0, 0, 0, 1, 1]] * 2
    plan = package.plan(forest, token_budget=16, model=tmp_path / "config.json", loss_mask=mask)
    tree, flat = by_hand(8, 10 + 2 * (5 + 6), 3), 2 * by_hand(6, 21, 2)
    assert plan.flops == tree and plan.to_dict()["flops"] == {"plan": tree, "sequence_packing": flat, "append_only": flat}
    assert plan.speedup_over_sequence_packing == flat / tree == plan.speedup_over_append_only
    everything = package.plan(forest, token_budget=16, model=tmp_path)
    assert everything.flops == by_hand(8, 32, 6)  # of the first four tokens and of the fifth of each row
    costs = package.costs(tmp_path)
    assert repr(costs) == "<espalier.Costs: llama, 3 layers, built-in rates>" and not costs.calibrated
    on_a_gpu = package.plan(forest, token_budget=16, model=package.costs(tmp_path, device="cuda"))
    assert on_a_gpu.flops == everything.flops and on_a_gpu.seconds < everything.seconds


def test_distributions_follow_the_model(tmp_path):
    """A long row costs a model with sliding windows less than one without, beside short rows of as many tokens."""
    rows = [[1] * 4000, *([token] * 400 for token in range(2, 12))]
    shares = []
    for window in (None, 8):
        folder = folder_of("mistral", tmp_path / f"model{window}")
        config = json.loads((folder / "config.json").read_text()) | {"sliding_window": window}
        (folder / "config.json").write_text(json.dumps(config))
        shares.append(package.distribute(package.build(rows), 2, model=folder))
    full, windowed = shares
    assert windowed.seconds < full.seconds
    assert windowed.imbalance < full.imbalance
    share = share_of(rows, 1, 2, model=folder)  # which Ranks.share calls
    assert share.distribution.seconds == windowed.seconds
    assert share.trajectories.tolist() == windowed[1].trajectories.tolist()


def test_without_a_model_nothing_is_predicted():
    plan = package.plan(package.build([[1, 2, 3], [1, 2, 4], [1, 2]]), token_budget=8)
    assert plan.flops is plan.seconds is plan[0].seconds is None
    assert plan.speedup_over_sequence_packing == 8 / 4 and plan.speedup_over_append_only == 6 / 4  # in tokens
    assert "flops" not in plan.to_dict() and plan.to_dict()["prediction_counts"] == "tokens"


@pytest.mark.parametrize("kind", ["mistral", "gpt_oss", "qwen3_5", "mamba2"])
def test_models_in_memory_cost_what_their_files_say(kind, tmp_path):
    """Given as the model, its config, its backbone, and patched."""
    forest = package.build([[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8]])
    expected = package.plan(forest, token_budget=8, model=folder_of(kind, tmp_path)).to_dict()
    model = make_model(kind)
    for given in (model, model.config, package.hf.patch(model), model.base_model):
        assert package.plan(forest, token_budget=8, model=given).to_dict() == expected


def other_family(folder):
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    return folder


REFUSED = {
    "model: expected a folder of Hugging Face, a config.json, a model of .*received int": lambda _: dict(model=3),
    "^the model's config: model_type: expected .*received \"gpt2\"": lambda _: dict(model=GPT2Config()),
    "nowhere: expected a Hugging Face model folder, received a name that": lambda folder: dict(model=folder / "nowhere"),
    "config.json: model_type: expected .*received \"gpt2\"": lambda folder: dict(model=other_family(folder)),
    "loss_mask: expected 2 rows, received 1": lambda folder: dict(model=folder, loss_mask=[[1, 1, 1]]),
    "loss_mask: expected 3 entries in row 1": lambda folder: dict(model=folder, loss_mask=[[1, 1, 1], [1, 1]]),
    "loss_mask: expected 6 entries": lambda folder: dict(model=folder, loss_mask=np.ones(5)),
    "device: expected cpu or cuda, received `tpu`": lambda folder: dict(model=package.costs(folder, device="tpu")),
    "cost_model: expected a path, received dict": lambda folder: dict(model=package.costs(folder, cost_model=RATES)),
    "rates.json: seconds_per.layer: expected a number of seconds": lambda folder: dict(
        model=package.costs(folder, cost_model=with_a_bad_rate(folder / "rates.json"))),
}  # fmt: skip


def with_a_bad_rate(file):
    file.write_text(json.dumps(RATES | {"seconds_per": RATES["seconds_per"] | {"layer": -1}}))
    return file


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(message, tmp_path):
    folder = folder_of("llama", tmp_path)
    with pytest.raises(package.InputError, match=message):
        package.plan(package.build([[1, 2, 3], [1, 2, 4]]), token_budget=8, **REFUSED[message](folder))
