# SPDX-License-Identifier: Apache-2.0
"""Several adapters of one espalier.Engine in turns, against an Engine for each, bit for bit."""

import hashlib
import json

import numpy as np
import pytest

import espalier as package
from engines import engine_of, init_model, worst_error
from small_models import random_rows

RATE = {"learning_rate": 0.05, "weight_decay": 0.1}
SMALL = package.LoraConfig(lora_rank=2, lora_alpha=3.0, lora_targets=["q_proj", "o_proj"], seed=5)
LARGE = package.LoraConfig(lora_rank=5, lora_rslora=True, seed=6)


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5_moe"])
def any_folder(request, tmp_path_factory, espalier):
    return init_model(espalier, tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, espalier):
    return init_model(espalier, tmp_path_factory.mktemp("adapters"))


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def equal(first, second):
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


def seen(engine, rows):
    """What an engine says of its adapter: log-probabilities, gradients, samples."""
    samples = engine.sample([[1, 2, 3], [1, 2]], samples=2, max_new_tokens=4, stop_ids=[], seed=3)
    return {**{f"row {k}": row for k, row in enumerate(engine.logprobs(rows))}, **engine.gradients(),
            **{f"sample {k}": row["input_ids"] for k, row in enumerate(samples)},
            **{f"sampled {k}": row["logprobs"] for k, row in enumerate(samples)}}  # fmt: skip


def loss_of(metrics):
    return metrics["loss"], metrics["grad_norm"], metrics["encoded_tokens"]


def in_turns(engines, rows, use):
    """Three steps of each adapter on its own rows, of two calls each, in an order that interleaves everything."""
    told = []
    for step in range(3):
        for half in (0, 1):
            for k, engine in enumerate(engines):
                use(k)
                told.append(loss_of(engine.forward_backward(rows[k], indices=range(4 * half + step, 4 * half + step + 3))))
        for k, engine in reversed(list(enumerate(engines))):
            use(k)
            told.append(seen(engine, rows[k]))
            told.append(engine.optim_step(learning_rate=0.05 / (k + step + 1)))
            told.append(seen(engine, rows[k]))
    return told


def same(first, second):
    return len(first) == len(second) and all(
        equal(a, b) if isinstance(a, dict) else a == b for a, b in zip(first, second, strict=True))  # fmt: skip


def test_adapters_in_turns_are_engines_of_their_own(any_folder, tmp_path):
    rows = [random_rows(91, "sft"), random_rows(92, "sft")]
    alone = [engine_of(any_folder, lora=lora, **RATE) for lora in (SMALL, LARGE)]
    expected = in_turns(alone, rows, lambda k: None)
    engine = engine_of(any_folder, adapters=True, **RATE)
    adapters = [engine.new_adapter(SMALL), engine.new_adapter(LARGE)]
    assert same(in_turns([engine, engine], rows, lambda k: engine.use(adapters[k])), expected)
    for k, adapter in enumerate(adapters):
        engine.use(adapter)
        assert engine.adapter is adapter and engine.step == 3
        engine.save(tmp_path / f"shared {k}")
        alone[k].save(tmp_path / f"alone {k}")
        assert digests(tmp_path / f"shared {k}") == digests(tmp_path / f"alone {k}")
    # Negative control: an adapter that begins otherwise.
    adapters = [engine.new_adapter(SMALL, seed=7), engine.new_adapter(LARGE)]
    assert not same(in_turns([engine, engine], rows, lambda k: engine.use(adapters[k])), expected)


def test_an_adapter_of_the_engine_takes_turns_with_others(folder):
    rows = [random_rows(93, "sft"), random_rows(94, "sft")]
    expected = in_turns([engine_of(folder, lora=lora, **RATE) for lora in (SMALL, LARGE)], rows, lambda k: None)
    engine = engine_of(folder, lora=SMALL, **RATE)
    adapters = [engine.adapter, engine.new_adapter(LARGE)]
    assert same(in_turns([engine, engine], rows, lambda k: engine.use(adapters[k])), expected)


