# SPDX-License-Identifier: Apache-2.0
"""The whole command line against Transformers: log-probabilities, loss, and gradients.

One SGD step with learning rate 1 in float64 moves every weight by minus its gradient.
"""

import functools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import transformers_reference as reference
from conftest import seed_of
from small_models import MODELS, MORE_FAMILIES, WINDOWS_AND_ROPES, random_rows, write_rows

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def init_model(espalier, folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    espalier("init", "--config", folder / "config.json", "--out", folder / "model", "--seed", seed_of(3),
             "--dtype", "float64")  # fmt: skip
    draw_biases(folder / "model/model.safetensors")
    return folder / "model"


def draw_biases(weights):
    """Gives values to biases of experts, and to routers corrections that decide: init makes them zeros."""
    tensors = load_file(weights)
    generator = torch.Generator().manual_seed(seed_of(4))
    for name, tensor in tensors.items():
        if name.endswith("bias") and not tensor.any():
            tensors[name] = 0.3 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    save_file(tensors, weights, {"format": "pt"})


@pytest.fixture(scope="module", params=MODELS)
def model_folder(request, tmp_path_factory, espalier):
    return init_model(espalier, tmp_path_factory.mktemp(request.param), MODELS[request.param])


@pytest.mark.parametrize("dtype", DTYPES)
def test_logprobs(espalier, model_folder, tmp_path, dtype):
    check_logprobs(espalier, model_folder, tmp_path, dtype)


def rows_of_logprobs():
    rows = [row for seed in range(4) for row in random_rows(seed, "sft")]
    return [row | {"trajectory_id": f"t{index}"} for index, row in enumerate(rows)]


def check_logprobs(espalier, model_folder, tmp_path, dtype):
    rows = rows_of_logprobs()
    data = write_rows(tmp_path / "rows.jsonl", rows)
    espalier("logprobs", "--model", model_folder, "--data", data, "-o", tmp_path / "out.jsonl", "--dtype", dtype)
    out = reference.read_rows(tmp_path / "out.jsonl")
    assert [line["trajectory_id"] for line in out] == [row["trajectory_id"] for row in rows]
    ours = [torch.tensor(line["logprobs"][1:], dtype=torch.float64) for line in out]
    assert all(line["logprobs"][0] is None for line in out)
    theirs = logprobs_of(model_folder, dtype)
    if dtype == "float64":
        assert worst_difference(ours, theirs) <= 1e-12
        return
    # Both round; a model may make much of that in single tokens.
    exact = logprobs_of(model_folder, "float64")
    assert mean_square(ours, exact) <= 4 * max(1e-6**2, mean_square(theirs, exact))


@functools.cache
def logprobs_of(model_folder, dtype):
    """Of every row of rows_of_logprobs by Transformers; nothing of rows of one token."""
    model = reference.load_model(model_folder, DTYPES[dtype])
    with reference.norms_in_model_dtype(DTYPES[dtype]), torch.no_grad():
        return [reference.token_logprobs(model, row["input_ids"]) if len(row["input_ids"]) > 1 else torch.empty(0)
                for row in rows_of_logprobs()]  # fmt: skip


def worst_difference(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs) if a.numel() > 0)


def mean_square(ours, theirs):
    differences = torch.cat([(a - b).double() for a, b in zip(ours, theirs, strict=True)])
    assert differences.numel() >= 300
    return differences.square().mean().item()


# Every two of dtype, objective and strategy meet. test_objectives.py has all objectives with all strategies.
STEPS = [("float64", "sft", "partition"), ("float64", "grpo", "partition"), ("float64", "grpo", "tree-packing"),
         ("float64", "sft", "sequence-packing"), ("float32", "grpo", "partition"), ("float32", "sft", "tree-packing"),
         ("float32", "grpo", "sequence-packing")]  # fmt: skip


@pytest.mark.parametrize("dtype, objective, strategy", STEPS)
def test_one_step_is_the_gradient(espalier, model_folder, tmp_path, dtype, objective, strategy):
    check_one_step(espalier, model_folder, tmp_path, dtype, objective, strategy)


@pytest.mark.parametrize("kind", WINDOWS_AND_ROPES)
def test_windows_and_ropes(espalier, tmp_path, kind):
    """Strategies and objectives know nothing of them, so one of each is enough."""
    model_folder = init_model(espalier, tmp_path, WINDOWS_AND_ROPES[kind])
    check_logprobs(espalier, model_folder, tmp_path, "float64")
    check_one_step(espalier, model_folder, tmp_path, "float64", "sft", "partition")


