# SPDX-License-Identifier: Apache-2.0
"""Adapters against PEFT: training, folders in both directions, merging."""

import copy
import json
import re

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import transformers_reference as reference
from conftest import seed_of
from espalier.commands import merge
from small_models import MODELS, MORE_FAMILIES, WINDOWS_AND_ROPES, random_rows, write_rows
from test_against_transformers import init_model

RANK, ALPHA = 3, 5
# Which maps have adapters, in families with other maps to adapt.
TARGETS = {
    "llama": ["q_proj", "v_proj", "lm_head"],  # the head is the embedding
    "qwen2": ["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"],  # beside biases
    "qwen3": "all-linear",
    "olmo3": ["down_proj", "layers.1.self_attn.v_proj"],
    "qwen3_5": "all-linear",
    "mamba2": ["in_proj"],  # of which PEFT adapts nothing else
    "glm4_moe": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "qwen3_next": ["in_proj_qkvz", "out_proj", "shared_expert_gate"],
    "granitemoehybrid": ["in_proj", "v_proj", "shared_mlp.input_linear", "lm_head"],  # whose logits are scaled
    "gpt_oss": ["q_proj", "o_proj"],
    "phi3-window": "all-linear",
    "gemma2": ["q_proj", "k_proj", "up_proj", "lm_head"],  # whose logits have a softcap
    "gemma3_text": ["v_proj", "gate_proj", "down_proj"],
    "mixtral": ["q_proj", "v_proj", "lm_head"],
    "ernie4_5-biases": ["k_proj", "up_proj"],
    "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
    "nemotron_h": ["in_proj", "q_proj", "o_proj", "mixer.up_proj", "shared_experts.down_proj", "lm_head"],
    "nemotron_h-dense": ["layers.3.mixer.in_proj", "up_proj", "v_proj"],
}
CONFIGS = MODELS | WINDOWS_AND_ROPES | MORE_FAMILIES
# Recurrent layers divide by the size of their output, which makes much of rounding where that is small.
RECURRENT = ("qwen3_5", "qwen3_next", "mamba2", "granitemoehybrid", "nemotron_h", "nemotron_h-dense")
IN_BFLOAT16 = ("qwen3", "qwen3_5", "mamba2", "granitemoehybrid", "phi3-window", "gemma2", "deepseek_v3", "nemotron_h")
TRAINED = ("--dtype", "float64", "--max-grad-norm", 0, "--token-budget", 24, "--strategy", "partition", "--no-calibration")


@pytest.fixture(scope="module", params=TARGETS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory, espalier):
    return init_model(espalier, tmp_path_factory.mktemp(kind), CONFIGS[kind])


def make_peft(folder, targets, **changes):
    """A model of PEFT in float64 whose adapter has values everywhere."""
    model = reference.load_model(folder, torch.float64)
    torch.manual_seed(seed_of(6))
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, task_type="CAUSAL_LM",
                             init_lora_weights=False, **changes)  # fmt: skip
    model = peft.get_peft_model(model, config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            assert parameter.dtype == torch.float64
            parameter.data.mul_(0.3 / parameter.data.std())
    return model


def adapter_of(model):
    return peft.get_peft_model_state_dict(model, save_embedding_layers=False)


def worst_error(ours, theirs):
    """The largest of ||ours - theirs|| / ||theirs||."""
    assert ours.keys() == theirs.keys()
    errors = []
    for name, value in theirs.items():
        distance, size = (ours[name].double() - value.double()).norm(), value.double().norm()
        errors.append((distance / size).item() if size > 0 else distance.item())
    return max(errors)


def rounded_otherwise(model):
    """A copy whose adapter differs by a rounding error in each value. How far it is from the model after some steps is
    what rounding alone does: in recurrent layers, more with each step."""
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.requires_grad:
                sign = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter) * 2 - 1
                parameter.mul_(1 + sign * torch.finfo(parameter.dtype).eps)
    return twin


