# SPDX-License-Identifier: Apache-2.0
"""Options as dataclasses: that they are those of the engine, what they keep, and what the engine does with them."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import espalier as package
from conftest import REPOSITORY
from engines import engine_of, init_model
from small_models import random_rows

CLASSES = [package.EngineConfig, package.LoraConfig, package.ObjectiveConfig, package.SamplingParams]
OTHERS = {bool: True, int: 3, float: 0.25}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, espalier):
    return init_model(espalier, tmp_path_factory.mktemp("options"))


def test_the_classes_are_written_from_the_description():
    done = subprocess.run([sys.executable, REPOSITORY / "scripts/write_options.py"], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(REPOSITORY / "python")})  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == (REPOSITORY / "python/espalier/options.py").read_text(), (
        "write it again: PYTHONPATH=python scripts/write_options.py > python/espalier/options.py")  # fmt: skip


def test_the_flags_of_commands_are_written_from_the_description():
    done = subprocess.run([sys.executable, REPOSITORY / "scripts/write_options.py", "--flags"], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(REPOSITORY / "python")})  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == (REPOSITORY / "python/espalier/commands/flags.json").read_text(), (
        "write it again: PYTHONPATH=python scripts/write_options.py --flags > python/espalier/commands/flags.json")  # fmt: skip


def test_they_load_without_what_is_compiled(tmp_path):
    shutil.copytree(REPOSITORY / "python/espalier", tmp_path / "espalier", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    code = ("import sys, espalier; print(espalier.EngineConfig(dtype='float64').to_json() != '', "
            "[name for name in ('torch', 'numpy', 'espalier._core') if name in sys.modules])")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/",
                          env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"})  # fmt: skip
    assert done.stdout == "True []\n", done.stderr


@pytest.mark.parametrize("kind", CLASSES)
def test_json_gives_them_back(kind):
    changed = {field.name: OTHERS.get(type(field.default), "text") for field in dataclasses.fields(kind)}
    options = kind(**changed)
    assert kind.from_json(options.to_json()) == options != kind()
    assert kind.from_json("{}") == kind() and kind().given() == {} and options.given() == changed
    assert hash(options) == hash(kind(**changed))
    assert kind().replace(**changed) == options


def test_lists_and_paths_are_kept_as_json_has_them():
    lora = package.LoraConfig(lora_rank=2, lora_targets=["q_proj", "v_proj"], adapter=Path("a/b"))
    assert lora.lora_targets == ("q_proj", "v_proj") and lora.adapter == "a/b"
    assert package.LoraConfig.from_json(lora.to_json()) == lora
    assert json.loads(lora.to_json())["lora_targets"] == ["q_proj", "v_proj"]


@pytest.mark.parametrize("text, fault", [
    ('{"learning_rat": 1}', "EngineConfig: expected only dtype, .*, prefix_cache, received learning_rat$"),
    ("[1, 2]", r"EngineConfig: expected a JSON object, received \[1, 2\]$"),
    ("{", "EngineConfig: expected a JSON object, received text that is not JSON: "),
])  # fmt: skip
def test_json_that_cannot_be_used(text, fault):
    with pytest.raises(package.InputError, match=fault):
        package.EngineConfig.from_json(text)


def test_they_are_frozen_and_by_name():
    with pytest.raises(dataclasses.FrozenInstanceError):
        package.EngineConfig().dtype = "float64"
    with pytest.raises(TypeError):
        package.EngineConfig("float64")
    with pytest.raises(package.InputError, match="SamplingParams: expected only samples, .*, received sample$"):
        package.SamplingParams().replace(sample=2)


def test_an_engine_of_a_config_is_one_of_keyword_arguments(folder):
    rows = random_rows(71, "grpo")
    options = {"dtype": "float64", "token_budget": 24, "threads": torch.get_num_threads()}
    objective = {"clip_high": 0.1, "normalize": "sequence"}
    expected = package.Engine(folder, **options).forward_backward(rows, "grpo", **objective)
    config, loss = package.EngineConfig(**options), package.ObjectiveConfig(objective="grpo", **objective)
    of_engine = package.Engine(folder, config=config, objective=loss)
    losses = [of_engine.forward_backward(rows)["loss"], of_engine.forward_backward(rows, loss)["loss"],
              package.Engine(folder, config=config).forward_backward(rows, loss)["loss"]]  # fmt: skip
    assert losses == [expected["loss"]] * 3
    # An objective by name has the options of the call alone.
    assert of_engine.forward_backward(rows, "grpo")["loss"] != expected["loss"]
    assert of_engine.forward_backward(rows, "grpo", **objective)["loss"] == expected["loss"]


def test_keyword_arguments_count_more(folder):
    config = package.EngineConfig(dtype="float64", learning_rate=0.5, token_budget=24, threads=torch.get_num_threads())
    engine = package.Engine(folder, config=config, learning_rate=0.25, objective=package.ObjectiveConfig(shared_targets="once"))
    assert engine.learning_rate == 0.25 and "float64" in repr(engine)
    rows = random_rows(72, "sft")
    once, summed = engine.forward_backward(rows)["loss"], engine.forward_backward(rows, shared_targets="sum")["loss"]
    assert (once, summed) == tuple(engine_of(folder).forward_backward(rows, shared_targets=word)["loss"]
                                   for word in ("once", "sum"))  # fmt: skip
    assert once != summed


def test_sampling_by_params(folder):
    prompts = [[1, 2, 3], [1, 2]]
    params = package.SamplingParams(samples=2, max_new_tokens=4, temperature=0.5, stop_ids=[], seed=7)
    engine = engine_of(folder)
    ids = lambda rows: [row["input_ids"].tolist() for row in rows]
    found = ids(engine.sample(prompts, params))
    assert found == ids(engine.sample(prompts, samples=2, max_new_tokens=4, temperature=0.5, stop_ids=[], seed=7))
    assert [len(row) for row in found] == [7, 7, 6, 6]
    assert len(engine.sample(prompts, params, samples=1)) == 2
    stopped = ids(engine.sample(prompts, params, stop_ids=np.arange(61)))
    assert [len(row) for row in stopped] == [4, 4, 3, 3]
    # Without a seed each call draws its own.
    fresh, seeded = engine_of(folder), params.replace(seed=None)
    assert ids(fresh.sample(prompts, seeded)) == ids(engine.sample(prompts, params, seed=0))
    assert ids(fresh.sample(prompts, seeded)) == ids(engine.sample(prompts, params, seed=1))


@pytest.mark.parametrize("call, fault", [
    (lambda folder: package.Engine(folder, config={"dtype": "float64"}), "config: expected EngineConfig, received dict"),
    (lambda folder: package.Engine(folder, config=package.LoraConfig()), "config: expected EngineConfig, received LoraConfig"),
    (lambda folder: package.Engine(folder, objective="grpo"), "objective: expected ObjectiveConfig, received str"),
    (lambda folder: package.Engine(folder, lora=package.LoraConfig(lora_alpha=8)),
     "lora: expected a LoraConfig with lora_rank or adapter, received one with neither"),
    (lambda folder: package.Engine(folder, config=package.EngineConfig(learning_rate=-1)),
     "learning_rate: expected a number from 0 to 1e.06, received -1"),
    (lambda folder: package.Engine(folder, config=package.EngineConfig(memory_budget="8")),
     "memory_budget: expected a size with its unit"),
    (lambda folder: engine_of(folder).sample([[1]], package.EngineConfig()), "params: expected SamplingParams, received"),
    (lambda folder: engine_of(folder).sample([[1]], package.SamplingParams(top_p=2.0)), "top_p: expected a number from 0 to 1"),
])  # fmt: skip
def test_options_that_cannot_be_used(folder, call, fault):
    with pytest.raises(package.InputError, match=fault):
        call(folder)