def test_the_weights_alone(folder, tmp_path):
    rows = random_rows(95, "sft")
    plain, engine = engine_of(folder), engine_of(folder, adapters=True, **RATE)
    assert engine.adapter is None and equal(seen(engine, rows), seen(plain, rows))
    engine.use(engine.new_adapter(SMALL))
    engine.forward_backward(rows)
    assert set(engine.gradients()) and all(".lora_" in name for name in engine.gradients())
    engine.optim_step()
    assert not equal(seen(engine, rows), seen(plain, rows))
    engine.use(None)
    assert equal(seen(engine, rows), seen(plain, rows)) and engine.gradients() == {} and engine.step == 0
    for call in (lambda: engine.forward_backward(rows), lambda: engine.load(tmp_path / "saved")):
        engine.use(None)
        plain.save(tmp_path / "saved") if not (tmp_path / "saved").exists() else None
        with pytest.raises(package.InputError, match="expected an adapter of new_adapter in use, .*, received none"):
            call()
    with pytest.raises(package.InputError, match="optim_step: expected gradients"):
        engine.optim_step()
    engine.save(tmp_path / "weights")  # no optimiser was made for them
    assert not (tmp_path / "weights/optimizer.safetensors").exists() and (tmp_path / "saved/optimizer.safetensors").exists()
    assert digests(tmp_path / "weights")["model.safetensors"] == digests(tmp_path / "saved")["model.safetensors"]


def test_weights_are_trained_beside_adapters(folder):
    rows, others = random_rows(96, "sft"), random_rows(97, "sft")
    plain, engine = engine_of(folder, **RATE), engine_of(folder, **RATE)
    adapter = engine.new_adapter(SMALL)
    for step in range(2):
        assert loss_of(engine.forward_backward(rows)) == loss_of(plain.forward_backward(rows))
        engine.use(adapter)
        engine.forward_backward(others)
        assert all(".lora_" in name for name in engine.gradients())
        engine.use(None)
        assert equal(seen(engine, rows), seen(plain, rows))
        assert engine.optim_step() == plain.optim_step()
        engine.use(adapter)
        assert engine.optim_step()["step"] == step + 1
        engine.use(None)
    assert equal(seen(engine, rows), seen(plain, rows))


def test_copies_do_not_move(folder, tmp_path):
    rows = random_rows(98, "sft")
    engine = engine_of(folder, adapters=True, **RATE)
    adapter = engine.new_adapter(SMALL)
    engine.use(adapter)
    engine.forward_backward(rows)
    engine.optim_step()
    before = seen(engine, rows)
    copy = adapter.copy()
    engine.forward_backward(rows)
    engine.optim_step()
    assert not equal(seen(engine, rows), before)
    engine.use(copy)
    assert equal(seen(engine, rows), before) and engine.step == 1
    with pytest.raises(package.InputError, match="expected an adapter of new_adapter in use, .*, received a copy, which cannot"):
        engine.forward_backward(rows)
    assert equal(seen(engine, rows), before)
    # It is saved without optimiser, and opens as a new adapter, here and in an adapter that there is.
    engine.save(tmp_path / "copy")
    assert not (tmp_path / "copy/optimizer.safetensors").exists()
    engine.use(engine.new_adapter(adapter=tmp_path / "copy"))
    assert equal(seen(engine, rows), before) and engine.step == 0
    engine.use(adapter)
    moved = seen(engine, rows)
    with pytest.raises(package.InputError, match='expected a checkpoint with optimizer adamw, .*, received "none"'):
        engine.load(tmp_path / "copy")
    assert equal(seen(engine, rows), moved)
    engine.load(tmp_path / "copy", optimizer=False)
    assert equal(seen(engine, rows), before) and engine.step == 0


@pytest.mark.parametrize("options", [{"adapters": True}, {"dtype": "bfloat16"}])
def test_weights_are_loaded_without_the_optimiser(folder, tmp_path, options):
    rows = random_rows(99, "sft")
    engine = engine_of(folder, **RATE | options)
    engine.use(engine.new_adapter(SMALL) if "adapters" in options else None)
    for _ in range(2):
        engine.forward_backward(rows)
        engine.optim_step()
    engine.save(tmp_path / "saved")
    engine.forward_backward(rows)
    engine.optim_step()
    engine.load(tmp_path / "saved", optimizer=False)
    other = (engine_of(folder, **RATE, adapter=tmp_path / "saved") if "adapters" in options
             else engine_of(tmp_path / "saved", **RATE | options))  # fmt: skip
    for each in (engine, other):
        assert each.step == 0 and each.gradients() == {}
        each.forward_backward(rows)
        each.optim_step()
    assert equal(seen(engine, rows), seen(other, rows))
    engine.load(tmp_path / "saved")  # negative control: with it
    assert engine.step == 2
    engine.forward_backward(rows)
    engine.optim_step()
    assert not equal(seen(engine, rows), seen(other, rows))


