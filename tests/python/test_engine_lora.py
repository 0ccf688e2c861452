# SPDX-License-Identifier: Apache-2.0
"""espalier.Engine that trains an adapter, against the command line, bit for bit."""

import hashlib
import json

import numpy as np
import pytest
import torch

import espalier as package
import transformers_reference as reference
from engines import engine_of, init_model
from small_models import random_rows, write_rows

LORA = package.LoraConfig(lora_rank=2, lora_alpha=3.0, lora_targets=["q_proj", "down_proj"], seed=5)
OF_A_RUN = ["--token-budget", 24, "--learning-rate", 0.05, "--batch-size", 3, "--no-calibration"]
FILES = ("adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, espalier):
    return init_model(espalier, tmp_path_factory.mktemp("lora"))


def digests(folder):
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES}


def train(espalier, folder, data, out, dtype, *flags):
    espalier("train", "--model", folder, "--data", data, "--out", out, "--dtype", dtype,
             "--threads", torch.get_num_threads(), *OF_A_RUN, *flags)  # fmt: skip
    return out / "checkpoints/step_3"


def trained(folder, data, **options):
    engine = engine_of(folder, learning_rate=0.05, **options)
    engine.metrics = []
    for step in range(3):
        engine.metrics.append(engine.forward_backward(data, indices=range(3 * step, 3 * step + 3)))
        engine.optim_step()
    return engine


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_the_bits_are_those_of_the_command(espalier, folder, tmp_path, dtype):
    data = write_rows(tmp_path / "rows.jsonl", random_rows(81, "sft"))
    new = ["--lora-rank", 2, "--lora-alpha", 3, "--lora-targets", "q_proj,down_proj", "--seed", 5]
    checkpoint = train(espalier, folder, data, tmp_path / "run", dtype, *new)
    engine = trained(folder, data, dtype=dtype, lora=LORA)
    engine.save(tmp_path / "saved")
    assert digests(tmp_path / "saved") == digests(checkpoint)
    for ours, theirs in zip(engine.metrics, reference.read_rows(tmp_path / "run/metrics.jsonl"), strict=True):
        same = {name for name in ours if "second" not in name and "peak" not in name}
        assert {"loss", "grad_norm", "encoded_tokens"} <= same
        assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}
    # The command's checkpoint is one of the engine, too.
    loaded = engine_of(folder, dtype=dtype, lora=LORA, seed=7)
    loaded.load(checkpoint)
    loaded.save(tmp_path / "loaded")
    assert loaded.step == 3 and digests(tmp_path / "loaded") == digests(checkpoint)
    # An adapter of a folder goes on.
    goes_on = train(espalier, folder, data, tmp_path / "second", dtype, "--adapter", checkpoint)
    trained(folder, data, dtype=dtype, lora=package.LoraConfig(adapter=checkpoint)).save(tmp_path / "saved again")
    assert digests(tmp_path / "saved again") == digests(goes_on)
    # Negative control: another seed.
    trained(folder, data, dtype=dtype, lora=LORA, seed=6).save(tmp_path / "other")
    assert digests(tmp_path / "other")["adapter_model.safetensors"] != digests(checkpoint)["adapter_model.safetensors"]


def test_weights_have_no_gradients_and_checkpoints_restore_the_adapter(folder, tmp_path):
    rows = random_rows(82, "sft")
    engine = engine_of(folder, lora=LORA, learning_rate=0.05)
    before = engine.logprobs(rows)
    assert all(map(np.array_equal, before, engine_of(folder).logprobs(rows)))  # B is zero
    engine.forward_backward(rows)
    names = set(engine.gradients())
    assert names and all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in names)
    engine.optim_step()
    engine.save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved/adapter_config.json").read_text())["r"] == 2
    after = engine.logprobs(rows)
    assert not all(map(np.array_equal, before, after))
    fresh = engine_of(folder, lora=LORA, seed=9)
    fresh.load(tmp_path / "saved")
    assert fresh.step == 1 and all(map(np.array_equal, fresh.logprobs(rows), after))
    sampled = [each.sample([[1, 2, 3]], temperature=0, max_new_tokens=4, stop_ids=[])[0]["logprobs"] for each in (engine, fresh)]
    assert np.array_equal(*sampled) and not np.array_equal(
        sampled[0], engine_of(folder).sample([[1, 2, 3]], temperature=0, max_new_tokens=4, stop_ids=[])[0]["logprobs"])  # fmt: skip


@pytest.mark.parametrize("options, fault", [
    ({}, "expected a checkpoint of all weights, as the engine trains, received one of an adapter"),
    ({"lora": LORA.replace(lora_alpha=4)}, r"expected an adapter with scale 2 \(alpha over rank\), .*, received 1.5"),
    ({"lora": LORA.replace(lora_targets="q_proj")},
     r"expected an adapter with .*1\.self_attn\.q_proj\.lora_A\.weight \[2, \d+\]|expected an adapter with .*, received one with"),
    ({"lora": LORA.replace(lora_rank=4, lora_alpha=6)}, r"lora_A\.weight \[4, \d+\], as the engine's, received one with .* \[2, \d+\]"),
    ({"lora": LORA, "optimizer": "sgd"}, "expected a checkpoint with optimizer sgd"),
])  # fmt: skip
def test_checkpoints_of_other_adapters_change_nothing(folder, tmp_path, options, fault):
    engine_of(folder, lora=LORA).save(tmp_path / "saved")
    engine = engine_of(folder, **options)
    before = engine.logprobs([[1, 2, 3]])[0]
    with pytest.raises(package.InputError, match=fault):
        engine.load(tmp_path / "saved")
    assert np.array_equal(engine.logprobs([[1, 2, 3]])[0], before)
    engine.save(tmp_path / "whole")  # what it is can be saved still
    if not options:
        with pytest.raises(package.InputError, match="expected a checkpoint of an adapter, .*, received one of all weights"):
            engine_of(folder, lora=LORA).load(tmp_path / "whole")


@pytest.mark.parametrize("options, fault", [
    ({"lora_alpha": 8}, "lora_alpha: requires lora_rank"),
    ({"lora": LORA, "adapter": "nowhere"}, "adapter nowhere: cannot be combined with lora_rank"),
    ({"lora": LORA, "lora_targets": "query"}, "lora-targets: the model has no linear map `query`"),
])  # fmt: skip
def test_adapters_that_cannot_be_trained(folder, options, fault):
    with pytest.raises(package.InputError, match=fault):
        engine_of(folder, **options)
