# SPDX-License-Identifier: Apache-2.0
"""Ranks that have shards of the same micro-batches: two and four of them over Gloo, which run the checks of cp_checks.py, and up
to 64 simulated ones, whose shards, blocks and exchanges are compared with what tokens see. `--long` takes every shape for every
family."""

import functools
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import espalier
from conftest import seed_of
from cp_shapes import SHAPES, random_trees
from rank_processes import check_passed, names_and_ranks, outcomes

pytest.importorskip("transformers")
cp_checks = pytest.importorskip("cp_checks")
from espalier.hf.exchange import Swap  # noqa: E402
from espalier.native import core  # noqa: E402
from espalier.step.division import Division, pair_cost  # noqa: E402
from espalier.step.plan import StepPlan  # noqa: E402

RANKS = [3, 8, 64]
PAIR = 1e-2  # what a visible pair costs, in tokens


@pytest.fixture(scope="module")
def found(tmp_path_factory, long_tests):
    return outcomes("cp_checks", tmp_path_factory.mktemp("parts"), sorted(cp_checks.CHECKS), ESPALIER_LONG_TESTS=str(int(long_tests)))


@pytest.mark.parametrize("name, ranks", names_and_ranks(cp_checks.CHECKS))
def test_on_ranks(found, name, ranks):
    check_passed(found, name, ranks)


class Simulated:
    """All ranks of a group on one plan. Rows are tokens of the forest, by their numbers there."""

    def __init__(self, rows, ranks, budget, is_contiguous):
        self.forest = espalier.build(rows)
        plan = StepPlan(espalier.plan(self.forest, token_budget=budget, strategy="partition"))
        self.plan, self.whole = plan, self.forest.layout()
        self.divisions = [Division(plan, rank, ranks, PAIR, is_contiguous) for rank in range(ranks)]
        self.left = {}  # what ranks have left of each micro-batch

    def numbers(self, batch, division):
        """Of the shard of a rank; none where it has a stand-in."""
        shard = division.shard(batch)
        return self.plan.layout(batch).forest_token[shard.tokens[:0] if shard.is_stand_in else shard.tokens]

    @staticmethod
    def exchanged(swaps, sources):
        """What each rank receives. sources: by rank a list of arrays, in which its picks are."""
        sent = []
        for swap, of_rank in zip(swaps, sources):
            rows = [row for pick, source in zip(swap.picks, of_rank) for row in [source[place] for place in pick]]
            rows = [rows[place] for place in swap.order] if len(swap.order) else rows
            assert sum(swap.send) == len(rows)
            bounds = np.cumsum([0, *swap.send])
            sent.append([rows[begin:end] for begin, end in itertools.pairwise(bounds)])
        for rank, swap in enumerate(swaps):
            assert [len(of[rank]) for of in sent] == list(swap.receive)
            assert swap.is_needed == any(sum(each.send) for each in swaps) and swap.send[rank] == 0
        return [[row for of in sent for row in of[rank]] for rank in range(len(swaps))]


