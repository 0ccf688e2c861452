# SPDX-License-Identifier: Apache-2.0
"""espalier.megatron: fields of Megatron-LM's open pull request 7387, and what attention by these fields alone computes.

The pull request is https://github.com/NVIDIA/Megatron-LM/pull/7387, its design issue 7386. Names and types below are those of
megatron/core/packed_seq_params.py of arnavkomaragiri/Megatron-LM, the fork of its author, at COMMIT. The reference attention does what
`_tree_attention_forward` of megatron/core/transformer/attention.py says there: each run of queries attends causally to the segments on
its path. Megatron-LM is not installed: a stand-in has the fields.
"""

import dataclasses
import random
import re
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import espalier
from conftest import seed_of
from espalier.errors import InputError

COMMIT = "25cdfee8c95cfaa7fc40325a6458b8b3350d78af"
PACKED = {  # fields of PackedSeqParams, in order
    "qkv_format": "str", "cu_seqlens_q": "Tensor", "cu_seqlens_kv": "Tensor", "cu_seqlens_q_padded": "Tensor",
    "cu_seqlens_kv_padded": "Tensor", "max_seqlen_q": "int", "max_seqlen_kv": "int", "local_cp_size": "int",
    "cp_group": "dist.ProcessGroup", "total_tokens": "int", "seq_idx": "Tensor", "tokens_per_sample": "int",
    "pad_between_seqs": "bool",
}  # fmt: skip
TREE = {  # those that TreePackedSeqParams(PackedSeqParams) adds
    "tree_segment_starts": "Tuple[int, ...]", "tree_segment_lengths": "Tuple[int, ...]", "tree_segment_parents": "Tuple[int, ...]",
    "tree_segment_depths": "Tuple[int, ...]", "tree_local_position_ids": "Tensor", "tree_cp_gather_inverse": "Tensor",
    "tree_query_runs": "Tuple[TreeQueryRun, ...]", "tree_cp_local_token_count": "int", "tree_edge_local_indices": "Tensor",
    "tree_edge_output_indices": "Tensor", "tree_edge_count": "int", "tree_edge_padded_width": "int",
}  # fmt: skip
QUERY_RUN = {"segment_index": "int", "global_start": "int", "global_end": "int", "local_indices": "Tensor"}
NOT_SET = {"local_cp_size", "cp_group", "total_tokens", "seq_idx", "tokens_per_sample", "pad_between_seqs"}  # as in the change's test
INT32 = {"cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"}

EXACT = 1e-12
VOCABULARY, HEADS, WIDTH = 23, 2, 4


# ---------------------------------------------------------------------------------------------------------- fields of the change


def stand_in(tree=TREE):
    """The module of the change with its classes: fields, defaults of None, and nothing else."""
    home = ModuleType("megatron.core.packed_seq_params")
    home.TreeQueryRun = dataclasses.make_dataclass("TreeQueryRun", list(QUERY_RUN), frozen=True)
    fields = [(name, Any, dataclasses.field(default=None)) for name in {**PACKED, **tree}]
    home.TreePackedSeqParams = dataclasses.make_dataclass("TreePackedSeqParams", fields)
    return home


@pytest.fixture
def megatron(monkeypatch):
    home = stand_in()
    for name in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, home.__name__, home)
    return home


def is_of_type(name, value, kind, home):
    if kind == "Tensor":
        return isinstance(value, torch.Tensor) and value.dtype == (torch.int32 if name in INT32 else torch.int64) and value.dim() == 1
    if kind.startswith("Tuple"):
        kind = home.TreeQueryRun if "TreeQueryRun" in kind else int
        return type(value) is tuple and all(type(each) is kind for each in value)
    return type(value) is {"int": int, "str": str}[kind]


