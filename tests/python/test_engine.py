# SPDX-License-Identifier: Apache-2.0
"""espalier.Engine against the command line, bit for bit, and against Transformers, in float64."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import espalier as package
import transformers_reference as reference
from engines import EXACT, engine_of, files_of, init_model, transformers_gradients, worst_error
from small_models import random_rows, write_rows

OF_A_RUN = ["--token-budget", 24, "--learning-rate", 0.01, "--weight-decay", 0.1, "--batch-size", 3]
AS_A_RUN = {"token_budget": 24, "learning_rate": 0.01, "weight_decay": 0.1, "threads": torch.get_num_threads()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, espalier):
    return init_model(espalier, tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module", params=["qwen3", "llama", "qwen3_5", "qwen3_moe", "gpt_oss"])
def any_folder(request, tmp_path_factory, espalier):
    return init_model(espalier, tmp_path_factory.mktemp(request.param), request.param)


def train(espalier, model, data, out, *flags):
    espalier("train", "--model", model, "--data", data, "--out", out, "--threads", torch.get_num_threads(),
             "--no-calibration", *OF_A_RUN, *flags)  # fmt: skip
    return out / "checkpoints", reference.read_rows(out / "metrics.jsonl")


def steps(engine, found, *objective, first=0, last=3):
    """Steps of three rows, as those of the command."""
    metrics = []
    for step in range(first, last):
        done = engine.forward_backward(found, *objective, indices=range(3 * step, 3 * step + 3))
        update = engine.optim_step()
        assert update["grad_norm"] == done["grad_norm"] and update["step"] == engine.step
        metrics.append(done)
    return metrics


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("objective", ["sft", "grpo"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_the_bits_are_those_of_the_command(espalier, folder, tmp_path, dtype, objective, optimizer):
    data = write_rows(tmp_path / "rows.jsonl", random_rows(21, objective))
    flags = ["--dtype", dtype, "--optimizer", optimizer]
    checkpoints, lines = train(espalier, folder, data, tmp_path / "run", *flags, "--objective", objective)
    engine = package.Engine(folder, dtype=dtype, optimizer=optimizer, **AS_A_RUN)
    metrics = steps(engine, package.read(data), objective)
    engine.save(tmp_path / "saved")
    assert files_of(tmp_path / "saved") == files_of(checkpoints / "step_3")
    for ours, theirs in zip(metrics, lines, strict=True):
        same = set(ours) - {name for name in ours if "second" in name or "peak" in name}
        assert {"loss", "grad_norm", "flat_tokens", "tree_tokens", "loss_terms"} <= same
        assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}
    assert ("clip_fraction" in metrics[0]) == (objective == "grpo")


def test_other_options_give_other_bits(espalier, folder, tmp_path):
    """Negative control of the comparison of bits."""
    data = write_rows(tmp_path / "rows.jsonl", random_rows(21, "sft"))
    checkpoints, _ = train(espalier, folder, data, tmp_path / "run", "--dtype", "float64")
    engine = package.Engine(folder, dtype="float64", **AS_A_RUN | {"weight_decay": 0.1 + 1e-9})
    steps(engine, package.read(data))
    engine.save(tmp_path / "saved")
    assert files_of(tmp_path / "saved") != files_of(checkpoints / "step_3")


@pytest.mark.parametrize("objective", ["sft", "grpo"])
@pytest.mark.parametrize("strategy", ["partition", "tree-packing", "sequence-packing"])
def test_gradients_are_those_of_transformers(any_folder, objective, strategy):
    rows = random_rows(22, objective)
    loss_of = {"sft": reference.sft_loss, "grpo": reference.grpo_loss}[objective]
    loss, expected = transformers_gradients(any_folder, lambda model: loss_of(model, rows))
    engine = engine_of(any_folder, strategy=strategy)
    metrics = engine.forward_backward(rows, objective)
    gradients = engine.gradients()
    assert metrics["loss"] == pytest.approx(loss, rel=EXACT)
    assert worst_error(gradients, expected) <= EXACT
    norm = np.sqrt(sum(np.square(gradient).sum() for gradient in gradients.values()))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=EXACT)
    assert all(gradient.dtype == np.float64 for gradient in gradients.values())


def test_the_comparison_notices_a_lost_row(folder):
    """Negative control."""
    rows = random_rows(22, "sft")
    _, expected = transformers_gradients(folder, lambda model: reference.sft_loss(model, rows[:-3]))
    engine = engine_of(folder)
    engine.forward_backward(rows)
    assert worst_error(engine.gradients(), expected) > 1e-6


def test_calls_add_up_to_one_step(folder):
    rows = random_rows(23, "sft")
    whole = engine_of(folder)
    loss = whole.forward_backward(rows)["loss"]
    weights = sum(sum(reference.weights_of(row)[1:]) for row in rows)
    parts = engine_of(folder)
    losses = [parts.forward_backward(part, normalize=weights)["loss"] for part in (rows[:4], rows[4:])]
    assert sum(losses) == pytest.approx(loss, rel=EXACT)
    assert worst_error(parts.gradients(), whole.gradients()) <= EXACT
    # Negative control: with separate normalisers they are another step.
    parts.zero_gradients()
    assert parts.gradients() == {}
    for part in (rows[:4], rows[4:]):
        parts.forward_backward(part)
    assert worst_error(parts.gradients(), whole.gradients()) > 1e-2


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_logprobs_are_those_of_the_command(espalier, any_folder, tmp_path, dtype):
    rows = random_rows(24, "sft")
    data = write_rows(tmp_path / "rows.jsonl", rows)
    espalier("logprobs", "--model", any_folder, "--data", data, "-o", tmp_path / "out.jsonl", "--dtype", dtype,
             "--token-budget", 24, "--threads", torch.get_num_threads())  # fmt: skip
    theirs = [line["logprobs"] for line in reference.read_rows(tmp_path / "out.jsonl")]
    ours = engine_of(any_folder, dtype=dtype).logprobs(rows)
    assert [array.dtype for array in ours] == [np.dtype(dtype)] * len(rows)
    for array, row, line in zip(ours, rows, theirs, strict=True):
        assert array.shape == (len(row["input_ids"]),) and array[0] == 0 and line[0] is None
        assert array[1:].tolist() == [float(np.dtype(dtype).type(value)) for value in line[1:]]
    # They are the policy that grpo compares with: with them every ratio is 1.
    policy = [{**row, "advantage": 1.0, "logprobs": array} for row, array in zip(rows, ours)]
    engine = engine_of(any_folder, dtype=dtype)
    assert engine.forward_backward(policy, "grpo")["ratio_mean"] == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_top_logprobs_are_those_of_the_command(espalier, any_folder, tmp_path, dtype):
    data = write_rows(tmp_path / "rows.jsonl", random_rows(25, "sft"))
    espalier("logprobs", "--model", any_folder, "--data", data, "--dtype", dtype, "--token-budget", 24, "--top-k", 3,
             "-o", tmp_path / "out.jsonl")  # fmt: skip
    engine = engine_of(any_folder, dtype=dtype)
    rows, logprobs = engine.topk_logprobs(data, 3), engine.logprobs(data)
    for row, plain, expected in zip(rows, logprobs, reference.read_rows(tmp_path / "out.jsonl"), strict=True):
        assert np.array_equal(row.logprobs, plain) and row.values.dtype == plain.dtype and row.ids.dtype == np.int32
        assert row.ids.shape == row.values.shape == (len(plain), 3) and (row.ids[0] == -1).all() and (row.values[0] == 0).all()
        assert row.ids[1:].tolist() == expected["topk_ids"][1:]
        assert np.array_equal(row.values[1:], np.asarray(expected["topk_logprobs"][1:], plain.dtype).reshape(-1, 3))


def test_top_logprobs_are_those_of_transformers(any_folder):
    engine, rows = engine_of(any_folder), [[11, 12, 13, 14, 15], [11, 12, 13, 16], [11, 3, 4]]
    model = reference.load_model(any_folder, torch.float64)
    for row, found in zip(rows, engine.topk_logprobs(rows, 61), strict=True):
        with torch.no_grad(), reference.norms_in_model_dtype(torch.float64):
            every = torch.log_softmax(model(torch.tensor([row])).logits[0].double(), -1).numpy()
        for place in range(1, len(row)):
            assert np.abs(found.values[place] - np.sort(every[place - 1])[::-1]).max() < EXACT
            assert np.array_equal(np.sort(found.ids[place]), np.arange(61))
            assert np.abs(every[place - 1][found.ids[place]] - found.values[place]).max() < EXACT
            assert abs(found.logprobs[place] - every[place - 1][row[place]]) < EXACT


@pytest.mark.parametrize("k", [0, 62, 1.5])
def test_top_logprobs_of_no_number(folder, k):
    with pytest.raises(package.InputError, match="k: expected"):
        engine_of(folder).topk_logprobs([[1, 2, 3]], k)


def test_rows_in_every_form_are_the_same(folder, tmp_path):
    sequences = [row["input_ids"] for row in random_rows(25, "sft")]
    rows = [{"input_ids": ids} for ids in sequences]
    package.write(tmp_path / "rows.safetensors", rows)
    package.write(tmp_path / "rows.jsonl.gz", rows)
    offsets = np.cumsum([0, *map(len, sequences)], dtype=np.int64)
    forms = [
        rows,
        sequences,
        [np.array(ids, np.int32) for ids in sequences],
        [torch.tensor(ids) for ids in sequences],
        (offsets, np.concatenate(sequences).astype(np.int32)),
        tmp_path / "rows.safetensors",
        [str(tmp_path / "rows.jsonl.gz")],
        package.read(tmp_path / "rows.safetensors"),
        package.trajectories(rows),
    ]
    engine = engine_of(folder)
    losses = {engine.forward_backward(form)["loss"] for form in forms}
    assert len(losses) == 1
    assert losses != {engine.forward_backward(rows[1:])["loss"]}  # negative control


def test_modes_of_pytorch_make_no_difference(folder):
    rows = random_rows(26, "sft")
    engine = engine_of(folder, dtype="float32")
    expected = engine.forward_backward(rows)["loss"], engine.gradients(), engine.logprobs(rows)
    for mode in (torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)):
        engine.zero_gradients()
        with mode():
            found = engine.forward_backward(rows)["loss"], engine.gradients(), engine.logprobs(rows)
        assert found[0] == expected[0]
        for ours, theirs in zip(found[1].values(), expected[1].values(), strict=True):
            assert np.array_equal(ours, theirs)
        assert all(map(np.array_equal, found[2], expected[2]))


def test_routers_losses_are_those_of_the_command(espalier, tmp_path):
    folder = init_model(espalier, tmp_path / "moe", "qwen3_moe")
    data = write_rows(tmp_path / "rows.jsonl", random_rows(27, "sft"))
    _, (line, *_) = train(espalier, folder, data, tmp_path / "run", "--dtype", "float64", "--steps", 1,
                          "--router-aux-loss-coef", 0.01, "--router-z-loss-coef", 0.02)  # fmt: skip
    metrics = engine_of(folder).forward_backward(data, indices=[0, 1, 2], router_aux_loss_coef=0.01, router_z_loss_coef=0.02)
    for name in ("loss", "router_aux_loss", "router_z_loss", "expert_load_max", "grad_norm"):
        assert metrics[name] == line[name]


def test_options_are_the_flags_of_the_command(espalier):
    help_text = espalier("train", "--help").stdout
    options = {**package.Engine.options(), **package.Engine.objective_options()}
    assert all(meaning for _, meaning in options.values())
    del options["prefix_cache"]  # of samples, which training does not draw
    for name in options:
        assert f"--{name.replace('_', '-')}" in help_text, name
    assert package.Engine.options()["learning_rate"][0] == "1e-05"
    assert {"objective", "normalize", "clip_low"} <= package.Engine.objective_options().keys()


def test_a_schedule_is_the_callers(folder):
    rows = random_rows(28, "sft")
    engine = engine_of(folder, learning_rate=0.5, optimizer="sgd", max_grad_norm=0)
    before = engine.logprobs(rows)
    engine.forward_backward(rows)
    assert engine.optim_step(learning_rate=0)["learning_rate"] == 0 and engine.learning_rate == 0.5
    assert all(map(np.array_equal, engine.logprobs(rows), before))
    engine.forward_backward(rows)
    assert engine.optim_step()["learning_rate"] == 0.5 and engine.step == 2
    assert not all(map(np.array_equal, engine.logprobs(rows), before))


STEPS = [{}, {"learning_rate": 0.02, "beta1": 0.5, "beta2": 0.7, "eps": 1e-3, "weight_decay": 0.3, "max_grad_norm": 0.01}, {},
         {"max_grad_norm": 0}, {"beta2": 0.9}]  # fmt: skip


def weights_of(engine, folder):
    engine.save(folder)
    return {name: value.clone() for name, value in load_file(folder / "model.safetensors").items()}


def steps_of_pytorch(before, gradients, settings):
    """The weights after each step of torch.optim.AdamW, whose settings are changed before each."""
    values = {name: torch.nn.Parameter(value.clone()) for name, value in before.items()}
    kinds = [[value for value in values.values() if (value.dim() >= 2) == matrices] for matrices in (True, False)]
    optimizer = torch.optim.AdamW([{"params": kind} for kind in kinds])
    for found, given in zip(gradients, settings, strict=True):
        chosen = {"learning_rate": 0.05, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1, "max_grad_norm": 0.1} | given
        for name, value in values.items():
            value.grad = torch.tensor(found[name])
        if chosen["max_grad_norm"] > 0:
            torch.nn.utils.clip_grad_norm_(values.values(), chosen["max_grad_norm"])
        for group, decay in zip(optimizer.param_groups, (chosen["weight_decay"], 0.0)):
            group.update(lr=chosen["learning_rate"], betas=(chosen["beta1"], chosen["beta2"]), eps=chosen["eps"], weight_decay=decay)
        optimizer.step()
        yield {name: value.detach().clone() for name, value in values.items()}


def test_settings_of_a_step_are_those_of_pytorch(folder, tmp_path):
    rows = random_rows(29, "sft")
    engine = engine_of(folder, learning_rate=0.05, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.1, max_grad_norm=0.1)
    before = weights_of(engine, tmp_path / "before")
    gradients, after = [], []
    for number, settings in enumerate(STEPS):
        engine.forward_backward(rows)
        gradients.append(engine.gradients())
        assert engine.optim_step(**settings)["learning_rate"] == settings.get("learning_rate", 0.05)
        after.append(weights_of(engine, tmp_path / f"after{number}"))

    def worst(settings):
        expected = list(steps_of_pytorch(before, gradients, settings))
        return max((ours[name] - theirs[name]).abs().max().item() for ours, theirs in zip(after, expected, strict=True) for name in ours)

    assert worst(STEPS) < EXACT
    # Negative controls: any setting that is lost, or that lasts longer than its step.
    for name, value in STEPS[1].items():
        assert worst([STEPS[0], {other: STEPS[1][other] for other in STEPS[1] if other != name}, *STEPS[2:]]) > 1e-6
        assert worst([*STEPS[:2], {name: value}, *STEPS[3:]]) > 1e-6
    assert engine.learning_rate == 0.05


@pytest.mark.parametrize("settings", [{"beta1": 1}, {"beta2": -0.5}, {"eps": 0}, {"weight_decay": -1}, {"max_grad_norm": float("nan")},
                                      {"weight_decay": 21}])  # fmt: skip
def test_settings_of_a_step_that_cannot_be_used(folder, settings):
    engine = engine_of(folder, learning_rate=0.05)
    engine.forward_backward([[1, 2, 3]])
    before = engine.gradients()
    with pytest.raises(package.InputError, match=f"{next(iter(settings))}: expected"):
        engine.optim_step(**settings)
    assert all(np.array_equal(engine.gradients()[name], before[name]) for name in before)
    assert engine.optim_step()["step"] == 1


def test_packed_rows_are_not_copied(folder, tmp_path):
    """The engine works on the pages of the file, or on the arrays, and chooses rows by number."""
    rows = random_rows(29, "sft") * 3
    package.write(tmp_path / "rows.safetensors", rows)
    found = package.read(tmp_path / "rows.safetensors")
    tokens = found.input_ids
    assert not tokens.flags.owndata and not tokens.flags.writeable
    engine = engine_of(folder)
    chosen = [0, 5, 7]
    some = engine.forward_backward(found, indices=np.array(chosen))["loss"]
    assert some == engine.forward_backward([rows[index] for index in chosen])["loss"]
    columns = package.trajectories({"offsets": found.offsets, "input_ids": tokens, "loss_weights": found.loss_weights})
    assert np.shares_memory(columns.input_ids, tokens)
    assert engine.forward_backward(columns, indices=chosen)["loss"] == some