def test_a_failure_leaves_other_adapters_alone(folder):
    rows = random_rows(100, "sft")
    engine = engine_of(folder, adapters=True, **RATE)
    kept, failing = engine.new_adapter(SMALL), engine.new_adapter(LARGE)
    engine.use(kept)
    engine.forward_backward(rows)
    before = engine.gradients()
    engine.use(failing)
    engine.forward_backward(rows)
    with pytest.raises(ZeroDivisionError):
        engine.forward_backward(rows, progress=lambda done, total: 1 / 0)
    assert engine.gradients() == {}
    engine.use(kept)
    assert before and equal(engine.gradients(), before)


def test_no_switch_inside_a_call(folder):
    rows = random_rows(101, "sft")
    engine = engine_of(folder, adapters=True, **RATE)
    first, second = engine.new_adapter(SMALL), engine.new_adapter(LARGE)
    engine.use(first)
    for call in (lambda: engine.use(second), lambda: engine.use(None), first.copy, lambda: engine.new_adapter(SMALL)):
        with pytest.raises(package.InputError, match="expected one call at a time, received one during another"):
            engine.forward_backward(rows, progress=lambda done, total: call())
        assert engine.adapter is first and engine.gradients() == {}
    engine.forward_backward(rows)
    assert set(engine.gradients()) == {name for name in engine.gradients() if "q_proj" in name or "o_proj" in name}


def test_adapters_that_cannot_be_used(folder):
    engine = engine_of(folder, adapters=True)
    other = engine_of(folder, adapters=True).new_adapter(SMALL)
    for adapter in (other, other.copy(), "adapter"):
        with pytest.raises(package.InputError, match="adapter: expected one of this engine, received"):
            engine.use(adapter)
    assert engine.adapter is None
    with pytest.raises(package.InputError, match="lora: expected a LoraConfig with lora_rank or adapter, received one with neither"):
        engine.new_adapter(lora_alpha=2)
    with pytest.raises(package.InputError, match="lora-targets: the model has no linear map `query`"):
        engine.new_adapter(SMALL, lora_targets="query")
    with pytest.raises(package.InputError, match="LoraConfig: expected only lora_rank, .*, received learning_rate"):
        engine.new_adapter(SMALL, learning_rate=1)


def weighted(weights):
    """A loss of rows with these weights."""
    return lambda logprobs, positions: -sum(
        (weight * row * (positions[k] + 1)).sum() for k, (weight, row) in enumerate(zip(weights, logprobs)))  # fmt: skip


PLANS = [{"token_budget": 24}, {"strategy": "partition", "token_budget": 8},
         {"strategy": "partition", "token_budget": 8, "checkpoint_activations": "piece"},
         {"token_budget": 40, "checkpoint_activations": "layer"}]  # fmt: skip