def is_visible(whole, query, key, window, chunk):
    distance = whole.position_ids[query] - whole.position_ids[key]
    return (key <= query < whole.subtree_end[key] and (not window or distance < window)
            and (not chunk or whole.position_ids[query] // chunk == whole.position_ids[key] // chunk))  # fmt: skip


def check_keys(of, batch, window, chunk):
    """Each query sees what it should, once, and nothing is sent that no query of the receiver sees."""
    held = [[of.numbers(ancestor, division) for ancestor in (*of.plan.context(batch).ancestors, batch)] for division in of.divisions]
    reads = [division.keys(batch, window, chunk) for division in of.divisions]
    swaps = [Swap(read.picks, read.order, read.send, read.receive, read.most_received) for read in reads]
    received = of.exchanged(swaps, held)
    for division, own, read, more in zip(of.divisions, held, reads, received):
        shard, tokens, seen = division.shard(batch), own[-1], []
        for query in range(len(tokens)):
            seen += [(tokens[query], tokens[key]) for key in range(query + 1) if query < shard.subtree_end[key]]
        segments = [*own[:-1], np.array(more, np.int64)]
        for (segment, begin, end, first, last), position in zip(read.blocks, read.positions):
            keys = segments[segment][begin:end]
            assert (of.whole.position_ids[keys] == position + np.arange(end - begin)).all()
            seen += [(query, key) for query in tokens[first:last] for key in keys]
        wanted = {(query, key) for query in tokens for key in range(query + 1) if is_visible(of.whole, query, key, window, chunk)}
        limited = {pair for pair in seen if is_visible(of.whole, *pair, window, chunk)}
        assert limited == wanted and len(seen) == len(set(seen))
        assert window or chunk or len(seen) == len(wanted)
        assert set(more) == {key for _, key in wanted} & set(more) and len(more) == len(set(more))


def check_states(of, batch):
    """A recurrence whose state is the path itself, and whose A is where the path came from."""
    scans, numbers = [division.scan(batch) for division in of.divisions], [of.numbers(batch, division) for division in of.divisions]
    parent = of.left.get(of.plan.parent[batch])
    states = [[] for _ in scans]
    if parent is not None:
        received = of.exchanged([scan.from_parent for scan in scans], [[rows] for rows in parent])
        states = [[*(rows[place] for place in scan.own), *more] for scan, rows, more in zip(scans, parent, received)]
    swaps = [scan.swap for scan in scans]
    assert len({swap is None for swap in swaps}) == 1
    if swaps[0] is not None:
        firsts = [[(paths[end], is_open[end]) for end in scan.first.ends] for scan, (paths, is_open) in
                  zip(scans, map(first_pass, scans, numbers, states))]  # fmt: skip
        received = of.exchanged(swaps, [[rows] for rows in firsts])
        for rank, scan in enumerate(scans):
            known = [list(of_one) for of_one in ([firsts[rank][place] for place in scan.kept] + received[rank])]
            for which, before in scan.levels:
                for place, other in zip(which, before):
                    assert known[place][1]  # what is closed goes on from nothing
                    known[place][0] = known[other][0] + known[place][0]
            states[rank] = states[rank] + [known[place][0] for place in scan.entering]
    left = []
    for scan, tokens, before in zip(scans, numbers, states):
        paths = paths_along(scan.prev, tokens, before)
        for token, path in zip(tokens, paths):
            expected = [token]
            while of.whole.prev[expected[0]] >= 0:
                expected.insert(0, of.whole.prev[expected[0]])
            assert path == tuple(expected)
        left.append([paths[end] for end in scan.ends])
    of.left[batch] = left


def first_pass(scan, tokens, states):
    """(paths, is_open) of the tokens of the first pass."""
    numbers = [tokens[place] for place in scan.first.tokens]
    is_open = []
    for prev in scan.first.open:
        is_open.append(is_open[prev] if prev >= 0 else prev == -2)
    return paths_along(scan.first.prev, numbers, states), is_open


def paths_along(prev, tokens, states):
    paths = []
    for token, before in zip(tokens, prev):
        paths.append((paths[before] if before >= 0 else states[-2 - before] if before < -1 else ()) + (token,))
    return paths


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ranks", RANKS)
def test_shards(shape, ranks):
    """Every token is in one shard, sees what it should, and has the state of its path."""
    rows = SHAPES[shape]()
    for budget in (10**6, 9) if ranks < 64 else (10**6,):
        of = Simulated(rows, ranks, budget, is_contiguous=budget != 9)
        tokens = [number for batch in of.plan.running for division in of.divisions for number in of.numbers(batch, division)]
        assert sorted(tokens) == list(range(of.forest.tree_tokens))
        assert len({division.digest() for division in of.divisions}) == 1
        costs = np.array([[(1 + PAIR * (of.whole.position_ids[of.numbers(batch, division)] + 1)).sum() for division in of.divisions]
                          for batch in of.plan.running])  # fmt: skip
        assert of.divisions[0].imbalance() == pytest.approx(costs.max(1).sum() / costs.mean(1).sum() - 1)
        for batch in of.plan.running:
            for window, chunk in (0, 0), (4, 0), (0, 5), (4, 5):
                check_keys(of, batch, window, chunk)
            check_states(of, batch)
        terms = [division.terms(batch) for batch in of.plan.running for division in of.divisions]
        assert sum(len(each.rows) for each in terms) == sum(of.plan.num_terms)


def test_what_the_simulation_finds():
    """Negative controls: a query that does not see a block, states that nobody continues."""
    of = Simulated(SHAPES["deep"](), 4, 10**6, is_contiguous=True)
    (batch,) = of.plan.running
    keys = cp_checks.copied(of.divisions[2].keys(batch, 0, 0))
    keys.blocks[0, 4] -= 1
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError):
        patch.setattr(of.divisions[2], "keys", lambda *_: keys)
        check_keys(of, batch, 0, 0)
    scans = [division.scan(batch) for division in of.divisions]
    check_states(of, batch)
    for scan in scans:
        scan.prev[scan.prev < -1] = -1
    for division, scan in zip(of.divisions, scans):
        division.scan = functools.partial(lambda given, _batch: given, scan)
    with pytest.raises(AssertionError):
        check_states(of, batch)


@pytest.mark.parametrize("heads, rows, groups", [(8, 4096, 4), (8, 4095, 2), (8, 10**6, 4), (8, 2047, 1), (8, 0, 1), (6, 4096, 3),
                                                 (7, 10**6, 1), (1, 10**6, 1)])  # fmt: skip
def test_groups_of_heads(heads, rows, groups):
    """At most four, of equally many heads, with a MiB each. Rows of 8 heads have 1,024 bytes, and those of others as many or more."""
    sizes = 48 * 8 // heads + 1 * (heads != 8), 16 * 8 // heads + 1 * (heads != 8)
    key, value = (torch.zeros(3, heads, size, dtype=torch.bfloat16) for size in sizes)
    assert cp_checks.exchange.Route.head_groups(SimpleNamespace(most=rows), key, value) == groups


def llama(**sizes):
    import transformers

    return transformers.LlamaConfig(**dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                           num_attention_heads=4, num_key_value_heads=2) | sizes)  # fmt: skip


