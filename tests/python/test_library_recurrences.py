# SPDX-License-Identifier: Apache-2.0
"""Recurrences by libraries, in waves of sequences, and convolutions: stand-ins play the libraries on the CPU in float64
(recurrence_stand_ins.py), and where they are installed their own kernels run in Triton's interpreter."""

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
import transformers_reference as reference
from conftest import seed_of
from engines import engine_of, init_model, transformers_gradients
from engines import worst_error as worst_of_engine
from small_models import random_rows as small_rows
from recurrence_stand_ins import Convolution, GatedDelta, Mamba, installed
from espalier import ops
from espalier.hf import patch, patching, proof
from espalier.hf.families import backbone_of, stock_class
from espalier.hf.float64 import InFloat64
from espalier.hf.small_copy import small_model
from espalier.kernels import causal_conv, gated_delta, recurrences, ssm_scan
from espalier.kernels.waves import CHUNK, Batch, Waves
from hf_default_models import default_model
from hf_models import alone, branching_rows, make_model, needs_family, padded, sums_of, worst_error
from test_hf_families import fresh, skip_unless  # noqa: F401
from test_library_attention import random_rows, results_of_leaves, worst
from test_step import plan_of, step_sums

EXACT = 1e-12
NONE, CPU = torch.empty(0, dtype=torch.int64), torch.device("cpu")


OPERATORS = {"gated_delta_rule": GatedDelta, "ssm_scan": Mamba, "causal_conv1d": Convolution}
STATES = {"gated_delta_rule": "states", "ssm_scan": "states", "causal_conv1d": "tails"}
RECURRENCES = ("gated_delta_rule", "ssm_scan")


@pytest.fixture
def library(monkeypatch):
    with installed(monkeypatch) as stand_in:
        yield stand_in


def problem(seed, operator="gated_delta_rule", *, context=False, ends=False, dtype=torch.float64, count=10, dims=(4, 6), depth=9):
    """Arguments of an operator on a random forest, gradients wanted. With context, trees go on from one of two states or begin
    anew; with ends, states after random tokens are wanted."""
    generator = np.random.default_rng(seed_of(seed))
    prev = torch.from_numpy(espalier.build(random_rows(generator, count, depth)).layout().prev.copy())
    tokens, groups, heads = len(prev), 2, 4
    torch.manual_seed(seed_of(seed))
    sums = torch.promote_types(dtype, torch.float32)

    def leaf(values, dtype=dtype):
        return values.to(dtype).requires_grad_()

    def normal(*shape):
        return leaf(torch.randn(tokens, *shape))

    state = (2, heads, *dims)
    if operator == "gated_delta_rule":
        arguments = {"q": normal(groups, dims[0]), "k": normal(groups, dims[0]), "v": normal(heads, dims[1]),
                     "g": leaf(-torch.rand(tokens, heads), sums), "beta": leaf(torch.rand(tokens, heads), sums)}  # fmt: skip
    elif operator == "ssm_scan":
        arguments = {"x": normal(heads, dims[1]), "dt": leaf(torch.rand(tokens, heads), sums), "A": leaf(-torch.rand(heads), sums),
                     "B": normal(groups, dims[0]), "C": normal(groups, dims[0])}  # fmt: skip
        arguments |= {"D": leaf(torch.randn(heads), sums)} if seed % 2 else {}
    else:
        channels, taps = 8 * dims[0], 2 + seed % 3
        arguments = {"x": normal(channels), "weight": leaf(torch.randn(channels, taps)), "silu": seed % 2 == 0,
                     "bias": leaf(torch.randn(channels)) if seed % 4 < 2 else None}  # fmt: skip
        state = (2, taps - 1, channels)
    arguments["prev"] = prev
    if context:
        arguments[STATES[operator]] = leaf(torch.randn(state), dtype if operator == "causal_conv1d" else sums)
        roots = torch.nonzero(prev == -1).flatten().tolist()
        for number, root in enumerate(roots):
            prev[root] = (-3, -1, -2)[number % 3]
    if ends:
        arguments["ends"] = torch.from_numpy(generator.choice(tokens, 3, replace=False))
    return arguments


def results(arguments, operator="gated_delta_rule"):
    """What an operator gives and the gradients of all that has any."""
    outs = getattr(ops, operator)(**arguments)
    return results_of_leaves(arguments, outs if isinstance(outs, tuple) else [outs])


CASES = [(operator, dict(context=context, ends=ends)) for operator in OPERATORS for context in (False, True)
         for ends in ((False, True) if operator in RECURRENCES else (False,))]  # fmt: skip


