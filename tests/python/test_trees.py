# SPDX-License-Identifier: Apache-2.0
"""espalier.build and espalier.plan against the rows themselves: what a path holds, what a token sees."""

import gc
import itertools
import json
import signal
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

import espalier as package
from conftest import seed_of

ARRAYS = ("input_ids", "position_ids", "subtree_end", "prev", "multiplicity")


def random_rows(rng):
    """Up to 12 short rows over a tiny vocabulary, many of which extend, equal or branch off others."""
    rows = []
    for _ in range(rng.integers(1, 13)):
        known = rows[rng.integers(len(rows))] if rows and rng.random() < 0.8 else []
        row = known[:rng.integers(len(known) + 1)] + rng.integers(0, 3, rng.integers(0, 6)).tolist()
        rows.append(row or [1])
    return rows


def faults(rows, layout, arrays=None):
    """Where a layout of the whole forest differs from what the rows say."""
    arrays = arrays or SimpleNamespace(**{name: getattr(layout, name) for name in ARRAYS})
    prefixes = Counter(tuple(row[:end]) for row in rows for end in range(1, len(row) + 1))
    if layout.num_tokens != len(prefixes):
        yield "tokens"
    for number, row in enumerate(rows):
        path = layout.path(number)
        if arrays.input_ids[path].tolist() != row:
            yield "input_ids"
        if arrays.position_ids[path].tolist() != list(range(len(row))):
            yield "position_ids"
        if arrays.prev[path].tolist() != [-1, *path[:-1].tolist()]:
            yield "prev"
        if arrays.multiplicity[path].tolist() != [prefixes[tuple(row[:end])] for end in range(1, len(row) + 1)]:
            yield "multiplicity"
        for place, token in enumerate(path):
            seen = np.flatnonzero((np.arange(token + 1) <= token) & (token < arrays.subtree_end[:token + 1]))
            if seen.tolist() != path[:place + 1].tolist():
                yield "subtree_end"


@pytest.mark.parametrize("seed", range(40))
def test_a_layout_says_what_the_rows_say(seed):
    rows = random_rows(np.random.default_rng(seed_of(seed)))
    forest = package.build(rows)
    layout = forest.layout()
    assert set(faults(rows, layout)) == set()
    assert forest.flat_tokens == sum(map(len, rows)) and forest.tree_tokens == layout.num_tokens
    offsets, indices = layout.paths()
    assert [indices[a:b].tolist() for a, b in itertools.pairwise(offsets)] == [
        layout.path(number).tolist() for number in range(len(rows))]  # fmt: skip
    # Control: each array is looked at.
    for name in ARRAYS:
        changed = {other: getattr(layout, other).copy() for other in ARRAYS}
        changed[name][-1] += 1 if name != "subtree_end" else -1
        assert name in set(faults(rows, layout, SimpleNamespace(**changed)))


@pytest.mark.parametrize("seed", range(10))
def test_every_form_of_rows_gives_the_same_forest(seed):
    rng = np.random.default_rng(seed_of(seed))
    rows = random_rows(rng)
    offsets = np.cumsum([0, *map(len, rows)])
    packed = (offsets, np.concatenate(rows).astype(np.int32))
    kinds = [np.int32, np.int64, np.uint16, np.uint64]
    forms = [packed, tuple(map(tuple, rows)), [np.array(row, kinds[i % 4]) for i, row in enumerate(rows)],
             [{"input_ids": row, "reward": 1} for row in rows], iter(rows), package.trajectories(rows)]  # fmt: skip
    expected = package.build(rows)
    for form in forms:
        forest = package.build(form)
        for name in ("tokens", "node_begin", "parent", "subtree_last", "position", "multiplicity", "end_node"):
            assert np.array_equal(getattr(forest, name), getattr(expected, name)), name


