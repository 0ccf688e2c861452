# SPDX-License-Identifier: Apache-2.0
"""gated_delta_rule by flash-linear-attention, in waves of sequences: a stand-in plays it on the CPU in float64
(fla_stand_in.py), and where it is installed its own kernels run in Triton's interpreter."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import espalier
from conftest import seed_of
from fla_stand_in import installed
from espalier import ops
from espalier.hf import patch
from espalier.hf.float64 import InFloat64
from espalier.kernels import recurrences
from espalier.kernels.waves import CHUNK, Waves
from hf_models import alone, branching_rows, make_model, padded, sums_of, worst_error
from test_library_attention import random_rows, results_of_leaves, worst
from test_step import plan_of, step_sums

EXACT = 1e-12


@pytest.fixture
def library(monkeypatch):
    with installed(monkeypatch) as stand_in:
        yield stand_in


def problem(seed, *, context=False, ends=False, dtype=torch.float64, count=10, dims=(4, 6), depth=9):
    """Arguments of ops.gated_delta_rule on a random forest, gradients wanted. With context, trees go on from one of two states
    or begin anew; with ends, states after random tokens are wanted."""
    generator = np.random.default_rng(seed_of(seed))
    prev = torch.from_numpy(espalier.build(random_rows(generator, count, depth)).layout().prev.copy())
    tokens, key_heads, heads = len(prev), 2, 4
    torch.manual_seed(seed_of(seed))
    sums = torch.promote_types(dtype, torch.float32)

    def leaf(values, dtype):
        return values.to(dtype).requires_grad_()

    arguments = {"q": leaf(torch.randn(tokens, key_heads, dims[0]), dtype), "k": leaf(torch.randn(tokens, key_heads, dims[0]), dtype),
                 "v": leaf(torch.randn(tokens, heads, dims[1]), dtype), "g": leaf(-torch.rand(tokens, heads), sums),
                 "beta": leaf(torch.rand(tokens, heads), sums), "prev": prev}  # fmt: skip
    if context:
        arguments["states"] = leaf(torch.randn(2, heads, *dims), sums)
        roots = torch.nonzero(prev == -1).flatten().tolist()
        for number, root in enumerate(roots):
            prev[root] = (-3, -1, -2)[number % 3]
    if ends:
        arguments["ends"] = torch.from_numpy(generator.choice(tokens, 3, replace=False))
    return arguments


def results(arguments):
    """Both outputs and the gradients of all that has any."""
    return results_of_leaves(arguments, ops.gated_delta_rule(**arguments))


CASES = [dict(context=context, ends=ends) for context in (False, True) for ends in (False, True)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_operator(case, monkeypatch):
    for seed in range(8):
        arguments = problem(seed, **case)
        expected = results(arguments)
        with installed(monkeypatch) as stand_in:
            ours = results(arguments)
        waves = len(Waves(arguments["prev"], arguments.get("ends", torch.empty(0, dtype=torch.int64)), torch.device("cpu")).waves)
        assert stand_in.calls == 2 * waves > 1
        assert worst(ours, expected) <= EXACT


def test_waves_of_a_forest():
    """Four tokens, two children of two and one of it, of which the first has two; the last tree goes on from a state."""
    prev = torch.tensor([-1, 0, 1, 2, 3, 4, 5, 5, 3, -4], dtype=torch.int32)
    waves = Waves(prev, torch.tensor([2]), torch.device("cpu"))
    found = [(wave.cu_seqlens.tolist(), wave.source.tolist(), wave.is_continued, wave.has_ends) for wave in waves.waves]
    assert found == [([0, 3, 4], [0, 3], True, True), ([0, 1], [0], True, False), ([0, 2, 3], [0, 0], True, False),
                     ([0, 1, 2], [0, 0], False, False)]  # fmt: skip
    assert waves.num_levels == 4
    long = Waves(torch.arange(-1, 3 * CHUNK, dtype=torch.int32), torch.empty(0, dtype=torch.int64), torch.device("cpu"))
    assert len(long.waves) == 1 and long.num_levels == 4


SPOILED = {
    "a state for the wrong child": lambda states: states.roll(1, 0),
    "a state that is lost": torch.zeros_like,
    "a state that is transposed": lambda states: states.flip(-1),
}


@pytest.mark.parametrize("name", SPOILED)
def test_wrong_states_are_noticed(name, library):
    arguments = problem(3, context=True, ends=True)
    right = results(arguments)
    library.change = SPOILED[name]
    assert worst(results(arguments), right) > 1e-3


def test_gradients_of_final_states_are_needed(library):
    arguments = problem(4)
    right = results(arguments)
    library.drop = True
    spoiled = results(arguments)
    assert worst(spoiled[:2], right[:2]) == 0 and worst(spoiled, right) > 1e-3


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next"])
def test_patched_models(kind, library):
    rows = branching_rows()
    model = patch(make_model(kind))
    with InFloat64():
        ours = sums_of(model, [padded(rows)])
    assert library.calls > 4
    assert worst_error(ours, alone(make_model(kind), rows)) <= EXACT


def test_partition(library):
    ours = step_sums(make_model("qwen3_5"), plan_of(branching_rows()))
    assert library.calls > 10
    assert worst_error(ours, alone(make_model("qwen3_5"), branching_rows())) <= EXACT


def test_wrong_arguments_are_named_as_ever(library):
    arguments = problem(5)
    for name, value in (("k", arguments["k"][:, :1]), ("prev", arguments["prev"].long()), ("g", arguments["g"].float()),
                        ("ends", torch.tensor([len(arguments["prev"])]))):  # fmt: skip
        with pytest.raises(RuntimeError, match=f"gated_delta_rule: {name} must"):
            ops.gated_delta_rule(**(arguments | {name: value}))
    assert library.calls == 0


def test_what_is_bitwise_is_composed(library):
    torch.use_deterministic_algorithms(True)
    try:
        ops.gated_delta_rule(**problem(6))
    finally:
        torch.use_deterministic_algorithms(False)
    assert library.calls == 0


@pytest.mark.skipif(not importlib.util.find_spec("fla"), reason="flash-linear-attention is not installed")
def test_kernels_of_the_library():
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), *sys.path])}
    done = subprocess.run([sys.executable, here / "fla_interpreted.py"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    calls, difference = done.stdout.split()[-2:]
    assert int(calls) > 4 and float(difference) < 1e-5  # float32, in another order of adding


def test_which_form_is_cheaper():
    """One sequence goes to the library, which runs through it in one call; deep trees of short nodes do not."""
    rates, none, cpu = recurrences.Rates(wave=1.2e-4, wave_token=2.3e-7, level=1e-4, level_token=8e-7), torch.empty(0, dtype=torch.int64), torch.device("cpu")
    state = 32 * 128 * 128
    sequence = torch.arange(-1, 8191, dtype=torch.int32)
    assert rates.prefers_waves(Waves(sequence, none, cpu), 8192, state)
    comb = espalier.build([list(range(100, 100 + 2 * level)) + [1] for level in range(200)]).layout()
    deep = Waves(torch.from_numpy(comb.prev.copy()), none, cpu)
    assert len(deep.waves) > 150 and not rates.prefers_waves(deep, comb.num_tokens, state)
    assert rates._replace(wave=0.0).prefers_waves(deep, comb.num_tokens, state)


@pytest.mark.parametrize("found, name", [("0.6.0", "fla 0.6.0"), ("0.7.0", ""), (None, "")])
def test_which_versions_are_taken(found, name, monkeypatch):
    def version(package):
        if found is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert recurrences.installed() == name