@pytest.mark.parametrize("operator, case", CASES, ids=str)
def test_the_operator(operator, case, monkeypatch):
    for seed in range(8):
        arguments = problem(seed, operator, **case)
        expected = results(arguments, operator)
        with installed(monkeypatch, OPERATORS[operator]()) as stand_in:
            ours = results(arguments, operator)
        assert worst(ours, expected) <= EXACT
        assert all(each.is_contiguous() and each.untyped_storage().nbytes() == each.nbytes for each in ours)
        if operator in RECURRENCES:  # all sequences are short here: a call each wave
            waves = len(Waves(arguments["prev"], arguments.get("ends", NONE), CPU).waves)
            assert stand_in.calls == 2 * waves > 1
        else:
            assert stand_in.calls == 2


def forest_of(lengths_by_level, branches=2):
    """prev of a tree in which each node of a level has so many tokens, in turn, and so many children."""
    prev = []

    def grow(before, level, number):
        begin = len(prev)
        length = lengths_by_level[level][number % len(lengths_by_level[level])]
        prev.extend([before, *range(begin, begin + length - 1)])
        last = len(prev) - 1
        for child in range(branches if level + 1 < len(lengths_by_level) else 0):
            grow(last, level + 1, child)

    grow(-1, 0, 0)
    return torch.tensor(prev, dtype=torch.int32)