def test_arrays_are_views_that_keep_the_forest_alive():
    forest = package.build([[1, 2, 3], [1, 2, 4]])
    tokens, again = forest.tokens, forest.tokens
    assert np.shares_memory(tokens, again) and tokens.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 9
    layout = forest.layout()
    ends = layout.subtree_end
    assert np.shares_memory(ends, layout.subtree_end) and ends.dtype == np.int32
    del forest, layout, again
    gc.collect()
    package.build([[9] * 1000 for _ in range(100)])  # takes the memory, were it free
    assert tokens.tolist() == [1, 2, 3, 4] and ends.tolist() == [4, 4, 3, 4]


def test_keys_keep_rows_and_tokens_apart():
    rows = [[1, 2, 3], [1, 2, 4], [1, 2, 3]]
    assert package.build(rows).tree_tokens == 4
    assert package.build(rows, tree_keys=["a", "b", "a"]).tree_tokens == 6
    assert package.build(rows, merge_keys=[[0, 0, 0], [0, -1, 0], [0, 0, 7]]).tree_tokens == 6
    assert package.build(rows, merge_keys=np.array([0, 0, 0, 0, 5, 0, 0, 0, 7])).tree_tokens == 6
    routed = [{"input_ids": row, "routed_experts": routes} for row, routes in
              zip(rows, ([[0], [1], [1]], [[0], [2], [1]], [[0], [1], [3]]))]  # fmt: skip
    assert package.build(routed).tree_tokens == package.build(package.trajectories(routed)).tree_tokens == 6
    assert package.build([*routed, {"input_ids": [1, 2]}]).tree_tokens == 8  # without routes nothing is known


def test_statistics_count_the_forest():
    statistics = package.build([[5, 6, 7, 8], [5, 6, 9], [5, 6, 9, 1], [4]]).statistics()
    assert {key: statistics[key] for key in ("trajectories", "trees", "nodes", "leaves")} == {
        "trajectories": 4, "trees": 2, "nodes": 5, "leaves": 3}  # fmt: skip
    assert (statistics["flat_tokens"], statistics["tree_tokens"], statistics["append_only_tokens"]) == (12, 7, 9)
    assert statistics["por"] == pytest.approx(1 - 7 / 12) and statistics["cached_token_ratio"] == pytest.approx(12 / 7)
    assert statistics["tokens_by_multiplicity"] == {1: 4, 2: 1, 3: 2}
    empty = package.build([])
    assert len(empty.layout()) == 0 and empty.tokens.size == 0 and empty.statistics()["por"] == 0


