# SPDX-License-Identifier: Apache-2.0
"""espalier.hf.group_sampler: each row once, groups whole in micro-batches, one rank for each row."""

import collections
import random

import pytest
import torch
from torch.utils.data import DataLoader, Sampler

import espalier
from conftest import seed_of
from espalier.errors import InputError
from espalier.hf import group_sampler


def conversations(count=12, seed=1):
    """Rows with a common system prompt: of each conversation one to five turns, in a random order."""
    rng = random.Random(seed_of(seed))
    tokens = lambda n: [rng.randrange(50) for _ in range(n)]
    system, rows = tokens(20), []
    for name in range(count):
        row = system + [50 + name] + tokens(30)
        for _ in range(rng.randrange(1, 6)):
            rows.append({"input_ids": row, "conversation": f"talk {name}"})
            row = row + tokens(rng.randrange(5, 20))
    rng.shuffle(rows)
    return rows


def batches(sampler, size):
    order = list(sampler)
    return [order[k:k + size] for k in range(0, len(order), size)]


def ratio(rows, order, size):
    parts = [order[k:k + size] for k in range(0, len(order), size)]
    trees = [espalier.build([rows[r]["input_ids"] for r in part]) for part in parts]
    return sum(tree.flat_tokens for tree in trees) / sum(tree.tree_tokens for tree in trees)


@pytest.mark.parametrize("size", [1, 3, 8, 16, 1000])
@pytest.mark.parametrize("key", [None, "conversation"])
@pytest.mark.parametrize("seed", range(4))
def test_permutations(size, key, seed):
    rows = conversations(seed=seed)
    sampler = group_sampler(rows, size, key=key, seed=seed)
    assert isinstance(sampler, Sampler)
    orders = []
    for epoch in [*range(8), 0]:
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
        assert sorted(orders[-1]) == list(range(len(rows))) and len(sampler) == len(rows)
    assert orders[0] == orders[-1] == list(group_sampler(rows, size, key=key, seed=seed))
    if size < 16:
        assert len(set(map(tuple, orders))) > 1
        assert any(list(group_sampler(rows, size, key=key, seed=seed + k)) != orders[0] for k in range(1, 8))


@pytest.mark.parametrize("key", [None, "conversation"])
def test_conversations_are_whole_in_micro_batches(key):
    rows = conversations(40)
    micro_batches = batches(group_sampler(rows, 8, key=key), 8)
    at = collections.defaultdict(set)
    for number, batch in enumerate(micro_batches):
        for row in batch:
            at[rows[row]["conversation"]].add(number)
    assert sum(len(numbers) > 1 for numbers in at.values()) <= 2  # what is cut to fill the last micro-batches


def test_what_is_shared():
    rows = conversations(40)
    at_random = list(range(len(rows)))
    assert ratio(rows, list(group_sampler(rows, 8)), 8) > 1.3 * ratio(rows, at_random, 8)


def test_groups_that_fill_micro_batches():
    """Eight rows for each of sixteen names, in micro-batches of eight and of four."""
    keys = torch.arange(16).repeat(8)
    for size in (8, 4):
        sampler = group_sampler([{}] * 128, size, key=list(keys))
        assert all(len({int(keys[row]) for row in batch}) == 1 for batch in batches(sampler, size))
    prompts = [{"input_ids": [1, 2, int(key), 3, place]} for place, key in enumerate(keys)]
    for size in (8, 4):
        found = batches(group_sampler(prompts, size), size)
        assert all(len({int(keys[row]) for row in batch}) == 1 for batch in found)


@pytest.mark.parametrize("ranks, count", [(2, 12), (3, 12), (4, 1), (7, 40)])
def test_ranks(ranks, count):
    """Each row on exactly one; equally many batches on all, if there is a row for each at the end."""
    rows, size = conversations(count), 4
    samplers = [group_sampler(rows, size, num_replicas=ranks, rank=rank, seed=3) for rank in range(ranks)]
    shares = [list(sampler) for sampler in samplers]
    assert sorted(sum(shares, [])) == list(range(len(rows)))
    assert [len(sampler) for sampler in samplers] == [len(share) for share in shares]
    left = len(rows) % (ranks * size)
    counts = {-(-len(share) // size) for share in shares}
    assert len(counts) == 1 if left == 0 or left >= ranks else len(counts) <= 2


def test_data_loader():
    """With workers that are spawned."""
    rows = [row["input_ids"] for row in conversations(4)]
    data = [{"input_ids": row, "number": number} for number, row in enumerate(rows)]
    sampler = group_sampler(data, 4)
    loader = DataLoader(data, 4, sampler=sampler, num_workers=1, multiprocessing_context="spawn",
                        collate_fn=list_of_numbers)  # fmt: skip
    assert [number for batch in loader for number in batch] == list(sampler)


def list_of_numbers(rows):
    return [row["number"] for row in rows]


def test_trainer(tmp_path):
    """Rows reach the model in the sampler's order, another one in each epoch."""
    datasets = pytest.importorskip("datasets")
    transformers = pytest.importorskip("transformers")
    from hf_models import make_model

    rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in conversations(5)]
    for row in rows:
        row["input_ids"] = row["labels"] = [token % 61 for token in row["input_ids"]]
    data, seen = datasets.Dataset.from_list(rows), []

    def collate(batch):
        seen.extend(tuple(row["input_ids"]) for row in batch)
        width = max(len(row["input_ids"]) for row in batch)
        pad = lambda values, fill: values + [fill] * (width - len(values))
        ids = torch.tensor([pad(row["input_ids"], 0) for row in batch])
        mask = torch.tensor([pad([1] * len(row["input_ids"]), 0) for row in batch])
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4, num_train_epochs=2, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True)  # fmt: skip
    trainer = transformers.Trainer(make_model("qwen3", torch.float32), arguments, train_dataset=data, data_collator=collate)
    sampler = group_sampler(data, 4)
    trainer._get_train_sampler = lambda dataset=None: sampler
    trainer.train()
    expected = []
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        expected += [tuple(rows[number]["input_ids"]) for number in sampler]
    assert seen == expected and expected[:len(rows)] != expected[len(rows):]


@pytest.mark.parametrize("arguments, message", [
    (dict(batch_size=0), "batch_size: expected a whole number above 0, received 0"),
    (dict(batch_size=2, rank=2, num_replicas=2), "rank: expected one of 2 ranks, 0 to 1, received 2"),
    (dict(batch_size=2, key="group"), "expected rows with the column 'group', received input_ids"),
    (dict(batch_size=2, key=[1, 2]), "key: expected one for each of 1 rows, received 2"),
])  # fmt: skip
def test_refusals(arguments, message):
    with pytest.raises(InputError, match=message):
        group_sampler([{"input_ids": [1, 2]}], **arguments)


def test_no_rows():
    assert list(group_sampler([], 4)) == []
