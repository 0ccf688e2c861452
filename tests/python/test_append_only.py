# SPDX-License-Identifier: Apache-2.0
"""bench/papers/append_only.py: merging keeps losses and gradients where it says so, and refuses where they would change."""

import random
import sys

import pytest

import espalier as package
from conftest import REPOSITORY, seed_of
from engines import EXACT, engine_of, init_model, worst_error
from small_models import random_rows

sys.path.insert(0, str(REPOSITORY / "bench"))
from papers import append_only


@pytest.fixture(scope="module")
def engine(espalier, tmp_path_factory):
    return engine_of(init_model(espalier, tmp_path_factory.mktemp("append_only"), "llama"))


def step(engine, rows, objective):
    engine.zero_gradients()
    return engine.forward_backward(rows, objective)["loss"], engine.gradients()


def difference(engine, rows, others, objective):
    """Relative, of the losses or the gradients: whichever is larger."""
    (loss, ours), (other, theirs) = step(engine, rows, objective), step(engine, others, objective)
    return max(abs(loss - other) / abs(loss), worst_error(ours, theirs))


def policy_rows(seed, signs):
    """Turns that extend one another, under one behaviour policy, and advantages of these signs."""
    rng = random.Random(seed_of(seed))
    trunk = [rng.randrange(61) for _ in range(20)]
    old = [0.0] + [rng.uniform(-6, -3) for _ in trunk[1:]]
    rows = []
    for number, end in enumerate((5, 9, 9, 14, 20)):
        tail = [rng.randrange(61) for _ in range(3)] if number == 2 else []
        rows.append({"input_ids": trunk[:end] + tail, "logprobs": old[:end] + [-4.0] * len(tail),
                     "loss_mask": [0, 0] + [1] * (end - 2 + len(tail)),
                     "advantage": signs[number % len(signs)] * rng.uniform(0.5, 2)})  # fmt: skip
    return rows


@pytest.mark.parametrize("seed", range(4))
def test_cross_entropy_always_merges(engine, seed):
    rows = random_rows(seed, "sft")
    merged = append_only.merge(rows)
    statistics = package.build(rows).statistics()
    assert merged.conflicts == 0 and merged.dropped == len(rows) - len(merged.rows) > 0
    assert sum(len(row["input_ids"]) for row in merged.rows) == statistics["append_only_tokens"] < statistics["flat_tokens"]
    assert difference(engine, rows, merged.rows, "sft") < EXACT
    # Control: dropped rows whose terms are forgotten.
    kept = [row for row in rows if any(row["input_ids"] == other["input_ids"] for other in merged.rows)]
    assert difference(engine, rows, kept, "sft") > 1e-3


@pytest.mark.parametrize("objective", ["grpo", "dapo", "reinforce", "cispo"])
def test_policy_gradients_with_advantages_of_one_sign(engine, objective):
    if objective == "reinforce":
        objective = {"objective": "reinforce", "normalize": "token"}  # by default Z counts rows
    name, options = (objective, {}) if isinstance(objective, str) else (objective.pop("objective"), objective)
    for sign in (1, -1):
        rows = policy_rows(3, (sign,))
        merged = append_only.merge(rows, linear=name in ("reinforce", "cispo"))
        assert merged.conflicts == 0 and len(merged.rows) == 2
        engine.zero_gradients()
        loss, ours = engine.forward_backward(rows, name, **options)["loss"], engine.gradients()
        engine.zero_gradients()
        other, theirs = engine.forward_backward(merged.rows, name, **options)["loss"], engine.gradients()
        assert abs(loss - other) <= EXACT * abs(loss) and worst_error(ours, theirs) < EXACT


def test_clipping_keeps_advantages_of_both_signs_apart(engine):
    rows = policy_rows(5, (1, -1))
    merged, forced = append_only.merge(rows), append_only.merge(rows, linear=True)
    assert merged.conflicts > 0 and len(merged.rows) > len(forced.rows)
    assert difference(engine, rows, merged.rows, "grpo") < EXACT
    assert difference(engine, rows, forced.rows, "grpo") > 1e-3  # what merging regardless would do
    assert difference(engine, rows, forced.rows, "cispo") < EXACT


def test_other_policies_and_missing_fields_are_conflicts():
    short, long = policy_rows(1, (1,))[0], policy_rows(1, (1,))[-1]
    assert append_only.merge([short, long]).conflicts == 0
    other = short | {"logprobs": [value - 0.1 for value in short["logprobs"]]}
    without = {name: value for name, value in short.items() if name != "logprobs"}
    plain = {name: value for name, value in without.items() if name != "advantage"}
    for row in (other, without, plain):
        merged = append_only.merge([row, long])
        assert (len(merged.rows), merged.dropped, merged.conflicts) == (2, 0, 1)
    # Where only one of the two trains a token, nothing can clash.
    assert append_only.merge([other | {"loss_mask": [0] * 5}, long]).conflicts == 0


def test_sums_and_means_by_hand():
    rows = [{"input_ids": [1, 2, 3], "loss_weights": [1, 1, 2], "advantages": [0, 1.0, 3.0]},
            {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1], "advantage": 6.0}]  # fmt: skip
    merged = append_only.merge(rows)
    assert merged.rows == [{"input_ids": [1, 2, 3, 4], "loss_weights": [0, 1, 3, 1], "advantages": [6, 1, 4, 6]}]


@pytest.mark.parametrize("objective", ["sft", "grpo", "gspo"])
def test_the_strategy_keeps_the_terms_of_every_row(engine, espalier, tmp_path, objective):
    """Also where merging rows would not: advantages of both signs, log-probabilities of some rows only, ratios of whole rows."""
    rows = random_rows(5, "sft" if objective == "sft" else "grpo")
    if objective == "gspo":
        rows = [row | {"logprobs": [0.0] + [-3.0 - number / 9] * (len(row["input_ids"]) - 1)} for number, row in enumerate(rows)]
    statistics = package.build(rows).statistics()
    plan = package.plan(package.build(rows), token_budget=40, strategy="append-only")
    assert plan.num_tokens == statistics["append_only_tokens"] < statistics["flat_tokens"]
    merging = engine_of(init_model(espalier, tmp_path, "llama"), strategy="append-only", token_budget=40)
    (loss, ours), (other, theirs) = step(merging, rows, objective), step(engine, rows, objective)
    assert abs(loss - other) <= EXACT * abs(other) and worst_error(ours, theirs) < EXACT
    # Control: rows that others extend lose their terms.
    extends = lambda other, row: other is not row and other["input_ids"][: len(row["input_ids"])] == row["input_ids"]
    longest = [row for row in rows if not any(extends(other, row) for other in rows)]
    assert worst_error(step(merging, longest, objective)[1], theirs) > 1e-3