REFUSED = {
    "a text": ("rows.jsonl", "rows: expected a list of rows", "read files with espalier.read"),
    "a matrix": (np.ones((2, 3), int), "shape (2, 3): padding would count as tokens",),
    "columns": ({"input_ids": [[1]]}, "rows: expected a list of rows", "received dict"),
    "no tokens": ([[1], []], "row 1: field `input_ids`: expected at least one entry, received none"),
    "reals": ([[1], [1.5]], "row 1: field `input_ids`: expected a list of integers, received [1.5] (float64"),
    "a negative id": ([[1], [2, -3]], "row 1: field `input_ids`: expected token ids from 0", "received -3 at index 1"),
    "a large id": ([[2**31]], "row 0: field `input_ids`: expected token ids from 0 to 2147483647"),
    "a larger id": ([[2**70]], "row 0: field `input_ids`: expected a list of integers"),
    "booleans": ([[True, False]], "row 0: field `input_ids`: expected a list of integers"),
    "a number": ([1, 2], "row 0: field `input_ids`: expected a list of integers, received int"),
    "a list in a row": ([[1, [2]]], "row 0: field `input_ids`: expected a list of integers"),
    "no input_ids": ([{"prompt_ids": [1]}], "row 0: expected the field `input_ids`, received ['prompt_ids']"),
    "wrong types": ((np.array([0, 1]), np.array([1])), "received tokens int64 of shape (1,). Give two rows as a list"),
    "a short pair": ((np.array([0, 1]), np.array([1, 2], np.int32)), "offsets that ascend from 0 to 2"),
    "an empty row": ((np.array([0, 1, 1]), np.array([1], np.int32)), "without empty rows"),
    "a route too few": ([{"input_ids": [1, 2], "routed_experts": [[1]]}], "field `routed_experts`: expected 2 lists"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_are_none_are_refused(name):
    rows, *parts = REFUSED[name]
    with pytest.raises(package.InputError) as caught:
        package.build(rows)
    assert isinstance(caught.value, ValueError)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("keys, message", [
    ({"tree_keys": ["a"]}, "tree_keys: expected 2 (one for each row), received 1"),
    ({"tree_keys": [["a"], ["b"]]}, "tree_keys: expected a key for each row"),
    ({"merge_keys": [[1, 1], [2]]}, "row 1: field `merge_keys`: expected 2 entries (one for each token), received 1"),
    ({"merge_keys": [[1, 1]]}, "merge_keys: expected 2 rows, received 1"),
    ({"merge_keys": np.array([1, 2, 3])}, "merge_keys: expected 4 entries (one for each token), received 3"),
])  # fmt: skip
def test_keys_that_do_not_match_are_refused(keys, message):
    with pytest.raises(package.InputError) as caught:
        package.build([[1, 2], [1, 3]], **keys)
    assert message in str(caught.value)


# Plans.


@pytest.mark.parametrize("strategy", ["auto", "partition", "tree-packing", "sequence-packing"])
@pytest.mark.parametrize("seed", range(10))
def test_micro_batches_hold_every_trajectory(strategy, seed):
    rng = np.random.default_rng(seed_of(seed))
    rows = random_rows(rng)
    forest = package.build(rows)
    longest = max(map(len, rows))
    budget = int(rng.integers(1 if strategy == "partition" else longest, 3 * longest + 1))
    plan = package.plan(forest, token_budget=budget, strategy=strategy)
    assert sum(batch.num_tokens for batch in plan) == plan.num_tokens
    assert plan.effective_reuse_ratio == pytest.approx(1 - plan.num_tokens / forest.flat_tokens)
    found = [[] for _ in rows]
    for number, batch in enumerate(plan):
        layout = batch.layout()
        assert (batch.index, len(layout)) == (number, batch.num_tokens) and batch.num_tokens <= budget
        assert batch.context_runs.tolist() == batch.to_dict()["context_runs"]
        assert np.array_equal(layout.input_ids, forest.tokens[layout.forest_token])
        passing = np.zeros(len(layout), np.int64)
        for trajectory in layout.trajectories:
            path = layout.path(trajectory)
            passing[path] += 1
            found[trajectory] += zip(layout.position_ids[path].tolist(), layout.input_ids[path].tolist())
            # Its context is what comes before on the path: what the blocks show to the first token.
            seen = [position + column for _, begin, end, row_begin, row_end, position in batch.context.tolist()
                    if row_begin <= path[0] < row_end for column in range(end - begin)]  # fmt: skip
            assert sorted(seen) == list(range(layout.position_ids[path[0]]))
        assert np.array_equal(layout.multiplicity, passing)
    assert [sorted(part) for part in found] == [list(enumerate(row)) for row in rows]
    if plan.strategy == "partition":
        assert plan.num_tokens == forest.tree_tokens
    if plan.strategy == "sequence-packing":
        assert plan.num_tokens == forest.flat_tokens


def test_a_micro_batch_keeps_plan_and_forest_alive():
    batch = package.plan(package.build([[1, 2, 3, 4], [1, 2, 5]]), token_budget=2, strategy="partition")[1]
    expected = (batch.parent, batch.layout().input_ids.tolist(), batch.context.tolist())
    gc.collect()
    package.build([[9] * 1000 for _ in range(100)])
    assert (batch.parent, batch.layout().input_ids.tolist(), batch.context.tolist()) == expected


def test_plans_that_cannot_be_are_refused():
    forest = package.build([[1, 2, 3, 4], [1, 2, 5]])
    for arguments, message in [
            (dict(token_budget=3, strategy="tree-packing"), "expected a budget of at least 4"),
            (dict(token_budget=3, strategy="best"), "sequence-packing"),
            (dict(token_budget=0), "token_budget: expected a whole number above 0, received 0"),
            (dict(token_budget=2.5), "token_budget: expected a whole number above 0, received 2.5")]:  # fmt: skip
        with pytest.raises(package.InputError) as caught:
            package.plan(forest, **arguments)
        assert message in str(caught.value)
    with pytest.raises(package.InputError, match="expected a Forest, as espalier.build makes it, received list"):
        package.plan([[1]], token_budget=3)
    with pytest.raises(IndexError):
        package.plan(forest, token_budget=8)[9]
    with pytest.raises(package.InputError, match="trajectory 2: expected one of the 2 trajectories"):
        forest.layout().path(2)


def test_a_plan_as_a_dict_is_that_of_the_command(espalier, tmp_path):
    rows = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8], [1, 2, 3, 4, 9], [2, 2]]
    package.write(tmp_path / "rows.jsonl", rows)
    for strategy in ("partition", "tree-packing"):
        flags = ["--token-budget", 7, "--strategy", strategy, "--json"]
        said = json.loads(espalier("plan", "--data", tmp_path / "rows.jsonl", *flags).stdout)
        ours = json.loads(json.dumps(package.plan(package.build(rows), token_budget=7, strategy=strategy).to_dict()))
        context = [batch.pop("context_tokens") for batch in ours["micro_batches"]]
        assert {key: said[key] for key in ours} == ours
        assert any(context) == (strategy == "partition")