@pytest.mark.parametrize("ranks", [1, 2])
def test_fields_are_those_of_the_change(megatron, ranks):
    for packed in espalier.megatron.pack(plan_of(random_rows(3)), context_parallel=ranks, context_rank=ranks - 1):
        params = packed.params()
        assert type(params) is megatron.TreePackedSeqParams
        assert packed.arguments.keys() == {**PACKED, **TREE}.keys() - NOT_SET
        for name in packed.arguments:
            assert is_of_type(name, getattr(params, name), {**PACKED, **TREE}[name], megatron), name
        for run in params.tree_query_runs:
            assert all(is_of_type(name, getattr(run, name), kind, megatron) for name, kind in QUERY_RUN.items())
        # What its __post_init__ asks for, and layouts of NeMo-RL's pull request 4147, which makes these parameters.
        starts, lengths, parents, depths = (getattr(params, f"tree_segment_{name}") for name in ("starts", "lengths", "parents", "depths"))
        assert len(starts) == len(lengths) == len(parents) == len(depths) and min(lengths) > 0
        assert np.cumsum([0, *lengths]).tolist() == [*starts, len(packed.subtree_end)]
        for segment, (parent, depth) in enumerate(zip(parents, depths)):
            assert parent < segment and depth == (0 if parent < 0 else depths[parent] + lengths[parent])
        assert params.max_seqlen_q == max(depth + length for depth, length, start in zip(depths, lengths, starts) if packed.places[start] >= 0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_tree_of_the_test_of_the_change(ranks):
    """128 tokens that the change's own test on GPUs writes out: a trunk of 48, a branch of 32 and a leaf of 16 after it, and a sibling
    of 32 that crosses chunks. Branch and leaf are one segment here: nothing branches between them."""
    rows = [list(range(96)), list(range(80)), [*range(48), *range(96, 128)]]
    plan = espalier.plan(espalier.build(rows), token_budget=128, strategy="tree-packing")
    of_rank = [espalier.megatron.pack(plan, context_parallel=ranks, context_rank=rank)[0] for rank in range(ranks)]
    positions = torch.tensor([*range(96), *range(48, 80)])
    chunks = torch.arange(128).chunk(2 * ranks)
    shards = [torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]]) for rank in range(ranks)]
    runs = [[(0, 0, 48), (1, 48, 96), (2, 96, 128)]] if ranks == 1 else [[(0, 0, 32), (2, 96, 128)], [(0, 32, 48), (1, 48, 96)]]
    for packed, shard, expected in zip(of_rank, shards, runs):
        fields = packed.arguments
        assert torch.equal(packed.shard, shard) and torch.equal(packed.input_ids, shard)
        assert torch.equal(fields["tree_local_position_ids"], positions[shard])
        assert torch.equal(fields["tree_cp_gather_inverse"], torch.argsort(torch.cat(shards)))
        assert fields["cu_seqlens_q"].tolist() == [0, 128] and fields["tree_cp_local_token_count"] == 128 // ranks
        found = [fields[f"tree_segment_{name}"] for name in ("starts", "lengths", "parents", "depths")]
        assert found == [(0, 48, 96), (48, 48, 32), (-1, 0, 0), (0, 48, 48)]
        assert [run[:3] for run in fields["tree_query_runs"]] == expected
        assert torch.equal(torch.cat([run.local_indices for run in fields["tree_query_runs"]]), torch.arange(128 // ranks))


@pytest.mark.parametrize("faulty", ["no module", "no class", "other fields"])
def test_another_megatron_is_refused(megatron, monkeypatch, faulty):
    (packed,) = espalier.megatron.pack(plan_of([[1, 2, 3]]))
    expected = "expected TreePackedSeqParams and TreeQueryRun of Megatron-LM's pull request 7387, received"
    if faulty == "no module":
        monkeypatch.setitem(sys.modules, megatron.__name__, None)
    elif faulty == "no class":
        del megatron.TreePackedSeqParams
    else:
        others = stand_in({name.replace("_cp_", "_context_"): kind for name, kind in TREE.items()})
        megatron.TreePackedSeqParams = others.TreePackedSeqParams
        expected = f"fields of commit {COMMIT[:12]}, received none named tree_cp_gather_inverse, tree_cp_local_token_count"
    with pytest.raises(ImportError, match=re.escape(expected)):
        packed.params()


# ------------------------------------------------------------------------------------------------------- attention by these fields


def random_rows(seed):
    """Rows that branch off one another anywhere, from several roots, with duplicates and rows that others extend."""
    draw = random.Random(seed_of(seed))
    print(f"seed {seed_of(seed)}")
    rows = [[draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, 9))] for _ in range(3)]
    for _ in range(15):
        prefix = draw.choice(rows)
        prefix = prefix[: draw.randrange(1, len(prefix) + 1)]
        rows.append(prefix + [draw.randrange(VOCABULARY) for _ in range(draw.randrange(7))])
    return rows


