# SPDX-License-Identifier: Apache-2.0
"""Forests, layouts, plans, distributions and rows that are pickled, copied, and handed to processes that are spawned."""

import copy
import json
import multiprocessing
import pickle
import random

import numpy as np
import pytest

import espalier
from conftest import seed_of


def random_rows(seed):
    rng = random.Random(seed_of(seed))
    rows = [[rng.randrange(3) for _ in range(rng.randrange(1, 12))] for _ in range(30)]
    return rows + [[9] * 40 + [answer] * 20 for answer in range(5)]


COPIES = {
    "pickle": lambda each: pickle.loads(pickle.dumps(each)),
    "oldest pickle": lambda each: pickle.loads(pickle.dumps(each, protocol=2)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}
ARRAYS = {
    "Forest": ("tokens", "node_begin", "parent", "subtree_last", "position", "multiplicity", "end_node"),
    "Layout": ("forest_token", "input_ids", "position_ids", "subtree_end", "prev", "run_begin", "run_parent", "trajectories",
               "end_run", "multiplicity"),
    "Trajectories": ("offsets", "input_ids", "loss_weights", "logprobs", "ref_logprobs", "advantages", "reward", "turn_rewards",
                     "turn_reward_offsets", "ref_topk_ids", "ref_topk_logprobs", "chosen", "routed_experts"),
}  # fmt: skip


def check_same(ours, theirs):
    assert type(ours) is type(theirs) and repr(ours) == repr(theirs)
    for name in ARRAYS[type(theirs).__name__]:
        mine, other = getattr(ours, name), getattr(theirs, name)
        if other is None:
            assert mine is None, name
        else:
            assert mine.dtype == other.dtype and np.array_equal(mine, other), name
            assert not mine.flags.writeable


@pytest.mark.parametrize("how", COPIES)
def test_forests_and_layouts(how):
    for seed in range(5):
        forest = espalier.build(random_rows(seed))
        twin = COPIES[how](forest)
        check_same(twin, forest)
        assert twin.statistics() == forest.statistics()
        layout = COPIES[how](forest.layout())
        check_same(layout, forest.layout())
        check_same(twin.layout(), layout)
        assert layout.path(3).tolist() == forest.layout().path(3).tolist()


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("strategy", ["partition", "tree-packing", "sequence-packing"])
def test_plans(how, strategy):
    """They keep their forest, though the first one is gone."""
    rows = random_rows(6)
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}  # fmt: skip
    for model in (None, config):
        make = lambda: espalier.plan(espalier.build(rows), token_budget=64, strategy=strategy, model=model_of(model))
        plan, twin = make(), COPIES[how](make())
        assert repr(twin) == repr(plan) and twin.to_dict() == plan.to_dict()
        assert twin.flops == plan.flops and twin.seconds == plan.seconds
        for ours, theirs in zip(twin, plan, strict=True):
            assert np.array_equal(ours.context, theirs.context)
            check_same(ours.layout(), theirs.layout())
            check_same(COPIES[how](ours).layout(), theirs.layout())


def model_of(config):
    if config is None:
        return None
    import tempfile
    from pathlib import Path

    path = Path(tempfile.mkdtemp()) / "config.json"
    path.write_text(json.dumps(config))
    return path


def test_plans_of_one_forest_share_it():
    forest = espalier.build(random_rows(7))
    plans = [espalier.plan(forest, token_budget=budget, strategy="partition") for budget in (16, 64)]
    again, first, second = pickle.loads(pickle.dumps((forest, *plans)))
    assert first.__reduce__()[1][0] is again and second.__reduce__()[1][0] is again
    batch = pickle.loads(pickle.dumps(plans[0][1]))
    assert batch.index == 1 and batch.to_dict() == plans[0][1].to_dict()


def rows_with_everything():
    return [
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "logprobs": [0, -0.5, -0.25], "reward": 1.5, "group_id": "a",
         "trajectory_id": "one", "advantages": [0.0, 1.0, 2.0], "ref_logprobs": [0, -1, -2],
         "routed_experts": [[1, 2], [3, 4], [5, 6]]},
        {"input_ids": [5, 6], "loss_mask": [0, 1], "group_id": "b", "pair_id": "p", "chosen": True},
        {"input_ids": [7, 8, 9], "loss_mask": [0, 1, 1], "turn_rewards": [0.5]},
    ]  # fmt: skip


