# SPDX-License-Identifier: Apache-2.0
"""Losses of routers and recorded routes through the command line, against Transformers."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

import transformers_reference as reference
from conftest import seed_of
from small_models import MODELS, MORE_FAMILIES, write_rows

KINDS = ["qwen3_moe", "granitemoehybrid", "gpt_oss", "mixtral"]


@pytest.fixture(scope="module", params=KINDS)
def config(request):
    return (MODELS | MORE_FAMILIES)[request.param]


@pytest.fixture(scope="module")
def model_folder(config, tmp_path_factory, espalier):
    folder = tmp_path_factory.mktemp("routers")
    (folder / "config.json").write_text(json.dumps(config))
    espalier("init", "--config", folder / "config.json", "--out", folder / "model", "--seed", seed_of(3),
             "--dtype", "float64")  # fmt: skip
    return folder / "model"


def number_of_experts(config):
    return config.get("num_experts", config.get("num_local_experts"))


def rows_of_one_length():
    """Rows that share prefixes, so that they make one batch without padding."""
    generator = torch.Generator().manual_seed(seed_of(5))
    prefix = torch.randint(MODELS[KINDS[0]]["vocab_size"], (7,), generator=generator).tolist()
    tails = torch.randint(MODELS[KINDS[0]]["vocab_size"], (5, 6), generator=generator).tolist()
    return [{"input_ids": prefix + tail} for tail in tails]


def router_logits(model, rows):
    """Of each layer [rows * length, experts]."""
    ids = torch.tensor([row["input_ids"] for row in rows])
    return model(input_ids=ids, output_router_logits=True).router_logits


def experts_of(model, rows, top_k):
    """Chosen by each router for each token: [row][token][layer][choice]."""
    with torch.no_grad():
        logits = torch.stack(router_logits(model, rows)).softmax(-1)
    experts = logits.topk(top_k, dim=-1).indices
    return experts.unflatten(1, (len(rows), -1)).permute(1, 2, 0, 3).tolist()


@pytest.mark.parametrize("strategy", ["partition", "tree-packing", "sequence-packing"])
def test_balancing_loss_and_its_gradient(espalier, config, model_folder, tmp_path, strategy):
    rows, coefficients = rows_of_one_length(), (0.5, 0.25)
    data = write_rows(tmp_path / "rows.jsonl", rows)
    espalier(
        "train", "--model", model_folder, "--data", data, "--out", tmp_path / "run", "--dtype", "float64",
        "--strategy", strategy, "--token-budget", 13, "--optimizer", "sgd", "--learning-rate", 1,
        "--max-grad-norm", 0, "--steps", 1, "--no-calibration",
        "--router-aux-loss-coef", coefficients[0], "--router-z-loss-coef", coefficients[1],
    )  # fmt: skip
    metrics = reference.read_rows(tmp_path / "run/metrics.jsonl")[0]
    model = reference.load_model(model_folder, torch.float64)
    with reference.norms_in_model_dtype(torch.float64):
        logits = router_logits(model, rows)
        balance = load_balancing_loss_func(logits, number_of_experts(config), config["num_experts_per_tok"])
        z_loss = torch.stack(logits).logsumexp(-1).square().mean()
        loss = reference.sft_loss(model, rows)
        expected = reference.gradients(model, loss + coefficients[0] * balance + coefficients[1] * z_loss)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-12)
    assert metrics["router_aux_loss"] == pytest.approx(balance.item(), rel=1e-6)  # Transformers sums in float32
    assert metrics["router_z_loss"] == pytest.approx(z_loss.item(), rel=1e-12)
    assert metrics["expert_load_min"] <= 1 <= metrics["expert_load_max"]
    before = load_file(model_folder / "model.safetensors")
    after = load_file(tmp_path / "run/checkpoints/step_1/model.safetensors")
    everything = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for name, gradient in expected.items():
        error = (before[name] - after[name] - gradient).norm()
        assert error <= 1e-6 * max(gradient.norm(), 1e-3 * everything), name


def logprobs(espalier, model_folder, folder, rows):
    data = write_rows(folder / "rows.jsonl", rows)
    espalier("logprobs", "--model", model_folder, "--data", data, "-o", folder / "out.jsonl", "--dtype", "float64")
    return torch.tensor([line["logprobs"][1:] for line in reference.read_rows(folder / "out.jsonl")])


def test_recorded_routes_are_taken(espalier, config, model_folder, tmp_path):
    rows = rows_of_one_length()
    model = reference.load_model(model_folder, torch.float64)
    with reference.norms_in_model_dtype(torch.float64):
        experts = experts_of(model, rows, config["num_experts_per_tok"])
    free = logprobs(espalier, model_folder, tmp_path, rows)
    same = [{**row, "routed_experts": routes} for row, routes in zip(rows, experts)]
    torch.testing.assert_close(logprobs(espalier, model_folder, tmp_path, same), free, rtol=1e-12, atol=1e-12)
    count = number_of_experts(config)
    moved = [[[[(expert + 1) % count for expert in layer] for layer in token] for token in row] for row in experts]
    other = [{**row, "routed_experts": routes} for row, routes in zip(rows, moved)]
    assert (logprobs(espalier, model_folder, tmp_path, other) - free).abs().max() > 1e-3
    report = espalier("verify", "--model", model_folder, "--data", tmp_path / "rows.jsonl", "--json", "--no-calibration")
    assert json.loads(report.stdout)["passed"]


def refusal(espalier, *arguments):
    """The message of a command that has to fail."""
    done = espalier(*arguments, check=False)
    assert done.returncode == 1, done.stderr
    return done.stderr


def test_routes_of_other_experts_are_refused(espalier, config, model_folder, tmp_path):
    routers, count = config["num_hidden_layers"], number_of_experts(config)
    choices = list(range(config["num_experts_per_tok"]))
    routes = [[choices] * routers, [[*choices[:-1], count]] * routers]
    data = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [1, 2], "routed_experts": routes}])
    message = refusal(espalier, "logprobs", "--model", model_folder, "--data", data, "-o", tmp_path / "out.jsonl")
    assert "field `routed_experts`, token 1" in message and f"received {count}" in message


def test_a_dense_model_has_no_losses_of_routers(espalier, model, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [1, 2, 3]}])
    message = refusal(espalier, "train", "--model", model, "--data", data, "--out", tmp_path / "run",
                      "--router-aux-loss-coef", 0.1)  # fmt: skip
    assert "expected a model with experts" in message