@pytest.mark.parametrize("kind", MORE_FAMILIES)
def test_more_families(espalier, tmp_path, kind):
    """Nor of the parts of layers."""
    model_folder = init_model(espalier, tmp_path, MORE_FAMILIES[kind])
    check_logprobs(espalier, model_folder, tmp_path, "float64")
    check_logprobs(espalier, model_folder, tmp_path, "float32")
    check_one_step(espalier, model_folder, tmp_path, "float64", "grpo", "partition")
    data = write_rows(tmp_path / "rows.jsonl", random_rows(2, "sft"))
    flags = ("--token-budget", 24, "--no-calibration", "--json")
    report = json.loads(espalier("verify", "--model", model_folder, "--data", data, *flags).stdout)
    assert report["passed"]
    check_checkpoint(espalier, model_folder, tmp_path / "saved")


CHANGES = {
    "mistral": {"sliding_window": 5},
    "smollm3": {"no_rope_layer_interval": 3},
    "granite": {"residual_multiplier": 0.6},
    "mixtral": {"num_experts_per_tok": 3},
    "ministral": {"layer_types": ["sliding_attention", "full_attention"]},
    "exaone4": {"layer_types": ["sliding_attention"] * 3},
    "exaone4-full": {"sliding_window": 128},  # as long as any row, but then there are no positions
    "phi3-window": {"partial_rotary_factor": 0.5},
    "gemma2": {"attn_logit_softcapping": 0.41},
    "gemma2-layers": {"final_logit_softcapping": 30.0},
    "nemotron_h": {"time_step_min": 0.2},
    "nemotron_h-dense": {"layer_norm_epsilon": 2e-2},
    "deepseek_v3": {"rope_interleave": False},
    "deepseek_v3-plain": {"routed_scaling_factor": 2.6},
    "gemma3_text": {"query_pre_attn_scalar": 8},
    "gemma3_text-biases": {"layer_types": ["sliding_attention", "full_attention"]},
}


@pytest.mark.parametrize("kind", CHANGES)
def test_the_comparison_notices_other_options(espalier, tmp_path, kind):
    """Negative controls, among them a window that is one too large."""
    model_folder = init_model(espalier, tmp_path, (WINDOWS_AND_ROPES | MORE_FAMILIES)[kind])
    config = json.loads((model_folder / "config.json").read_text()) | CHANGES[kind]
    rows = random_rows(1, "sft")
    check_logprobs(espalier, model_folder, tmp_path, "float64")
    espalier("logprobs", "--model", model_folder, "--data", write_rows(tmp_path / "rows.jsonl", rows),
             "-o", tmp_path / "out.jsonl", "--dtype", "float64")  # fmt: skip
    (model_folder / "config.json").write_text(json.dumps(config))
    model = reference.load_model(model_folder, torch.float64)
    out = torch.tensor(reference.read_rows(tmp_path / "out.jsonl")[0]["logprobs"][1:], dtype=torch.float64)
    with reference.norms_in_model_dtype(torch.float64), torch.no_grad():
        assert (out - reference.token_logprobs(model, rows[0]["input_ids"])).abs().max() > 1e-6


def check_one_step(espalier, model_folder, tmp_path, dtype, objective, strategy):
    rows = random_rows(2, objective)
    data = write_rows(tmp_path / "rows.jsonl", rows)
    espalier(
        "train", "--model", model_folder, "--data", data, "--out", tmp_path / "run", "--dtype", dtype,
        "--objective", objective, "--strategy", strategy, "--token-budget", 24, "--optimizer", "sgd",
        "--learning-rate", 1, "--max-grad-norm", 0, "--steps", 1, "--no-calibration",
    )  # fmt: skip
    before = load_file(model_folder / "model.safetensors")
    after = load_file(tmp_path / "run/checkpoints/step_1/model.safetensors")

    model = reference.load_model(model_folder, DTYPES[dtype])
    with reference.norms_in_model_dtype(DTYPES[dtype]):
        loss = {"sft": reference.sft_loss, "grpo": reference.grpo_loss}[objective](model, rows)
        expected = reference.gradients(model, loss)
    metrics = reference.read_rows(tmp_path / "run/metrics.jsonl")
    tolerance = 1e-12 if dtype == "float64" else 2e-4
    assert metrics[0]["loss"] == pytest.approx(loss.item(), rel=tolerance)
    everything = torch.stack([g.double().norm() for g in expected.values()]).norm()
    for name, gradient in expected.items():
        if name not in before:  # of a composite model, whose text decoder alone Transformers has loaded
            name = name.replace("model.", "model.language_model.", 1)
        step = before[name].double() - after[name].double()
        # The weights themselves are rounded: what is left of that in the difference is an absolute error.
        rounding = torch.finfo(DTYPES[dtype]).eps * before[name].double().norm()
        error = max((step - gradient).norm().item() - rounding.item(), 0.0)
        scale = max(gradient.double().norm().item(), 1e-6 * everything.item())
        assert error / scale <= tolerance, name


def test_the_comparison_notices_a_lost_row(espalier, tmp_path, model_folder):
    """Negative control: without one trajectory the loss is another."""
    rows = random_rows(2, "sft")
    data = write_rows(tmp_path / "rows.jsonl", rows[:-3])
    report = json.loads(espalier("verify", "--model", model_folder, "--data", data, "--no-calibration", "--json").stdout)
    model = reference.load_model(model_folder, torch.float64)
    with reference.norms_in_model_dtype(torch.float64):
        loss = reference.sft_loss(model, rows).item()
        same = reference.sft_loss(model, rows[:-3]).item()
    assert report["loss"] == pytest.approx(same, rel=1e-12)
    assert report["loss"] != pytest.approx(loss, rel=1e-6)


