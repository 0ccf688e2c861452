# SPDX-License-Identifier: Apache-2.0
"""Cases of other projects' tests of tree packing, on Espalier: their inputs and what they expect, none of their code.

Every check is also given a wrong expectation, which it has to refuse. The sources:

ART        OpenPipe/ART ddb68fe3, tests/unit/test_prefix_tree_packing.py; parents of segments: its tests of
           parse_prefix_tree_row and parse_gdn_prefix_tree_segments. `prefix_tree_pack` of release 0.5.23 gives the same.
           Cases that drop sharing below a length are left out: Espalier shares every common token.
Automodel  NVIDIA-NeMo/Automodel 36044ad3, tests/unit_tests/datasets/llm/test_prefix_tree.py, and the mask of
           tests/functional_tests/attention/_prefix_tree_reference.py.
Megatron   NVIDIA/Megatron-LM, pull request 7387: the test of TreePackedSeqParams against independent causal paths.
TRL        huggingface/trl 5592ca71: the rows of its test of a hybrid model on trees; TreeRow of release 1.16.0.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import espalier

def refuses(check, *arguments):
    """Whether a check of expectations fails on these."""
    try:
        check(*arguments)
    except AssertionError:
        return True
    return False


def node_of_tokens(forest):
    return np.searchsorted(forest.node_begin, np.arange(forest.tree_tokens), side="right") - 1


# ---- OpenPipe ART ------------------------------------------------------------------------------------------------------

# rows, keys that keep rows or tokens apart; tokens, groups, parents (of a root: itself), positions, the tokens of each row
ART = {
    "depth one": ([[1, 2, 3, 4], [1, 2, 5], [9]], {}, [1, 2, 3, 4, 5, 9], [1, 1, 2, 2, 3, 4], [1, 1, 1, 1, 1, 4],
                  [0, 1, 2, 3, 2, 0], [[0, 1, 2, 3], [0, 1, 4], [5]]),
    "nothing shared": ([[1, 2], [1, 3], [4]], {"tree_keys": [0, 1, 2]}, [1, 2, 1, 3, 4], [1, 1, 2, 2, 3], [1, 1, 2, 2, 3],
                       [0, 1, 0, 1, 0], [[0, 1], [2, 3], [4]]),
    "deeper": ([[1, 2, 3, 4], [1, 2, 3, 5], [1, 6, 7]], {}, [1, 2, 3, 4, 5, 6, 7], [1, 2, 2, 3, 4, 5, 5],
               [1, 1, 1, 2, 2, 1, 1], [0, 1, 2, 3, 3, 1, 2], [[0, 1, 2, 3], [0, 1, 2, 4], [0, 5, 6]]),
    "order of the rows": ([[9], [1]], {}, [9, 1], [1, 2], [1, 2], [0, 0], [[0], [1]]),
    "shareable lengths": ([[1, 2, 3], [1, 2, 4]], {"merge_keys": [[0, 1, 1], [0, 2, 2]]}, [1, 2, 3, 2, 4], [1, 2, 2, 3, 3],
                          [1, 1, 1, 1, 1], [0, 1, 2, 1, 2], [[0, 1, 2], [0, 3, 4]]),
}  # fmt: skip


def check_art(rows, keys, tokens, groups, parents, positions, by_row):
    forest = espalier.build(rows, **keys)
    layout, node = forest.layout(), node_of_tokens(forest)
    assert layout.input_ids.tolist() == tokens
    assert (node + 1).tolist() == groups
    assert np.where(forest.parent[node] < 0, node + 1, forest.parent[node] + 1).tolist() == parents
    assert layout.position_ids.tolist() == positions
    assert [layout.path(row).tolist() for row in range(len(rows))] == by_row


@pytest.mark.parametrize("case", ART.values(), ids=ART)
def test_art_packs(case):
    check_art(*case)
    for place, wrong in ((2, [*case[2][:-1], 77]), (3, [*case[3][:-1], 77]), (4, [*case[4][:-1], 77]), (5, [*case[5][:-1], 77]),
                         (6, case[6][::-1])):  # fmt: skip
        assert refuses(check_art, *case[:place], wrong, *case[place + 1:])


def check_art_ancestors(rows, expected):
    parent = espalier.build(rows).parent.tolist()
    ancestors = []
    for above in parent:
        ancestors.append(() if above < 0 else (*ancestors[above], above + 1))
    assert ancestors == expected


def test_art_ancestors_of_segments():
    rows = [[1, 2, 3, 4, 8], [1, 2, 3, 4, 9], [1, 2, 3, 5], [1, 6]]
    expected = [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3), (1, 2), (1,)]
    check_art_ancestors(rows, expected)
    assert refuses(check_art_ancestors, rows, [*expected[:-1], (1, 2)])
    forest = espalier.build([[1, 2, 3, 4], [1, 2, 3, 5], [1, 6]])
    assert forest.parent.tolist() == [-1, 0, 1, 1, 0]


def test_art_refuses_batches_as_rows_and_we_empty_rows_too():
    with pytest.raises(espalier.InputError):
        espalier.build([np.array([[1, 2], [3, 4]])])
    with pytest.raises(espalier.InputError):  # ART packs them as nothing
        espalier.build([[], []])
    assert espalier.build([[1, 2], [3, 4]]).tree_tokens == 4


# ---- NVIDIA NeMo Automodel ---------------------------------------------------------------------------------------------

# prompt, completions; tokens, labels (-1: none), positions, lengths of nodes, nodes of each completion's path
AUTOMODEL = {
    "two completions": ([1, 2], [[10, 11], [20, 21, 22]], [1, 2, 10, 11, 20, 21, 22], [-1, -1, 11, -1, 21, 22, -1],
                        [0, 1, 2, 3, 2, 3, 4], [2, 2, 3], [[0, 1], [0, 2]]),
    "no prompt": ([], [[10, 11], [20]], [10, 11, 20], [11, -1, -1], [0, 1, 0], [2, 1], [[0], [1]]),
    "batch": ([1, 2], [[10, 11], [20]], [1, 2, 10, 11, 20], [-1, -1, 11, -1, -1], [0, 1, 2, 3, 2], [2, 2, 1], [[0, 1], [0, 2]]),
}  # fmt: skip


def check_automodel(prompt, completions, tokens, labels, positions, lengths, paths):
    forest = espalier.build([prompt + completion for completion in completions])
    layout, node = forest.layout(), node_of_tokens(forest)
    assert layout.input_ids.tolist() == tokens
    assert layout.position_ids.tolist() == positions
    assert np.bincount(node).tolist() == lengths
    assert [list(dict.fromkeys(node[layout.path(row)].tolist())) for row in range(len(completions))] == paths
    # Automodel has no label for the first token of a completion; every other target is predicted at the same place.
    theirs = {(source, label) for source, label in enumerate(labels) if label >= 0}
    trained = {(int(layout.prev[token]), int(layout.input_ids[token])) for row in range(len(completions))
               for token in layout.path(row)[len(prompt):] if layout.prev[token] >= 0}  # fmt: skip
    first = {(len(prompt) - 1, completion[0]) for completion in completions if prompt}
    assert theirs | first == trained and not theirs & first


@pytest.mark.parametrize("case", AUTOMODEL.values(), ids=AUTOMODEL)
def test_automodel_folds(case):
    check_automodel(*case)
    for place in (2, 4, 5, 6):
        assert refuses(check_automodel, *case[:place], case[place][:-1], *case[place + 1:])
    assert refuses(check_automodel, *case[:3], [7, *case[3][1:]], *case[4:])


def visible(layout):
    """[query, key]: who sees whom."""
    token = np.arange(layout.num_tokens)
    return (token[None, :] <= token[:, None]) & (token[:, None] < layout.subtree_end[None, :])


def check_star_mask(prompt, lengths, leak):
    """Completions see the prompt and, causally, themselves; with leak, each the one before it too, which is wrong."""
    forest = espalier.build([[0] * prompt + [100 + number] * length for number, length in enumerate(lengths)])
    owner = np.repeat(np.arange(-1, len(lengths)), [prompt, *lengths])
    keys_seen = (owner[None, :] == -1) | (owner[None, :] == owner[:, None]) | (leak & (owner[None, :] == owner[:, None] - 1))
    assert np.array_equal(visible(forest.layout()), np.tril(keys_seen))


def test_automodel_mask():
    for prompt, lengths in ((8, [5, 5, 5, 5]), (2, [2, 3]), (1, [1, 7, 2])):
        check_star_mask(prompt, lengths, False)
        assert refuses(check_star_mask, prompt, lengths, True)


# ---- NVIDIA Megatron-LM ------------------------------------------------------------------------------------------------

MEGATRON = SimpleNamespace(lengths=[48, 32, 16, 32], starts=[0, 48, 80, 96], parents=[-1, 0, 1, 0], depths=[0, 48, 80, 48],
                           paths=[[*range(48)], [*range(80)], [*range(96)], [*range(48), *range(96, 128)]])  # fmt: skip


def check_segments(forest, expected):
    layout, begin = forest.layout(), forest.node_begin[:forest.num_nodes]
    assert begin.tolist() == expected.starts and np.bincount(node_of_tokens(forest)).tolist() == expected.lengths
    assert forest.parent.tolist() == expected.parents and layout.position_ids[begin].tolist() == expected.depths
    for path in expected.paths:
        assert np.flatnonzero(visible(layout)[path[-1]]).tolist() == path


def test_megatron_segments():
    forest = espalier.build(MEGATRON.paths)  # the ids are the places, so that equal tokens are shared ones
    check_segments(forest, MEGATRON)
    for name in ("starts", "lengths", "parents", "depths"):
        assert refuses(check_segments, forest, SimpleNamespace(**vars(MEGATRON) | {name: [9, *getattr(MEGATRON, name)[1:]]}))
    assert refuses(check_segments, forest, SimpleNamespace(**vars(MEGATRON) | {"paths": [[*range(80, 128)]]}))


# ---- TRL: the packed row of AsyncGRPO ----------------------------------------------------------------------------------


def packed_by_trl(rows):
    packing = pytest.importorskip("trl.experimental.async_grpo.packing")
    row = packing.TreeRow()
    for ids in rows:
        row.add({"input_ids": torch.tensor(ids), "completion_mask": torch.tensor([0] + [1] * (len(ids) - 1)),
                 "old_log_probs": torch.zeros(len(ids)), "advantage": 0.0, "group_id": 0})  # fmt: skip
    return {name: tensor.tolist() for name, tensor in row.pack().items()}


def check_trl(rows, packed, extra):
    """TRL repeats one token for every further continuation of a prefix (`extra` in all); what tokens see and what predicts
    every trained token is the same."""
    forest = espalier.build(rows)
    layout, ids = forest.layout(), np.array(packed["input_ids"])
    prefixes = {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}
    assert layout.num_tokens == len(prefixes) and len(ids) == len(prefixes) + extra
    seen = {}  # of each packed token of TRL: all that it sees, itself last
    for (begin, end), (first, last) in zip(*(zip(packed[name][:-1], packed[name][1:], strict=True)
                                             for name in ("tree_cu_seqlens_q", "tree_cu_seqlens_k")), strict=True):  # fmt: skip
        keys = packed["tree_kv_index"][first:last]
        seen |= {token: keys[:len(keys) - (end - 1 - token)] for token in range(begin, end)}
    for row, ids_of_row in enumerate(rows):
        path = layout.path(row)
        sources = [token for segment, token in zip(packed["segment_id"], packed["token_index"], strict=True) if segment == row]
        assert len(sources) == len(ids_of_row) - 1
        for place, source in enumerate(sources):
            ours = np.flatnonzero(visible(layout)[path[place]])
            assert layout.input_ids[ours].tolist() == ids[seen[source]].tolist() == ids_of_row[:place + 1]
            assert layout.prev[path[place + 1]] == path[place] and packed["position_ids"][source] == place


# TRL's own case; then a fork at the root, rows that others extend, and equal rows.
TRL = {"hybrid": ([[*range(1, 18), 20, 21, 22], [*range(1, 18), 25, 26], [40, 41, 42]], 1),
       "nested": ([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6], [1, 7]], 3),
       "extended": ([[1, 2], [1, 2, 3], [1, 2, 3], [1, 2, 4]], 2)}  # fmt: skip


@pytest.mark.parametrize("rows, extra", TRL.values(), ids=TRL)
def test_trl_packs(rows, extra):
    packed = packed_by_trl(rows)
    check_trl(rows, packed, extra)
    assert refuses(check_trl, rows, packed, extra + 1)
    for name in ("token_index", "tree_kv_index", "position_ids"):
        wrong = packed | {name: [packed[name][0] + 1, *packed[name][1:]]}
        assert refuses(check_trl, rows, wrong, extra)