def test_what_a_pair_costs():
    import transformers

    of = lambda length: pair_cost(llama(hidden_size=256, intermediate_size=length), "cpu")
    assert 0 < of(2048) < of(512) < 0.01
    assert pair_cost(transformers.GPT2Config(), "cuda") == core.pair_cost(None) == pytest.approx(2e-4, rel=0.5)


def differing(run, plan, ranks, pair, is_contiguous=False):
    """Micro-batches that espalier.Step does not divide as the C++ trainer does with these costs."""
    divided = core.divide(plan, ranks, pair, is_contiguous)
    groups = [SimpleNamespace(rank=rank, size=ranks) for rank in range(ranks)]
    divisions = [run._divided_over(group).division for group in groups]
    found = []
    for batch in range(len(plan)):
        shards = [divided.tokens(batch, rank) for rank in range(ranks)]
        assert sorted(np.concatenate(shards)) == list(range(plan[batch].num_tokens))
        if any(not np.array_equal(division.tokens(batch), shard) for division, shard in zip(divisions, shards)):
            found.append(batch)
    return found


def test_both_trainers_divide_alike(tmp_path):
    """On random forests. Negative controls: costs without pairs, and the division of recurrent models."""
    import transformers

    print(f"seed {seed_of(31)}")
    model = transformers.LlamaForCausalLM(llama(max_position_embeddings=4096))
    model.config.save_pretrained(tmp_path)
    pair = core.pair_cost(core.costs(tmp_path, "cpu", None))  # as `espalier train` reads the model
    wrong = {"no pairs": 0, "contiguous": 0}
    for number in range(12):
        rows = SHAPES["deep"]() if number == 0 else random_trees(31 + number, most=400)()
        forest = espalier.build(rows)
        budget = max(1, forest.tree_tokens // (1 + number % 3))
        plan = espalier.plan(forest, token_budget=budget, strategy="partition")
        run = espalier.Step(model, plan)
        for ranks in 2, 3, 8:
            assert differing(run, plan, ranks, pair) == [], (seed_of(31 + number), ranks)
            wrong["no pairs"] += len(differing(run, plan, ranks, 0.0))
            wrong["contiguous"] += len(differing(run, plan, ranks, pair, is_contiguous=True))
    assert min(wrong.values()) > 10, (seed_of(31), wrong)
