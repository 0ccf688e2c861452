# SPDX-License-Identifier: Apache-2.0
"""Trees of tokens that the GPU benchmarks measure, and what they cost: visible pairs, flat tokens, FLOPs.

A tree is its nodes in preorder; docs/math.md says what is visible. Plain Python, without torch.
"""

import math
import random
from typing import NamedTuple


class Tree(NamedTuple):
    """Nodes in preorder: the parent's index (-1: a root) and the number of tokens of each."""

    parents: list
    lengths: list

    @property
    def tokens(self):
        return sum(self.lengths)


def subtree_tokens(tree):
    """By node: the tokens of its subtree."""
    sizes = list(tree.lengths)
    for node in range(len(sizes) - 1, -1, -1):
        if tree.parents[node] >= 0:
            sizes[tree.parents[node]] += sizes[node]
    return sizes


def subtree_end(tree):
    """By token: one past the last token of the subtree of its node."""
    ends, begin = [], 0
    for length, size in zip(tree.lengths, subtree_tokens(tree)):
        ends += [begin + size] * length
        begin += length
    return ends


def visible_pairs(tree):
    """(query, key) pairs: a causal triangle per node, and its tokens seen by all below."""
    return sum(n * (n + 1) // 2 + n * (size - n) for n, size in zip(tree.lengths, subtree_tokens(tree)))


def leaves(tree):
    inner = set(tree.parents)
    return [node for node in range(len(tree.lengths)) if node not in inner]


def root_path(tree, node):
    """Nodes from the root to `node`."""
    path = []
    while node >= 0:
        path.append(node)
        node = tree.parents[node]
    return path[::-1]


def flat_tokens(tree):
    """Tokens of the trajectories that end at leaves, with repetition."""
    return sum(tree.lengths[node] for leaf in leaves(tree) for node in root_path(tree, leaf))


def flat_pairs(tree):
    """Visible pairs of the same trajectories, each by itself."""
    lengths = [sum(tree.lengths[node] for node in root_path(tree, leaf)) for leaf in leaves(tree)]
    return sum(n * (n + 1) // 2 for n in lengths)


# ---- Shapes ------------------------------------------------------------------------------------------------


def chain(tokens):
    return Tree([-1], [tokens])


def chains(tokens, count):
    return Tree([-1] * count, [tokens // count] * count)


def star(prompt, responses, response_tokens):
    """One prompt and its responses: a group of GRPO."""
    return Tree([-1] + [0] * responses, [prompt] + [response_tokens] * responses)


def balanced(tokens, branching, depth):
    """A complete tree of equal nodes (the root takes what is left)."""
    nodes = sum(branching**level for level in range(depth))
    parents = []

    def grow(parent, levels):
        parents.append(parent)
        node = len(parents) - 1
        for _ in range(branching if levels > 1 else 0):
            grow(node, levels - 1)

    grow(-1, depth)
    each = tokens // nodes
    return Tree(parents, [tokens - each * (nodes - 1)] + [each] * (nodes - 1))


def agent(tokens, low, high, seed):
    """Rollouts of an agent: nodes of low to high tokens, each below the one before it or below a random earlier one."""
    rng = random.Random(seed)
    parents, lengths = [-1], [rng.randint(low, high)]
    while sum(lengths) < tokens:
        node = len(lengths)
        parents.append(node - 1 if rng.random() < 0.6 else rng.randrange(node))
        lengths.append(rng.randint(low, high))
    lengths[-1] -= sum(lengths) - tokens
    return in_preorder(Tree(parents, lengths))


def in_preorder(tree):
    """The same tree, whose nodes may stand in any order with parents before children, renumbered."""
    children = [[] for _ in tree.lengths]
    stack = []
    for node, parent in enumerate(tree.parents):
        (stack if parent < 0 else children[parent]).append(node)
    stack.reverse()
    order, number = [], {-1: -1}
    while stack:
        node = stack.pop()
        number[node] = len(order)
        order.append(node)
        stack += reversed(children[node])
    return Tree([number[tree.parents[node]] for node in order], [tree.lengths[node] for node in order])


def rollouts(tokens, ratio):
    """A tree of about so many tokens whose flat / tree is about `ratio`: a prompt, b turns, b answers to each of them.
    Three tenths of the tokens are in the turns. Ratio 1: eight unrelated chains."""
    if ratio <= 1:
        return chains(tokens, 8)
    turns = math.ceil(math.sqrt(2 * ratio))
    answers = turns * turns
    in_turns = 0.3
    # tree: prompt + in_turns + in_answers = 1;  flat: answers * prompt + turns * in_turns + in_answers = ratio.
    in_answers = (answers * (1 - in_turns) + turns * in_turns - ratio) / (answers - 1)
    turn = max(2, round(in_turns * tokens / turns))
    answer = max(2, round(in_answers * tokens / answers))
    prompt = tokens - turns * turn - answers * answer
    parents, lengths = [-1], [prompt]
    for _ in range(turns):
        parents += [0] + [len(parents)] * turns
        lengths += [turn] + [answer] * turns
    return Tree(parents, lengths)


def binary(tokens, depth, seed):
    """NVIDIA's `tree_dfs` (cudnn-frontend, benchmark/flex_attention): a complete binary tree of nodes of equal size +-20 %. Their
    `tree_bfs` is the same tree with its nodes in another order; forests stand in preorder, so both are one here."""
    rng = random.Random(seed)
    nodes = 2**depth - 1
    lengths = [round(tokens / nodes * rng.uniform(0.8, 1.2)) for _ in range(nodes)]
    lengths[0] = max(1, lengths[0] + tokens - sum(lengths))
    return in_preorder(Tree([(node - 1) // 2 if node else -1 for node in range(nodes)], lengths))


# 43 turns of eight conversations with an airline's agent (examples/tau_airline_part.jsonl, tokens of SmolLM2): 76,316 flat tokens.
AIRLINE = Tree([-1, 0, 1, 1, 3, 3, 0, 6, 7, 8, 8, 7, 6, 0],
               [1347, 2, 802, 9, 313, 762, 2, 3, 4, 1091, 261, 790, 688, 1056])  # fmt: skip


def published(quick=False):
    """{name: tree} of the comparison of libraries: NVIDIA's, a real forest, and a real prompt with 16 answers."""
    if quick:
        return {"binary 96": binary(96, 3, 0), "airline / 64": Tree(AIRLINE.parents, [1 + n // 64 for n in AIRLINE.lengths]),
                "prompt 24 + 16 x 4": star(24, 16, 4)}  # fmt: skip
    return {"NVIDIA's tree 128k": binary(128 * 1024, 7, 0), "airline 7k": AIRLINE, "prompt 1,438 + 16 x 256": star(1438, 16, 256)}


def previous(tree):
    """By token: the token before it on its path, -1 at the beginning, as recurrences take it."""
    before, last, begin = [], [], 0
    for parent, length in zip(tree.parents, tree.lengths):
        before += [last[parent] if parent >= 0 else -1, *range(begin, begin + length - 1)]
        begin += length
        last.append(begin - 1)
    return before


# ---- Work --------------------------------------------------------------------------------------------------


def paths(tree):
    """(index, before): the tokens of all root paths of leaves, one after another, and by them the one before as of `previous`."""
    begins = [0]
    for length in tree.lengths:
        begins.append(begins[-1] + length)
    index, before = [], []
    for leaf in leaves(tree):
        path = [token for node in root_path(tree, leaf) for token in range(begins[node], begins[node + 1])]
        before += [-1, *range(len(index), len(index) + len(path) - 1)]
        index += path
    return index, before


def attention_flops(pairs, heads, head_dim):
    """Forward, backward: two products per pair and head, and five (the scores are computed again)."""
    return 4 * head_dim * heads * pairs, 10 * head_dim * heads * pairs


def causal_length(pairs):
    """Length of the dense causal attention that has this number of visible pairs, as nearly as can be."""
    return max(1, round((math.sqrt(8 * pairs + 1) - 1) / 2))


def linear_parameters(config):
    """Weights of the linear maps of all layers of a llama or qwen3 config."""
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    attention = hidden * head_dim * (2 * config["num_attention_heads"] + 2 * config["num_key_value_heads"])
    return config["num_hidden_layers"] * (attention + 3 * hidden * config["intermediate_size"])


def model_flops(config, tokens, pairs, head_rows):
    """Of a forward and backward pass without anything that is computed twice or that nothing reads: 6 per weight and token,
    but per row with loss behind the last layer's attention, 12 head_dim per pair and head, 6 per weight of the LM head and row."""
    hidden, heads, head_dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    behind_attention = hidden * heads * head_dim + 3 * hidden * config["intermediate_size"]
    linear = linear_parameters(config) * tokens - behind_attention * (tokens - head_rows)
    per_pair = 12 * head_dim * heads * config["num_hidden_layers"]
    return 6 * linear + per_pair * pairs + 6 * config["vocab_size"] * hidden * head_rows


# ---- Rows --------------------------------------------------------------------------------------------------


def predicting_rows(tree):
    """How many tokens predict one that carries loss, when all nodes but the roots do (a tree of roots alone: all)."""
    if max(tree.parents) < 0:
        return tree.tokens - len(tree.lengths)
    inner = {parent for parent in tree.parents if parent >= 0}
    trained = [node for node, parent in enumerate(tree.parents) if parent >= 0]
    within = sum(tree.lengths[node] - 1 for node in trained)
    return within + len(inner)


def write_rows(tree, vocab_size, seed, path):
    """JSONL (docs/data-format.md) of the trajectories that end at leaves: random tokens, loss on all nodes but roots;
    on everything where there are only roots. Siblings begin with different tokens."""
    rng = random.Random(seed)
    tokens, siblings = [], {}
    for parent, length in zip(tree.parents, tree.lengths):
        first = siblings.setdefault(parent, 0)
        siblings[parent] += 1
        tokens.append([first % vocab_size] + [rng.randrange(vocab_size) for _ in range(length - 1)])
    only_roots = max(tree.parents) < 0
    with open(path, "w") as file:
        for leaf in leaves(tree):
            ids, mask = [], []
            for node in root_path(tree, leaf):
                ids += tokens[node]
                mask += [int(only_roots or tree.parents[node] >= 0)] * len(tokens[node])
            file.write(f'{{"input_ids": {ids}, "loss_mask": {mask}}}\n')