def a_step(model, optimiser, rows):
    """The loss before it."""
    with reference.norms_in_model_dtype(torch.float64):
        loss = reference.sft_loss(model, rows)
        optimiser.zero_grad()
        loss.backward()
    optimiser.step()
    return loss.item()


OPTIMISERS = {
    "sgd": (lambda parameters: torch.optim.SGD(parameters, lr=0.05), ("--optimizer", "sgd", "--learning-rate", 0.05)),
    "adamw": (lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
              ("--optimizer", "adamw", "--learning-rate", 0.01, "--weight-decay", 0.1)),
}  # fmt: skip


@pytest.mark.parametrize("optimiser, rslora", [("sgd", True), ("adamw", False)])  # which know nothing of each other
def test_steps_are_those_of_peft(espalier, folder, kind, tmp_path, optimiser, rslora):
    model = make_peft(folder, TARGETS[kind], use_rslora=rslora)
    model.save_pretrained(tmp_path / "adapter")
    rows = random_rows(5, "sft")
    make, flags = OPTIMISERS[optimiser]
    espalier("train", "--model", folder, "--adapter", tmp_path / "adapter", "--out", tmp_path / "run",
             "--data", write_rows(tmp_path / "rows.jsonl", rows), "--steps", 3, "--save-every", 1,
             *TRAINED, *flags)  # fmt: skip
    twin = rounded_otherwise(model)
    steps = [(each, make([parameter for parameter in each.parameters() if parameter.requires_grad]))
             for each in (model, twin)]  # fmt: skip
    before = {name: value.clone() for name, value in adapter_of(model).items()}
    losses = [line["loss"] for line in reference.read_rows(tmp_path / "run/metrics.jsonl")]
    for number in range(3):
        loss, _ = [a_step(each, optimiser, rows) for each, optimiser in steps]
        assert losses[number] == pytest.approx(loss, rel=1e-12)
        ours = load_file(tmp_path / f"run/checkpoints/step_{number + 1}/adapter_model.safetensors")
        rounding = worst_error(adapter_of(twin), adapter_of(model))
        assert worst_error(ours, adapter_of(model)) <= max(1e-12, 32 * rounding)
        assert rounding <= 1e-8  # the control: whatever is wrong by more than rounding exceeds the bound
    assert worst_error(before, adapter_of(model)) > 1e-4  # the control: an adapter that is not trained


def logprobs_of_peft(model, rows):
    with reference.norms_in_model_dtype(torch.float64), torch.no_grad():
        return torch.cat([reference.token_logprobs(model, row["input_ids"])
                          for row in rows if len(row["input_ids"]) > 1])  # fmt: skip


def our_logprobs(espalier, folder, rows, tmp_path, *flags):
    espalier("logprobs", "--model", folder, "--data", write_rows(tmp_path / "data.jsonl", rows),
             "-o", tmp_path / "logprobs.jsonl", "--dtype", "float64", *flags)  # fmt: skip
    lines = reference.read_rows(tmp_path / "logprobs.jsonl")
    return torch.tensor([value for line in lines for value in line["logprobs"][1:]], dtype=torch.float64)


def difference(a, b):
    return (a - b).abs().max().item()


def test_an_adapter_of_peft_is_read(espalier, folder, kind, tmp_path):
    model = make_peft(folder, TARGETS[kind])
    model.save_pretrained(tmp_path / "adapter")
    rows = random_rows(7, "sft")
    ours = our_logprobs(espalier, folder, rows, tmp_path, "--adapter", tmp_path / "adapter")
    assert difference(ours, logprobs_of_peft(model, rows)) <= 1e-12
    assert difference(ours, our_logprobs(espalier, folder, rows, tmp_path)) > 1e-3  # the control: without it


def names(targets):
    return targets if isinstance(targets, str) else ",".join(targets)