def test_transformers_loads_the_checkpoint(espalier, model_folder, tmp_path):
    check_checkpoint(espalier, model_folder, tmp_path)


def check_checkpoint(espalier, model_folder, tmp_path):
    tmp_path.mkdir(exist_ok=True)
    data = write_rows(tmp_path / "rows.jsonl", random_rows(3, "sft"))
    espalier("train", "--model", model_folder, "--data", data, "--out", tmp_path / "run", "--steps", 2, "--no-calibration")
    saved = tmp_path / "run/checkpoints/step_2"
    model = reference.load_model(saved, "auto")
    assert model.dtype == torch.float32  # the weights are saved in --dtype
    ids = [1, 2, 3, 4, 5]
    espalier("logprobs", "--model", saved, "--data", write_rows(tmp_path / "one.jsonl", [{"input_ids": ids}]),
             "-o", tmp_path / "out.jsonl")  # fmt: skip
    ours = torch.tensor(reference.read_rows(tmp_path / "out.jsonl")[0]["logprobs"][1:])
    with torch.no_grad():
        torch.testing.assert_close(ours, reference.token_logprobs(model, ids), rtol=1e-5, atol=1e-5)


def without_scale_of_yarn(layer):
    layer.self_attn.scaling = layer.self_attn.qk_head_dim**-0.5


def router_of(layer):
    """None in a layer without experts."""
    return getattr(layer.mlp if hasattr(layer, "mlp") else layer.mixer, "gate", None)


def without_correction(layer):
    if (router := router_of(layer)) is not None:
        router.e_score_correction_bias.zero_()


def without_groups(layer):
    if (router := router_of(layer)) is not None:
        router.topk_group = router.num_group


def with_the_eps_of_other_norms(layer):
    layer.self_attn.kv_a_layernorm.variance_epsilon = layer.input_layernorm.variance_epsilon


def check_that_it_shows(espalier, tmp_path, config, spoil):
    """Transformers agrees with the engine, and no more once `spoil` has changed its layers."""
    model_folder = init_model(espalier, tmp_path, config)
    rows = random_rows(1, "sft")
    espalier("logprobs", "--model", model_folder, "--data", write_rows(tmp_path / "rows.jsonl", rows),
             "-o", tmp_path / "out.jsonl", "--dtype", "float64")  # fmt: skip
    out = torch.tensor(reference.read_rows(tmp_path / "out.jsonl")[0]["logprobs"][1:], dtype=torch.float64)
    model = reference.load_model(model_folder, torch.float64)
    difference = lambda: (out - reference.token_logprobs(model, rows[0]["input_ids"])).abs().max()
    with reference.norms_in_model_dtype(torch.float64), torch.no_grad():
        assert difference() <= 1e-12
        for layer in model.model.layers:
            spoil(layer)
        assert difference() > 1e-6


@pytest.mark.parametrize("kind, spoil", [
    ("deepseek_v3", without_scale_of_yarn), ("deepseek_v3", with_the_eps_of_other_norms), ("deepseek_v3", without_correction),
    ("deepseek_v3", without_groups), ("nemotron_h", without_correction), ("nemotron_h", without_groups),
])  # fmt: skip
def test_the_comparison_notices_other_latent_attention_and_routers(espalier, tmp_path, kind, spoil):
    """Negative controls: Transformers is given what an engine would compute that left out a part."""
    check_that_it_shows(espalier, tmp_path, MORE_FAMILIES[kind], spoil)


def experts_of(layer):
    return dict(layer.mlp.experts.named_parameters())


SPOILT = {
    "without the bias of gate and up": lambda layer: experts_of(layer)["gate_up_proj_bias"].zero_(),
    "without the bias of down": lambda layer: experts_of(layer)["down_proj_bias"].zero_(),
    "without the bias of the router": lambda layer: layer.mlp.router.bias.zero_(),
    "gate before up": lambda layer: experts_of(layer)["gate_up_proj"].copy_(
        torch.stack(experts_of(layer)["gate_up_proj"].chunk(2, -1), -1).flatten(-2)),
    "without the clamp": lambda layer: setattr(layer.mlp.experts, "limit", 1e9),
    "without sinks": lambda layer: layer.self_attn.sinks.fill_(-1e9),
}  # fmt: skip


@pytest.mark.parametrize("kind", SPOILT)
def test_the_comparison_notices_other_experts(espalier, tmp_path, kind):
    """Negative controls of gpt_oss: Transformers is given what an engine would compute that left out a part."""
    check_that_it_shows(espalier, tmp_path, MODELS["gpt_oss"], SPOILT[kind])