def test_ranks_get_every_trajectory_once():
    random = np.random.default_rng(seed_of(4))
    rows = [random.integers(0, 3, size=random.integers(1, 30)).tolist() for _ in range(40)]
    forest = package.build(rows)
    for ranks in (1, 3, 50):
        distribution = package.distribute(forest, ranks)
        assert len(distribution) == ranks
        assert sorted(t for share in distribution for t in share.trajectories.tolist()) == list(range(len(rows)))
        busy = [share for share in distribution if len(share.trajectories)]
        own = [package.build([rows[t] for t in share.trajectories]) for share in busy]
        tokens = [share.tree_tokens for share in busy]
        assert tokens == [each.tree_tokens for each in own]
        assert sum(tokens) == forest.tree_tokens + distribution.repeated_tokens
        seconds = [share.seconds for share in distribution]
        assert distribution.seconds == max(seconds) >= distribution.least_seconds * (1 - 1e-9)
        assert distribution.imbalance == pytest.approx(max(seconds) * ranks / sum(seconds) - 1)
    with pytest.raises(IndexError):
        distribution[ranks]


@pytest.mark.parametrize("ranks", [0, -1, True, 2.0, "2"])
def test_ranks_are_a_whole_number(ranks):
    with pytest.raises(package.InputError, match="ranks: expected a whole number above 0, received"):
        package.distribute(package.build([[1]]), ranks)


@pytest.mark.parametrize("name, call", [
    ("plan", lambda forest: package.plan(forest, token_budget=4096)),
    ("distribute", lambda forest: package.distribute(forest, 64)),
])  # fmt: skip
def test_signals_are_handled_while_a_call_works(name, call):
    """A handler that runs several times in one call runs inside of it; the forest grows until the call takes that
    long."""
    seen = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: seen.append(frame.f_code.co_name))
    num_rows = 20_000
    try:
        while Counter(seen)[name] < 4:
            assert num_rows < 3_000_000
            tokens = np.random.default_rng(1).integers(0, 1000, 40 * num_rows).astype(np.int32)
            tokens[::40] = 7  # all rows are in one tree
            forest = package.build((np.arange(0, 40 * num_rows + 1, 40), tokens))
            seen.clear()
            signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
            call(forest)
            signal.setitimer(signal.ITIMER_REAL, 0)
            num_rows *= 2
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            call(forest)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    call(package.build([[1, 2], [1, 3]]))  # and goes on working
