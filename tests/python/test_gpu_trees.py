# SPDX-License-Identifier: Apache-2.0
"""bench/gpu_trees.py, counted by brute force, and the mask that FlexAttention gets of its trees."""

import json
import sys

import pytest

from conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "bench"))
import attention_sides
import gpu_step
import gpu_trees as trees

TREES = [trees.chain(7), trees.chains(9, 3), trees.star(5, 3, 2), trees.balanced(26, 2, 3), trees.balanced(40, 3, 3),
         trees.agent(60, 2, 9, 1), trees.agent(33, 1, 4, 5), trees.rollouts(200, 3), trees.rollouts(64, 1)]  # fmt: skip


def dense_mask(tree):
    """By following parents, token by token, without subtree_end."""
    path_of = []
    for node, length in enumerate(tree.lengths):
        above = [token for ancestor in trees.root_path(tree, node)[:-1] for token in tokens_of(tree, ancestor)]
        mine = tokens_of(tree, node)
        path_of += [above + mine[: i + 1] for i in range(length)]
    return [[key in set(path) for key in range(tree.tokens)] for path in path_of]


def tokens_of(tree, node):
    begin = sum(tree.lengths[:node])
    return list(range(begin, begin + tree.lengths[node]))


# ---- Trees and FLOPs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", TREES)
def test_pairs_and_subtree_ends(tree):
    mask = dense_mask(tree)
    assert trees.visible_pairs(tree) == sum(map(sum, mask))
    ends = trees.subtree_end(tree)
    assert mask == [[i <= j < ends[i] for i in range(tree.tokens)] for j in range(tree.tokens)]


@pytest.mark.parametrize("tree", TREES)
def test_nodes_stand_in_preorder(tree):
    open_nodes = []
    for node, parent in enumerate(tree.parents):
        while open_nodes and open_nodes[-1] != parent:
            open_nodes.pop()
        assert parent == (open_nodes[-1] if open_nodes else -1)
        open_nodes.append(node)
    assert all(length >= 1 for length in tree.lengths)


def test_shapes_have_their_tokens():
    assert trees.chain(2048).tokens == 2048 and trees.star(16384, 9, 64).tokens == 16384 + 9 * 64
    for tokens in (4096, 16384):
        assert trees.balanced(tokens, 2, 6).tokens == tokens and len(trees.balanced(tokens, 2, 6).lengths) == 63
        tree = trees.agent(tokens, 50, tokens // 8, 1)
        assert tree.tokens == tokens and all(50 <= length <= tokens // 8 for length in sorted(tree.lengths)[1:])
        assert len(trees.leaves(tree)) > 1


@pytest.mark.parametrize("ratio", [1, 2, 4, 8, 16, 32, 64, 128])
def test_rollouts_reach_their_ratio(ratio):
    tree = trees.rollouts(8192, ratio)
    assert tree.tokens == 8192 and trees.flat_tokens(tree) / 8192 == pytest.approx(ratio, rel=0.01)


@pytest.mark.parametrize("tree", TREES)
def test_flat_counts(tree):
    lengths = [sum(dense_mask(tree)[tokens_of(tree, leaf)[-1]]) for leaf in trees.leaves(tree)]
    assert trees.flat_tokens(tree) == sum(lengths)
    assert trees.flat_pairs(tree) == sum(n * (n + 1) // 2 for n in lengths)


@pytest.mark.parametrize("pairs", [1, 3, 4, 5, 500500, 143681824])
def test_causal_length_has_as_many_pairs(pairs):
    n = trees.causal_length(pairs)
    distance = abs(n * (n + 1) // 2 - pairs)
    assert distance <= min(abs(m * (m + 1) // 2 - pairs) for m in (max(1, n - 1), n + 1))


def test_flops():
    assert trees.attention_flops(10, 2, 64) == (4 * 64 * 20, 10 * 64 * 20)
    for name, parameters in (("0.6b", 596_049_920), ("4b", 4_022_468_096)):  # of the published models, norms included
        config = gpu_step.MODELS[name]
        counted = trees.linear_parameters(config) + config["vocab_size"] * config["hidden_size"]
        assert counted == pytest.approx(parameters, rel=2e-4)
    config = gpu_step.MODELS["tiny"]
    linear, head = trees.linear_parameters(config), config["vocab_size"] * config["hidden_size"]
    attention_and_head = 12 * 128 * 2 * 2 * 5 + 6 * 3 * head
    assert trees.model_flops(config, 3, 5, 3) == 6 * 3 * linear + attention_and_head
    mlp_and_output = config["hidden_size"] * (3 * config["intermediate_size"] + 128 * 2)
    assert trees.model_flops(config, 3, 5, 2) == 6 * (3 * linear - mlp_and_output - head) + attention_and_head


@pytest.mark.parametrize("tree", TREES)
def test_rows_are_the_tree(tree, tmp_path):
    """Trajectories share exactly what the tree says; the rows that predict are those before a token with loss."""
    trees.write_rows(tree, 1000, 0, tmp_path / "rows.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    prefixes, predicting = set(), set()
    for row in rows:
        ids = row["input_ids"]
        prefixes |= {tuple(ids[:end]) for end in range(1, len(ids) + 1)}
        predicting |= {tuple(ids[:t]) for t in range(1, len(ids)) if row["loss_mask"][t]}
    assert len(rows) == len(trees.leaves(tree)) and len(prefixes) == tree.tokens
    assert len(predicting) == trees.predicting_rows(tree)


# ---- The mask of FlexAttention -----------------------------------------------------------------------------


@pytest.mark.parametrize("tree", TREES)
def test_flex_mask_equals_the_dense_mask(tree):
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

    n = tree.tokens
    ends = torch.tensor(trees.subtree_end(tree), dtype=torch.int32)
    mask_mod = attention_sides.tree_mask_mod(ends)
    dense = torch.tensor(dense_mask(tree))
    assert torch.equal(create_mask(mask_mod, None, None, n, n, device="cpu")[0, 0], dense)
    block_mask = create_block_mask(mask_mod, None, None, n, n, device="cpu", BLOCK_SIZE=16)
    q, k, v = torch.randn(3, 1, 2, n, 16, dtype=torch.float64).unbind(0)
    out = flex_attention(q, k, v, block_mask=block_mask)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense)
    assert (out - expected).norm() <= 1e-12 * expected.norm()


def test_another_mask_is_another_result():
    """Negative control: without the end of subtrees, siblings see each other."""
    import torch

    tree = trees.star(5, 3, 2)
    mask_mod = attention_sides.tree_mask_mod(torch.full((tree.tokens,), tree.tokens))
    query, key = torch.meshgrid(torch.arange(tree.tokens), torch.arange(tree.tokens), indexing="ij")
    assert not torch.equal(mask_mod(0, 0, query, key), torch.tensor(dense_mask(tree)))