def test_peft_opens_our_checkpoints(espalier, folder, kind, tmp_path):
    rows = random_rows(8, "sft")
    espalier("train", "--model", folder, "--data", write_rows(tmp_path / "rows.jsonl", rows), "--out",
             tmp_path / "run", "--steps", 2, "--learning-rate", 0.05, "--lora-rank", RANK, "--lora-alpha", ALPHA,
             "--lora-targets", names(TARGETS[kind]), "--lora-rslora", *TRAINED)  # fmt: skip
    saved = tmp_path / "run/checkpoints/step_2"
    config = json.loads((saved / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (RANK, ALPHA, True)
    base = reference.load_model(config["base_model_name_or_path"], torch.float64)
    model = peft.PeftModel.from_pretrained(base, saved)
    theirs, ours = adapter_of(model), load_file(saved / "adapter_model.safetensors")
    assert worst_error(ours, theirs) == 0  # all of it, and nothing else
    if TARGETS[kind] != "all-linear":
        same = peft.LoraConfig(r=RANK, target_modules=TARGETS[kind], task_type="CAUSAL_LM")
        plain = peft.get_peft_model(reference.load_model(folder, torch.float64), same)
        assert adapter_of(plain).keys() == ours.keys()
    with_adapter = our_logprobs(espalier, folder, rows, tmp_path, "--adapter", saved)
    assert difference(with_adapter, logprobs_of_peft(model, rows)) <= 1e-12


def test_all_linear_is_what_peft_takes(espalier, tmp_path):
    """Of dense models; of others, experts and routers have no adapters here."""
    folder = init_model(espalier, tmp_path, MODELS["qwen3"])
    espalier("train", "--model", folder, "--data", write_rows(tmp_path / "rows.jsonl", random_rows(8, "sft")),
             "--out", tmp_path / "run", "--steps", 1, "--lora-rank", 2)  # fmt: skip
    ours = load_file(tmp_path / "run/checkpoints/step_1/adapter_model.safetensors")
    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = adapter_of(peft.get_peft_model(reference.load_model(folder, torch.float32), config))
    assert {name: value.shape for name, value in ours.items()} == {
        name: value.shape for name, value in theirs.items()}  # fmt: skip
    # Drawn alike: A uniform between equal bounds, B zero before the first step, which moves it by the rate at most.
    for name, value in ours.items():
        if "lora_A" in name:
            assert value.abs().max() == pytest.approx(theirs[name].abs().max(), rel=0.25)
        else:
            assert value.abs().max() <= 1.1e-5


def test_an_adapter_of_another_head_is_refused(espalier, tmp_path):
    """PEFT saves the head beside its adapter; other software would load it in place of the model's."""
    folder = init_model(espalier, tmp_path, MODELS["qwen3"])
    make_peft(folder, ["lm_head"]).save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_model.safetensors"
    tensors = load_file(file)
    rows = random_rows(8, "sft")
    our_logprobs(espalier, folder, rows, tmp_path, "--adapter", tmp_path / "adapter")
    tensors["base_model.model.lm_head.base_layer.weight"][3, 5] += 1
    save_file(tensors, file)
    refused = espalier("logprobs", "--model", folder, "--data", write_rows(tmp_path / "rows.jsonl", rows), "--adapter",
                       tmp_path / "adapter", "-o", tmp_path / "out.jsonl", check=False)  # fmt: skip
    assert refused.returncode == 1 and "expected the weight of the model beside its adapter" in refused.stderr, refused.stderr


@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe", "qwen3_next"])
def test_an_adapter_of_experts_is_refused_with_targets_that_fit(espalier, tmp_path, kind):
    """In these families PEFT's all-linear adapts experts and routers, too."""
    folder = init_model(espalier, tmp_path, MODELS[kind])
    data = write_rows(tmp_path / "rows.jsonl", random_rows(8, "sft"))

    def train(targets):
        make_peft(folder, targets).save_pretrained(tmp_path / "adapter")
        return espalier("train", "--model", folder, "--data", data, "--out", tmp_path / "run", "--steps", 1,
                        "--adapter", tmp_path / "adapter", check=False)  # fmt: skip

    refused = train("all-linear")
    message = refused.stderr.splitlines()[-1]
    assert refused.returncode == 1 and "target_parameters: expected none, received [" in message, refused.stderr
    assert "tensors lora_A and lora_B of mlp.experts, mlp.experts.base_layer, mlp.gate)" in message
    targets = json.loads(re.search(r"target_modules=(\[.*?\])", message)[1])
    taken = train(targets)
    assert taken.returncode == 0, taken.stderr
    # They are also what a run adapts by itself.
    espalier("train", "--model", folder, "--data", data, "--out", tmp_path / "ours", "--steps", 1, "--lora-rank", RANK)
    shapes = [{name: value.shape for name, value in load_file(tmp_path / path / "adapter_model.safetensors").items()}
              for path in ("run/checkpoints/step_1", "ours/checkpoints/step_1")]  # fmt: skip
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_merging_is_that_of_peft(espalier, folder, kind, tmp_path, capsys, dtype):
    make_peft(folder, TARGETS[kind]).save_pretrained(tmp_path / "adapter")
    flags = ("--model", folder, "--adapter", tmp_path / "adapter", "-o", tmp_path / "merged", "--dtype", dtype)
    status = merge.main([str(flag) for flag in flags])
    if "lm_head" in TARGETS[kind] and CONFIGS[kind].get("tie_word_embeddings", True):
        assert status == 1 and "expected no adapter of lm_head" in capsys.readouterr().err
        return
    assert status == 0
    base = reference.load_model(folder, getattr(torch, dtype))
    before = copy.deepcopy(base.state_dict())
    merged = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    ours = reference.load_model(tmp_path / "merged", getattr(torch, dtype)).state_dict()
    # The sum of three products may round either way, and so may what it is added to.
    tolerance = 1e-15 if dtype == "float64" else 2**-9
    assert worst_error(ours, merged.state_dict()) <= tolerance
    # Transformers 5.24 keeps routers in float32; the merged ones were rounded when they were saved.
    changed = [name for name, value in ours.items()
               if not value.to(getattr(torch, dtype)).equal(before[name].to(getattr(torch, dtype)))]  # fmt: skip
    adapted = {name.replace(".lora_A.weight", "").removeprefix("base_model.model.")
               for name in load_file(tmp_path / "adapter/adapter_model.safetensors") if "lora_A" in name}  # fmt: skip
    assert {name.removesuffix(".weight") for name in changed} == adapted
    if dtype == "float64":
        rows = random_rows(9, "sft")
        together = our_logprobs(espalier, tmp_path / "merged", rows, tmp_path)
        beside = our_logprobs(espalier, folder, rows, tmp_path, "--adapter", tmp_path / "adapter")
        assert difference(together, beside) <= 1e-11


@pytest.mark.parametrize("is_low", [False, True], ids=["float64", "low"])
def test_verify_proves_the_gradients_of_adapters(espalier, folder, kind, tmp_path, is_low):
    dtype = ("bfloat16" if kind in IN_BFLOAT16 else "float32") if is_low else "float64"
    make_peft(folder, TARGETS[kind]).save_pretrained(tmp_path / "adapter")
    data = write_rows(tmp_path / "rows.jsonl", random_rows(10, "sft"))
    flags = ("--model", folder, "--data", data, "--adapter", tmp_path / "adapter", "--dtype", dtype,
             "--strategy", "partition", "--token-budget", 20, "--json")  # fmt: skip
    report = json.loads(espalier("verify", *flags, check=dtype == "float64").stdout)
    assert ".lora_" in report["grad_rel_error_worst_parameter"]
    if dtype == "float64":
        assert report["grad_rel_error_max"] <= (1e-11 if kind in RECURRENT else 1e-12)
    else:
        assert report["error_ratio_median"] <= 2  # of few rows single parameters are a matter of luck


def test_memory_and_work_are_those_of_adapters(espalier, tmp_path):
    folder = init_model(espalier, tmp_path, MODELS["qwen3"])
    data = write_rows(tmp_path / "rows.jsonl", random_rows(8, "sft"))
    plan = lambda *flags: json.loads(espalier("plan", "--model", folder, "--data", data, "--no-calibration", "--json",
                                              *flags).stdout)  # fmt: skip
    whole, adapted = plan(), plan("--lora-rank", 2, "--lora-targets", "q_proj")
    assert adapted["predicted_peak_bytes"] < 0.6 * whole["predicted_peak_bytes"]
    assert adapted["predicted_seconds"] < whole["predicted_seconds"]


REFUSED = {
    "rank 0": (("--lora-rank", 0), "--lora-rank"),
    "no such map": (("--lora-rank", 2, "--lora-targets", "q_proj,query"), "the model has no linear map `query`"),
    "an empty name": (("--lora-rank", 2, "--lora-targets", "q_proj,,v_proj"), "expected comma-separated names"),
    "the embedding": (("--lora-rank", 2, "--lora-targets", "embed_tokens"), "cannot have an adapter"),
    "alpha without a rank": (("--lora-alpha", 4), "--lora-alpha: requires --lora-rank"),
    "alpha 0": (("--lora-rank", 2, "--lora-alpha", 0), "--lora-alpha"),
    "no such folder": (("--adapter", "nowhere"), "expected the folder of an adapter, there is none"),
    "two adapters": (("--adapter", "nowhere", "--lora-rank", 2), "cannot be combined with --lora-rank"),
}


@pytest.mark.parametrize("flags, message", REFUSED.values(), ids=REFUSED)
def test_bad_flags_are_refused(espalier, model, tmp_path, flags, message):
    data = write_rows(tmp_path / "rows.jsonl", random_rows(8, "sft"))
    done = espalier("train", "--model", model, "--data", data, "--out", tmp_path / "run", *flags, check=False)
    assert done.returncode in (1, 2) and message in done.stderr, done.stderr
    assert not (tmp_path / "run/checkpoints").exists()


def test_adapters_that_do_not_fit_are_refused(espalier, model, tmp_path):
    other = init_model(espalier, tmp_path, MODELS["llama"] | {"hidden_size": 40, "head_dim": 8})
    make_peft(other, ["q_proj"]).save_pretrained(tmp_path / "adapter")
    make_peft(model, ["q_proj"], lora_dropout=0.1).save_pretrained(tmp_path / "dropout")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").write_text("mine")
    data = write_rows(tmp_path / "rows.jsonl", random_rows(8, "sft"))

    def refused(message, *arguments):
        done = espalier(*arguments, check=False)
        assert done.returncode == 1 and message in done.stderr, done.stderr
        assert done.stderr.splitlines()[-1].startswith("espalier: error: ")

    train = ("train", "--model", model, "--data", data, "--out", tmp_path / "run")
    merging = ("merge", "--model", model, "--adapter")
    misfit = "expected shape [3, 32], received [3, 40]"
    refused(misfit, *train, "--adapter", tmp_path / "adapter")
    refused(misfit, *merging, tmp_path / "adapter", "-o", tmp_path / "merged")
    refused("lora_dropout: expected 0 for training, received 0.1", *train, "--adapter", tmp_path / "dropout")
    refused("expected a new or empty folder", *merging, tmp_path / "dropout", "-o", tmp_path / "taken")
    assert [file.name for file in (tmp_path / "taken").iterdir()] == ["file"]
    assert not (tmp_path / "merged").exists() and not list(tmp_path.glob(".*partial"))
    # Merging does not mind dropout.
    espalier(*merging, tmp_path / "dropout", "-o", tmp_path / "merged")