@pytest.mark.parametrize("most", [None, 2])
def test_sequences_of_unlike_lengths(most, monkeypatch):
    """Those of a wave are several calls by length, filled up to at most twice as many tokens, or to a chunk; and several where
    tensors would be too large."""
    prev = forest_of([[3], [150, 40, 70, 1, 64, 129]], branches=6)
    waves = Waves(prev, NONE, CPU)
    assert [[(batch.sequences, batch.longest) for batch in wave] for wave in waves.batches] == [[(1, 3)], [(2, 150), (1, 70), (3, 64)]]
    torch.manual_seed(0)
    arguments = {"x": torch.randn(len(prev), 2, 4).double(), "dt": torch.rand(len(prev), 2).double(), "A": -torch.rand(2).double(),
                 "B": torch.randn(len(prev), 1, 3).double(), "C": torch.randn(len(prev), 1, 3).double()}  # fmt: skip
    arguments = {name: each.requires_grad_() for name, each in arguments.items()} | {"prev": prev}
    expected = results(arguments, "ssm_scan")
    if most:
        monkeypatch.setattr(ssm_scan, "_WANTED_NUMBERS", most * 64 * 64)  # numbers of C B in two chunks
    with installed(monkeypatch, Mamba()) as stand_in:
        assert worst(results(arguments, "ssm_scan"), expected) <= EXACT
    once = stand_in.shapes[:len(stand_in.shapes) // 2]
    assert once == ([(1, 3), (1, 150), (1, 150), (1, 70), (2, 64), (1, 64)] if most else [(1, 3), (2, 150), (1, 70), (3, 64)])


def test_what_the_library_cannot_count_is_composed(monkeypatch):
    """Tensors of a sequence beyond 32 bits, or more taps than it has."""
    monkeypatch.setattr(ssm_scan, "_MOST_NUMBERS", 1000)
    with installed(monkeypatch, Mamba()) as stand_in:
        ops.ssm_scan(**problem(1, "ssm_scan"))
    assert stand_in.calls == 0
    with installed(monkeypatch, Convolution()) as stand_in:
        for channels, taps in ((8, 5), (8, 1), (12, 4)):
            ops.causal_conv1d(torch.randn(3, channels), torch.randn(channels, taps), None, torch.tensor([-1, 0, 1], dtype=torch.int32))
    assert stand_in.calls == 0


def test_waves_of_a_forest():
    """Four tokens, two children of two and one of it, of which the first has two; the last tree goes on from a state."""
    prev = torch.tensor([-1, 0, 1, 2, 3, 4, 5, 5, 3, -4], dtype=torch.int32)
    waves = Waves(prev, torch.tensor([2]), CPU)
    found = [(wave.cu_seqlens.tolist(), wave.source.tolist(), wave.is_continued, wave.has_ends) for wave in waves.waves]
    assert found == [([0, 3, 4], [0, 3], True, True), ([0, 1], [0], True, False), ([0, 2, 3], [0, 0], True, False),
                     ([0, 1, 2], [0, 0], False, False)]  # fmt: skip
    assert waves.num_levels == 4
    long = Waves(torch.arange(-1, 3 * CHUNK, dtype=torch.int32), NONE, CPU)
    assert len(long.waves) == 1 and long.num_levels == 4


SPOILED = {
    "a state for the wrong child": lambda states: states.roll(1, 0),
    "a state that is lost": torch.zeros_like,
    "a state that is transposed": lambda states: states.flip(-1),
}


@pytest.mark.parametrize("operator", RECURRENCES)
@pytest.mark.parametrize("name", SPOILED)
def test_wrong_states_are_noticed(name, operator, monkeypatch):
    arguments = problem(3, operator, context=True, ends=True)
    right = results(arguments, operator)
    with installed(monkeypatch, OPERATORS[operator]()) as library:
        library.change = SPOILED[name]
        assert worst(results(arguments, operator), right) > 1e-3


@pytest.mark.parametrize("operator", RECURRENCES)
def test_gradients_of_final_states_are_needed(operator, monkeypatch):
    arguments = problem(4, operator)
    right = results(arguments, operator)
    with installed(monkeypatch, OPERATORS[operator]()) as library:
        library.drop = True
        spoiled = results(arguments, operator)
    assert worst(spoiled[:2], right[:2]) == 0 or worst(spoiled[:2], right[:2]) <= EXACT
    assert worst(spoiled, right) > 1e-3


def test_filling_other_than_0_is_noticed(monkeypatch):
    arguments, filled = problem(4, "ssm_scan"), Batch.filled
    right = results(arguments, "ssm_scan")

    def wrong(batch, rows):
        is_filling = filled(batch, rows.new_ones(len(rows))) == 0
        return filled(batch, rows) + 0.1 * is_filling.view(*is_filling.shape, *[1] * (rows.dim() - 1))

    monkeypatch.setattr(Batch, "filled", wrong)
    with installed(monkeypatch, Mamba()):
        assert worst(results(arguments, "ssm_scan"), right) > 1e-3


def test_runs_that_are_not_kept_apart_are_noticed(monkeypatch):
    arguments = problem(2, "causal_conv1d")
    right = results(arguments, "causal_conv1d")
    with installed(monkeypatch, Convolution()) as library:
        library.change = torch.zeros_like
        assert worst(results(arguments, "causal_conv1d"), right) > 1e-3


def test_copies_are_added_up_in_float32(monkeypatch):
    """The gradient of a token that many go on from is that of float32, rounded once."""
    prev = torch.tensor([-1] + [0] * 4000, dtype=torch.int32)
    x, weight = torch.ones(len(prev), 8, dtype=torch.bfloat16, requires_grad=True), torch.ones(8, 2, dtype=torch.bfloat16)
    with installed(monkeypatch, Convolution()):
        (grad,) = torch.autograd.grad(ops.causal_conv1d(x, weight, None, prev).sum(), x)
    assert grad[0].tolist() == [torch.tensor(4001.0).bfloat16().item()] * 8 and bool((grad[1:] == 1).all())


@pytest.fixture
def every_library(monkeypatch):
    with installed(monkeypatch, GatedDelta()) as delta, installed(monkeypatch, Mamba()) as mamba, installed(monkeypatch, Convolution()) as conv:
        yield {"gated_delta_rule": delta, "ssm_scan": mamba, "causal_conv1d": conv}


MODELS = {"qwen3_5": "gated_delta_rule", "qwen3_next": "gated_delta_rule", "mamba2": "ssm_scan", "granitemoehybrid": "ssm_scan"}


@pytest.mark.parametrize("kind", MODELS)
def test_patched_models(kind, every_library):
    needs_family(kind)
    rows = branching_rows()
    model = patch(make_model(kind))
    with InFloat64():
        ours = sums_of(model, [padded(rows)])
    assert every_library[MODELS[kind]].calls > 4
    assert every_library["causal_conv1d"].calls > 1 or kind == "granitemoehybrid"  # whose channels are no multiple of 8
    assert worst_error(ours, alone(make_model(kind), rows)) <= EXACT


@pytest.mark.parametrize("model_type", ["falcon_h1", "nemotron_h"])
def test_families(model_type, every_library):
    """Small copies of families that a proof decides on."""
    skip_unless("equal", model_type)
    model = backbone_of(default_model(model_type))
    model = small_model(stock_class(model), model.config)
    assert proof.error_of(model, patching.attach_for_proof)[0] <= 1e-11
    assert every_library["ssm_scan"].calls > 4


@pytest.mark.parametrize("kind", ["qwen3_5", "mamba2"])
def test_partition(kind, every_library):
    needs_family(kind)
    ours = step_sums(make_model(kind), plan_of(branching_rows()))
    assert every_library[MODELS[kind]].calls > 10 and every_library["causal_conv1d"].calls > 10
    assert worst_error(ours, alone(make_model(kind), branching_rows())) <= EXACT


@pytest.mark.parametrize("kind, strategy", [("qwen3_5", "partition"), ("nemotron_h", "partition"), ("nemotron_h", "tree-packing")])
def test_the_engine(kind, strategy, every_library, request, tmp_path):
    folder = init_model(request.getfixturevalue("espalier"), tmp_path / kind, kind)
    rows = small_rows(22, "sft")
    _, expected = transformers_gradients(folder, lambda model: reference.sft_loss(model, rows))
    engine = engine_of(folder, strategy=strategy)
    engine.forward_backward(rows)
    assert every_library[{"qwen3_5": "gated_delta_rule"}.get(kind, "ssm_scan")].calls > 4
    assert worst_of_engine(engine.gradients(), expected) <= EXACT


WRONG = {
    "gated_delta_rule": {"k": lambda given: given["k"][:, :1], "prev": lambda given: given["prev"].long(),
                         "g": lambda given: given["g"].float(), "ends": lambda given: torch.tensor([len(given["prev"])])},
    "ssm_scan": {"C": lambda given: given["C"][:, :1], "prev": lambda given: given["prev"].long(), "A": lambda given: given["A"].float(),
                 "dt": lambda given: given["dt"][1:], "ends": lambda given: torch.tensor([len(given["prev"])])},
    "causal_conv1d": {"weight": lambda given: given["weight"][1:], "prev": lambda given: given["prev"].long(),
                      "bias": lambda given: given["bias"].float()},
}  # fmt: skip


@pytest.mark.parametrize("operator", OPERATORS)
def test_wrong_arguments_are_named_as_ever(operator, monkeypatch):
    arguments = problem(5, operator)
    with installed(monkeypatch, OPERATORS[operator]()) as library:
        for name, wrong in WRONG[operator].items():
            with pytest.raises(RuntimeError, match=f"{operator}: {name} must"):
                getattr(ops, operator)(**(arguments | {name: wrong(arguments)}))
    assert library.calls == 0


@pytest.mark.parametrize("operator", OPERATORS)
def test_what_is_bitwise_is_composed(operator, monkeypatch):
    torch.use_deterministic_algorithms(True)
    try:
        with installed(monkeypatch, OPERATORS[operator]()) as library:
            getattr(ops, operator)(**problem(6, operator))
    finally:
        torch.use_deterministic_algorithms(False)
    assert library.calls == 0


# The interpreter adds the bits of bfloat16 as whole numbers, which fla's kernels do with the numbers.
@pytest.mark.parametrize("operator, package, dtype", [("gated_delta_rule", "fla", "float32"), ("ssm_scan", "mamba_ssm", "float32"),
                                                      ("ssm_scan", "mamba_ssm", "bfloat16")])  # fmt: skip
def test_kernels_of_the_library(operator, package, dtype):
    if not importlib.util.find_spec(package):
        pytest.skip(f"{package} is not installed")
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), *sys.path])}
    command = [sys.executable, here / "recurrences_interpreted.py", operator, dtype]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def test_which_form_is_cheaper():
    """One sequence goes to the library, which runs through it in one call; deep trees of short nodes do not."""
    rates = recurrences.Rates(wave=1.2e-4, wave_token=2.3e-7, level=1e-4, level_token=8e-7)

    def is_in_waves(prev, rates=rates):
        waves = Waves(prev, NONE, CPU)
        return rates.prefers_waves(recurrences.Counts(len(waves.waves), len(prev), waves.num_levels, len(prev)), 32 * 128 * 128)

    assert is_in_waves(torch.arange(-1, 8191, dtype=torch.int32))
    comb = espalier.build([list(range(100, 100 + 2 * level)) + [1] for level in range(200)]).layout()
    deep = torch.from_numpy(comb.prev.copy())
    assert len(Waves(deep, NONE, CPU).waves) > 150 and not is_in_waves(deep)
    assert is_in_waves(deep, rates._replace(wave=0.0))


def test_padding_counts():
    """Short sequences count as chunks, and those beside a longer one as that."""
    given = problem(0, "ssm_scan")
    prev = forest_of([[3], [150, 140, 1]], branches=3)
    scan = ssm_scan.SsmScan(*(given[name] for name in ("x", "dt", "A", "B", "C")), None, prev, None, NONE)
    assert scan.counts(Waves(prev, NONE, CPU)) == recurrences.Counts(3, 64 + 2 * 192 + 64, 4, len(given["x"]))


@pytest.mark.parametrize("library, found, name", [
    (gated_delta.LIBRARY, "0.6.0", "flash-linear-attention 0.6.0"), (gated_delta.LIBRARY, "0.7.0", ""), (ssm_scan.LIBRARY, "2.3.2.post1",
    "mamba-ssm 2.3.2.post1"), (ssm_scan.LIBRARY, "2.2.6", ""), (causal_conv.LIBRARY, "1.7.0", "causal-conv1d 1.7.0"), (causal_conv.LIBRARY, None, ""),
])  # fmt: skip
def test_which_versions_are_taken(library, found, name, monkeypatch):
    def version(package):
        assert package == library.package
        if found is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert library.installed() == name