@pytest.mark.parametrize("kind", ["olmo2", "gemma2", "qwen3_5_moe", "nemotron_h"])
@pytest.mark.parametrize("plan", PLANS, ids=["packing", "partition", "piece", "layer"])
def test_rows_of_several_adapters_in_one_pass(kind, plan, tmp_path, espalier):
    engine = engine_of(init_model(espalier, tmp_path, kind), adapters=True, **RATE, **plan)
    tied = kind in ("gemma2", "qwen3_5_moe")
    every = package.LoraConfig(lora_rank=3, lora_targets=["all-linear"] if tied else ["all-linear", "lm_head"], seed=8)
    adapters = [engine.new_adapter(lora) for lora in (every, package.LoraConfig(lora_rank=2, seed=9), every)]
    rows = random_rows(99, "sft")
    for number, adapter in enumerate(adapters):
        engine.use(adapter)
        engine.forward_backward(rows, indices=range(number, number + 4))
        engine.optim_step()  # B is zero before it
    engine.use(None)
    of_row = [adapters[number % 3] for number in range(len(rows))]
    weights = [0.5, -1.0, 2.0, 1.5, 1.0, 0.25, -0.5, 3.0, 1.0]
    losses = [({"objective": weighted(weights)}, lambda own: {"objective": weighted([weights[k] for k in own])}),
              ({"normalize": 7.0, "entropy_coef": 0.1},) * 2, ({"normalize": 7.0, "log_entropy": True},) * 2]  # fmt: skip
    for joint, apart in losses:
        metrics = engine.forward_backward(rows, adapters=of_row, **joint)
        found, loss = [], 0.0
        for number, adapter in enumerate(adapters):
            engine.use(adapter)
            found.append(engine.gradients())
            engine.zero_gradients()
            own = list(range(number, len(rows), 3))
            loss += engine.forward_backward([rows[k] for k in own], **(apart(own) if callable(apart) else apart))["loss"]
            assert worst_error(found[-1], engine.gradients()) < 1e-11
            engine.zero_gradients()
        engine.use(None)
        assert metrics["loss"] == pytest.approx(loss, rel=1e-12)
        assert metrics["grad_norm"] == pytest.approx(
            np.sqrt(sum(np.square(value).sum() for each in found for value in each.values())), rel=1e-12)
    # Negative control: rows of the wrong adapters.
    engine.forward_backward(rows, weighted(weights), adapters=of_row[1:] + of_row[:1])
    engine.use(adapters[0])
    wrong = engine.gradients()
    engine.zero_gradients()
    engine.forward_backward(rows[::3], weighted(weights[::3]))
    assert worst_error(wrong, engine.gradients()) > 1e-3


def test_one_pass_of_several_adapters_is_refused(folder, tmp_path):
    engine, other = engine_of(folder, adapters=True, **RATE), engine_of(folder, adapters=True)
    adapter = engine.new_adapter(SMALL)
    rows = [[1, 2, 3], [1, 2, 4]]
    for adapters, message in [
            ([adapter], "adapters: expected one for each of 2 rows, received 1"),
            ([adapter, None], "adapter: expected one of this engine, received None"),
            ([adapter, other.new_adapter(SMALL)], "adapter: expected one of this engine, received <"),
            ([adapter, adapter.copy()], "expected an adapter of new_adapter in use, which can be trained, received a copy")]:  # fmt: skip
        with pytest.raises(package.InputError, match=message):
            engine.forward_backward(rows, adapters=adapters)
    # A function that fails leaves no gradients.
    pair = [adapter, engine.new_adapter(LARGE)]
    engine.forward_backward(rows, adapters=pair)
    with pytest.raises(ZeroDivisionError):
        engine.forward_backward(rows, lambda logprobs, positions: 1 / 0, adapters=pair)
    for each in pair:
        engine.use(each)
        assert engine.gradients() == {}


def test_dropout_is_refused_in_training_alone(folder, tmp_path):
    rows = random_rows(90, "sft")
    engine = engine_of(folder, adapters=True, **RATE)
    engine.use(engine.new_adapter(SMALL))
    engine.forward_backward(rows)
    engine.optim_step()
    engine.save(tmp_path / "adapter")
    expected = engine.logprobs(rows)
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config | {"lora_dropout": 0.1}))
    engine.use(engine.new_adapter(adapter=tmp_path / "adapter"))
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(engine.logprobs(rows), expected, strict=True))
    engine.save(tmp_path / "merged", merged=True)
    merged = package.Engine(tmp_path / "merged", dtype="float64").logprobs(rows)
    assert all(np.allclose(ours, theirs, rtol=1e-12, atol=1e-12) for ours, theirs in zip(merged, expected, strict=True))
    refused = "adapter_config.json: lora_dropout: expected 0 for training, received 0.1"
    with pytest.raises(package.InputError, match=refused):
        engine.forward_backward(rows)
    with pytest.raises(package.InputError, match=refused):
        engine_of(folder, adapter=tmp_path / "adapter")
    for arguments, message in (({}, "expected a new or empty folder"), ({"dtype": "float32"}, "dtype: expected none with merged")):
        with pytest.raises(package.InputError, match=message):
            engine.save(tmp_path / "merged", merged=True, **arguments)
    engine.use(None)
    with pytest.raises(package.InputError, match="merged: expected an adapter in use"):
        engine.save(tmp_path / "none", merged=True)
    assert not (tmp_path / "none").exists()