def plan_of(rows, budget=40, strategy="tree-packing", **options):
    return espalier.plan(espalier.build(rows, **options), token_budget=budget, strategy=strategy)


def make_weights(seed):
    """A decoder of two layers of attention in float64: embeddings, (q, k, v, output) of each layer, and the head."""
    draw = torch.Generator().manual_seed(seed_of(seed))
    shapes = [(VOCABULARY, HEADS * WIDTH), *[(HEADS * WIDTH, HEADS * WIDTH)] * 8, (HEADS * WIDTH, VOCABULARY)]
    return [torch.randn(shape, dtype=torch.float64, generator=draw).mul(0.4).requires_grad_() for shape in shapes]


def rotated(values, positions):
    """Rotary embedding of [tokens, heads, width]."""
    angles = positions[:, None, None] * 0.7 ** torch.arange(WIDTH // 2, dtype=torch.float64)
    first, second = values.chunk(2, dim=-1)
    return torch.cat([first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], dim=-1)


def attend(query, key, value, mask):
    scores = torch.einsum("qhd,khd->hqk", query, key).masked_fill(~mask, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


def causal(query, key, value):
    """The last queries of a path, as FlashAttention aligns them: the last one sees all keys."""
    queries, keys = len(query), len(key)
    return attend(query, key, value, torch.arange(keys) <= torch.arange(keys - queries, keys)[:, None])


def hidden_states(weights, ids, positions, attention):
    """[L, hidden] of each shard. ids and positions have a tensor for each shard, and attention takes and gives such lists."""
    embedding, layers = weights[0], weights[1:-1]
    hidden = [embedding[each] for each in ids]
    for first in range(0, len(layers), 4):
        split = [[(each @ weight).view(-1, HEADS, WIDTH) for weight in layers[first : first + 3]] for each in hidden]
        query, key, value = zip(*split)
        query, key = ([rotated(*pair) for pair in zip(values, positions)] for values in (query, key))
        mixed = attention(query, key, value)
        hidden = [each + torch.tanh(new.flatten(1) @ layers[first + 3]) for each, new in zip(hidden, mixed)]
    return hidden


def by_subtree_ends(shards):
    """Attention by the mask alone, of one shard."""
    (packed,) = shards
    tokens = torch.arange(len(packed.subtree_end))
    mask = (tokens <= tokens[:, None]) & (tokens[:, None] < packed.subtree_end)
    return lambda query, key, value: [attend(query[0], key[0], value[0], mask)]


def by_segments(shards):
    """Attention as the change computes it: keys and values of all ranks in the order of tokens, and for each run of queries those
    of the segments on its path."""

    def path_of(fields, run):
        """Packed tokens from the root to the run's last query."""
        tokens, segment = [torch.arange(fields["tree_segment_starts"][run.segment_index], run.global_end)], run.segment_index
        while (segment := fields["tree_segment_parents"][segment]) != -1:
            start = fields["tree_segment_starts"][segment]
            tokens.append(torch.arange(start, start + fields["tree_segment_lengths"][segment]))
        return torch.cat(tokens[::-1])

    def attention(queries, keys, values):
        outputs = []
        for query, packed in zip(queries, shards):
            inverse = packed.arguments["tree_cp_gather_inverse"]
            key, value = (torch.cat(parts).index_select(0, inverse) for parts in (keys, values))
            output = torch.zeros_like(query)
            for run in packed.arguments["tree_query_runs"]:
                path = path_of(packed.arguments, run)
                output = output.index_copy(0, run.local_indices, causal(query[run.local_indices], key[path], value[path]))
            outputs.append(output)
        return outputs

    return attention


def logprobs_of_terms(packed, hidden, head):
    """Those of a shard, from states that are selected before the head as `_select_tree_edge_hidden_states` does it."""
    count = len(packed.arguments["tree_edge_output_indices"])
    states = hidden[:1] * 0 if count == 0 else hidden.index_select(0, packed.arguments["tree_edge_local_indices"][:count])
    return torch.log_softmax(states @ head, dim=-1)[:count].gather(1, packed.targets[:, None])[:, 0]


def on_trees(weights, micro_batches, attention_of, advantages):
    """The rows' hidden states and log-probabilities by row, and the gradients of a loss, by the fields of the micro-batches alone.

    micro_batches  for each of them the PackedTrees of all ranks"""
    states, logprobs, loss = {}, {}, 0
    for shards in micro_batches:
        local = hidden_states(weights, [each.input_ids for each in shards], [each.position_ids for each in shards], attention_of(shards))
        terms = [logprobs_of_terms(packed, hidden, weights[-1]) for packed, hidden in zip(shards, local)]
        cells = sum(packed.to_rows(each) for packed, each in zip(shards, terms))
        carry = sum(packed.to_rows(packed.weights.double()) for packed in shards)
        assert sum(len(each) for each in terms) == shards[0].arguments["tree_edge_count"]
        whole = torch.cat(local).index_select(0, shards[0].arguments["tree_cp_gather_inverse"])
        for number, row in enumerate(shards[0].rows.tolist()):
            begin, end = shards[0].row_offsets[number : number + 2].tolist()
            states[row] = whole[shards[0].row_tokens[begin:end]].detach()
            logprobs[row] = cells[number, : end - begin - 1].detach()
            loss = loss - advantages[row] * (carry * cells)[number].sum()
    return states, logprobs, torch.autograd.grad(loss, weights)


def each_row_alone(weights, rows, mask, advantages):
    """The same by ordinary causal attention on every row."""
    states, logprobs, loss = {}, {}, 0
    for number, row in enumerate(rows):
        ids = torch.tensor(row)
        (hidden,) = hidden_states(weights, [ids], [torch.arange(len(row))], lambda query, key, value: [causal(query[0], key[0], value[0])])
        every = torch.log_softmax(hidden[:-1] @ weights[-1], dim=-1).gather(1, ids[1:, None])[:, 0]
        carry = torch.tensor(mask[number][1:], dtype=torch.float64)
        states[number], logprobs[number] = hidden.detach(), torch.where(carry > 0, every, 0).detach()
        loss = loss - advantages[number] * (carry * every).sum()
    return states, logprobs, torch.autograd.grad(loss, weights)


def worst_error(found, expected):
    """The largest difference of states, log-probabilities and gradients, each relative to the largest number."""
    assert found[0].keys() == found[1].keys() == expected[0].keys()
    pairs = [(torch.cat([part[row].flatten() for row in sorted(part)]), torch.cat([other[row].flatten() for row in sorted(other)]))
             for part, other in zip(found[:2], expected[:2])]  # fmt: skip
    pairs += zip(found[2], expected[2])
    return max(float((left - right).abs().max() / right.abs().max()) for left, right in pairs)


def case_of(seed):
    """(rows, mask with weights, advantages, weights of the decoder)."""
    rows, draw = random_rows(seed), random.Random(seed_of(seed) + 1)
    mask = [[draw.choice([0.0, 1.0, 1.0, 0.25]) for _ in row] for row in rows]
    return rows, mask, [draw.uniform(-1, 1) for _ in rows], make_weights(seed)


def all_ranks(plan, mask, ranks=1, **options):
    return list(zip(*(espalier.megatron.pack(plan, loss_mask=mask, context_parallel=ranks, context_rank=rank, **options) for rank in range(ranks))))


@pytest.mark.parametrize("strategy", ["tree-packing", "append-only", "sequence-packing"])
@pytest.mark.parametrize("attention, ranks, multiple", [(by_subtree_ends, 1, None), (by_subtree_ends, 1, 4), (by_segments, 1, None),
                                                        (by_segments, 1, 3), (by_segments, 2, None), (by_segments, 3, 12)])  # fmt: skip
@pytest.mark.parametrize("seed", range(3))
def test_attention_by_these_fields_is_that_of_the_rows(seed, attention, ranks, multiple, strategy):
    rows, mask, advantages, weights = case_of(seed)
    plan = plan_of(rows, strategy=strategy, most_leaves_first=seed == 1)
    micro_batches = all_ranks(plan, mask, ranks, pad_to_multiple_of=multiple)
    assert len(micro_batches) > 1
    found = on_trees(weights, micro_batches, attention, advantages)
    assert worst_error(found, each_row_alone(weights, rows, mask, advantages)) <= EXACT


def broken(packed, name):
    """The same micro-batch with one field that is wrong."""
    fields = dict(packed.arguments)
    if name in fields:
        value = fields[name]
        if name == "tree_query_runs":
            fields[name] = tuple(run._replace(global_end=max(run.global_start + 1, run.global_end - 1)) for run in value)
        elif name == "tree_segment_parents":
            fields[name] = tuple(-1 for _ in value)
        elif name == "tree_local_position_ids":
            fields[name] = torch.arange(len(value))
        else:
            fields[name] = value.roll(1) if isinstance(value, torch.Tensor) else (*value[1:], value[-1])
        return dataclasses.replace(packed, arguments=fields)
    value = getattr(packed, name)
    return dataclasses.replace(packed, **{name: torch.full_like(value, len(value)) if name == "subtree_end" else value.roll(1)})


@pytest.mark.parametrize("name, attention", [
    ("subtree_end", by_subtree_ends), ("tree_local_position_ids", by_subtree_ends), ("row_tokens", by_subtree_ends),
    ("input_ids", by_subtree_ends), ("targets", by_subtree_ends), ("weights", by_subtree_ends),
    ("tree_edge_local_indices", by_segments), ("tree_edge_output_indices", by_segments), ("tree_cp_gather_inverse", by_segments),
    ("tree_query_runs", by_segments), ("tree_segment_parents", by_segments), ("tree_segment_starts", by_segments),
    ("tree_segment_lengths", by_segments)])  # fmt: skip
def test_a_wrong_field_is_found(name, attention):
    """Negative controls: with any field wrong, results are others, or cannot be computed."""
    rows, mask, advantages, weights = case_of(0)
    micro_batches = all_ranks(plan_of(rows, budget=80), mask, ranks=1 if attention is by_subtree_ends else 2)
    expected = each_row_alone(weights, rows, mask, advantages)
    assert worst_error(on_trees(weights, micro_batches, attention, advantages), expected) <= EXACT
    micro_batches = [[broken(packed, name) for packed in shards] for shards in micro_batches]
    try:
        error = worst_error(on_trees(weights, micro_batches, attention, advantages), expected)
    except (IndexError, RuntimeError):
        return
    assert not error <= 1e-3  # nan as well: a query without keys


# -------------------------------------------------------------------------------------------------------------- maps and refusals


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ranks, multiple", [(1, None), (1, 5), (2, 8)])
def test_maps_between_rows_and_tokens(seed, ranks, multiple):
    rows = random_rows(seed)
    seen, encoded = [], 0
    for shards in all_ranks(plan := plan_of(rows), None, ranks, pad_to_multiple_of=multiple):
        packed = shards[0]
        ids = torch.cat([each.input_ids for each in shards])[packed.arguments["tree_cp_gather_inverse"]]
        flat = [rows[row] for row in packed.rows.tolist()]
        assert packed.row_offsets.tolist() == np.cumsum([0, *map(len, flat)]).tolist()
        assert ids[packed.row_tokens].tolist() == sum(flat, [])
        is_token = packed.places >= 0
        assert torch.equal(packed.row_tokens[packed.places[is_token]], torch.arange(len(ids))[is_token]) and not ids[~is_token].any()
        ends = packed.arguments["cu_seqlens_q"]
        assert ends[-1] == len(ids) and all(length % (multiple or 1) == 0 for length in ends.diff().tolist())
        assert len(ends) - 1 == len({tuple(row[:1]) for row in flat})  # trees of rows that share their first token
        assert torch.equal(torch.cat([each.shard for each in shards]).sort().values, torch.arange(len(ids)))
        grid = sum(each.to_rows(each.targets) for each in shards)
        assert grid.tolist() == [row[1:] + [0] * (grid.shape[1] - len(row) + 1) for row in flat]
        seen += packed.rows.tolist()
        encoded += int(is_token.sum())
    assert sorted(seen) == list(range(len(rows))) and encoded == plan.num_tokens


def test_a_shard_that_predicts_nothing():
    rows = [[1, 2, 3, 4, 5, 6, 7, 8]]
    idle, busy = all_ranks(plan_of(rows), [[0, 0, 0, 0, 1, 0, 0, 0]], ranks=2)[0]
    assert idle.targets.tolist() == [] and idle.arguments["tree_edge_local_indices"].tolist() == [0]
    assert busy.targets.tolist() == [5] and busy.shard[busy.arguments["tree_edge_local_indices"]].tolist() == [3]
    assert idle.arguments["tree_edge_count"] == busy.arguments["tree_edge_count"] == 1
    assert idle.to_rows(idle.weights).tolist() == [[0.0] * 7]


def test_rows_of_one_token():
    (packed,) = espalier.megatron.pack(plan_of([[7], [3]]))
    assert packed.arguments["cu_seqlens_q"].tolist() == [0, 1, 2] and packed.to_rows(packed.weights).shape == (2, 0)
    assert espalier.megatron.pack(plan_of([])) == []


def test_on_another_device():
    (packed,) = espalier.megatron.pack(plan_of([[1, 2, 3], [1, 4]]))
    there = packed.to("meta")
    tensors = [value for value in [*vars(there).values(), *there.arguments.values()] if isinstance(value, torch.Tensor)]
    tensors += [run.local_indices for run in there.arguments["tree_query_runs"]]
    assert len(tensors) == 9 + 8 + 3 and {each.device.type for each in tensors} == {"meta"}
    assert there.arguments["tree_segment_starts"] == packed.arguments["tree_segment_starts"]


@pytest.mark.parametrize("options, message", [
    (dict(loss_mask=[[1, 1]]), "loss_mask: expected 2 rows, received 1"),
    (dict(context_parallel=0), "context_parallel: expected a whole number above 0, received 0"),
    (dict(context_parallel=2, context_rank=2), "context_rank: expected a rank from 0 to 1, received 2"),
    (dict(pad_to_multiple_of=0), "pad_to_multiple_of: expected a multiple of 1 with context_parallel=1, received 0"),
    (dict(context_parallel=2, pad_to_multiple_of=6), "pad_to_multiple_of: expected a multiple of 4 with context_parallel=2, received 6"),
])  # fmt: skip
def test_refusals(options, message):
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        espalier.megatron.pack(plan_of([[1, 2, 3], [1, 2]]), **options)


def test_plans_that_are_refused():
    with pytest.raises(InputError, match="^plan: expected a Plan, as espalier.plan makes it, received Forest$"):
        espalier.megatron.pack(espalier.build([[1]]))
    plan = plan_of([[1, 2, 3, 4, 5], [1, 2, 3, 6, 7]], budget=4, strategy="partition")
    expected = 'plan: expected micro-batches of whole rows, as strategy="tree-packing" makes them, received partition, whose micro-batch 1'
    with pytest.raises(InputError, match=f"^{re.escape(expected)}"):
        espalier.megatron.pack(plan)