@pytest.mark.parametrize("how", COPIES)
def test_trajectories(how, tmp_path):
    """In memory, mapped, of several files, and none at all."""
    rows = rows_with_everything()
    espalier.write(tmp_path / "a.safetensors", rows)
    espalier.write(tmp_path / "b.jsonl", rows[1:])
    topk = [{"input_ids": [1, 2], "ref_topk_ids": [[], [3, 4]], "ref_topk_logprobs": [[], [-0.5, -2]]}]
    for given in (espalier.trajectories(rows), espalier.read(tmp_path / "a.safetensors"), espalier.trajectories(topk),
                  espalier.read([tmp_path / "a.safetensors", tmp_path / "b.jsonl"]), espalier.trajectories([])):  # fmt: skip
        twin = COPIES[how](given)
        check_same(twin, given)
        assert (twin.group_id, twin.pair_id, twin.trajectory_id) == (given.group_id, given.pair_id, given.trajectory_id)
        assert {name: each.tolist() for name, each in twin.present.items()} == {
            name: each.tolist() for name, each in given.present.items()}  # fmt: skip
        assert [twin.name(r) for r in range(len(twin))] == [given.name(r) for r in range(len(given))]
        for ours, theirs in zip([twin[r] for r in range(len(twin))], [given[r] for r in range(len(given))], strict=True):
            assert {n: np.asarray(v).tolist() for n, v in ours.items()} == {n: np.asarray(v).tolist() for n, v in theirs.items()}


@pytest.mark.parametrize("how", COPIES)
def test_distributions(how):
    forest = espalier.build(random_rows(9))
    shares = espalier.distribute(forest, ranks=3)
    twin, share = COPIES[how](shares), COPIES[how](shares[1])
    assert repr(twin) == repr(shares) and (twin.imbalance, twin.seconds, twin.least_seconds, twin.repeated_tokens) == (
        shares.imbalance, shares.seconds, shares.least_seconds, shares.repeated_tokens)
    for ours, theirs in zip([*twin, share], [*shares, shares[1]], strict=True):
        assert (ours.seconds, ours.tree_tokens) == (theirs.seconds, theirs.tree_tokens)
        assert ours.trajectories.tolist() == theirs.trajectories.tolist()


CONFIG = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "vocab_size": 100}  # fmt: skip
RATES = {"format_version": 1, "origin": "measured", "seconds_per": {
    "micro_batch": 0.003, "layer": 1e-4, "layer_token": 3e-6, "layer_pair": 1.25e-8, "layer_attention_piece": 7e-6,
    "logit_row": 1 / 3e5}}  # fmt: skip


@pytest.mark.parametrize("how", COPIES)
def test_costs(how, tmp_path):
    """By built-in and by measured rates; the files may be gone."""
    forest = espalier.build(random_rows(10))
    config, rates = tmp_path / "config.json", tmp_path / "rates.json"
    config.write_text(json.dumps(CONFIG))
    rates.write_text(json.dumps(RATES))
    made = [espalier.costs(config), espalier.costs(tmp_path, device="cuda"), espalier.costs(tmp_path, cost_model=rates)]
    config.unlink()
    rates.unlink()
    seconds = set()
    for costs in made:
        twin = COPIES[how](costs)
        assert repr(twin) == repr(costs) and (twin.model_type, twin.calibrated) == (costs.model_type, costs.calibrated)
        ours, theirs = (espalier.plan(forest, token_budget=64, model=each) for each in (twin, costs))
        assert ours.seconds == theirs.seconds and ours.flops == theirs.flops
        seconds.add(ours.seconds)
    assert len(seconds) == 3 and [costs.calibrated for costs in made] == [False, False, True]


def test_costs_of_a_config():
    transformers = pytest.importorskip("transformers")
    costs = espalier.costs(transformers.LlamaConfig(**{name: value for name, value in CONFIG.items() if name != "model_type"}))
    assert repr(pickle.loads(pickle.dumps(costs))) == repr(costs)


@pytest.mark.parametrize("how", COPIES)
def test_reports(how):
    report = espalier.inspect(random_rows(11), title="rows of a test")
    twin = COPIES[how](report)
    assert str(twin) == str(report) and repr(twin) == repr(report) and twin.data == report.data
    assert twin.html() == report.html() and twin._repr_html_() == report._repr_html_()
    check_same(twin.forest, report.forest)
    assert str(COPIES[how](twin)) == str(report)


def test_copies_do_not_view_the_first():
    tokens = np.array([5, 6, 7], np.int32)
    rows = espalier.trajectories({"offsets": np.array([0, 3]), "input_ids": tokens})
    twin = copy.deepcopy(rows)
    tokens[0] = 9
    assert rows.input_ids[0] == 9 and twin.input_ids[0] == 5


def tokens_of(things, answers):
    forest, plan, layout, rows = things
    answers.put((forest.tree_tokens, plan.num_tokens, layout.num_tokens, rows.num_tokens, plan[0].layout().num_tokens))


def test_a_process_that_is_spawned():
    rows = random_rows(8)
    forest = espalier.build(rows)
    plan = espalier.plan(forest, token_budget=64, strategy="partition")
    things = forest, plan, forest.layout(), espalier.trajectories(rows)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=tokens_of, args=(things, answers))
    process.start()
    found = answers.get(timeout=300)
    process.join()
    assert found == (forest.tree_tokens, plan.num_tokens, forest.tree_tokens, sum(map(len, rows)), plan[0].num_tokens)
