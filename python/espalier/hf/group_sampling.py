# SPDX-License-Identifier: Apache-2.0
"""An order of rows in which those that share prefixes meet in a micro-batch."""

import random
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from ..errors import InputError
from ..trees import Forest, build

LOOK_AHEAD = 256  # groups among which one is looked for that fits into what is left of a micro-batch

Group = NDArray[np.int64]  # [n] indices of rows


class GroupSampler(Sampler[int]):
    """Indices of rows, each once, in an order in which a DataLoader with this `batch_size` gets whole groups in its batches
    wherever they fit. `group_sampler` makes it.

    Groups are shuffled, not rows; `set_epoch(n)` before epoch n, as trainers call it, gives the order of that epoch.

    groups        [G] integer arrays: the rows of each group; each row is in one of them
    batch_size    rows of a micro-batch
    seed          of the order; the same on all ranks
    shuffle       False: groups in the order in which they are given
    num_replicas, rank
                  where each rank has a DataLoader of its own: the ranks, and which one this is. Whole micro-batches are dealt
                  to ranks in turn. Each row is on exactly one rank; what is left at the end is spread evenly, so that ranks
                  have equally many batches unless fewer rows than ranks are left. Accelerate and Trainers deal batches to
                  ranks themselves: leave both out there."""

    def __init__(self, groups: Sequence[Group], batch_size: int, *, seed: int = 0, shuffle: bool = True,
                 num_replicas: int = 1, rank: int = 0) -> None:  # fmt: skip
        if batch_size < 1:
            raise InputError(f"batch_size: expected a whole number above 0, received {batch_size}")
        if not 0 <= rank < num_replicas:
            raise InputError(f"rank: expected one of {num_replicas} ranks, 0 to {num_replicas - 1}, received {rank}")
        self.groups = list(groups)
        self.batch_size, self.seed, self.shuffle = batch_size, seed, shuffle
        self.num_replicas, self.rank = num_replicas, rank
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """What follows is the order of this epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        groups = list(self.groups)
        if self.shuffle:
            random.Random(f"{self.seed} {self.epoch}").shuffle(groups)
        order = _filled(groups, self.batch_size)
        yield from order[self._own(len(order))].tolist()

    def __len__(self) -> int:
        return len(self._own(sum(map(len, self.groups))))

    def _own(self, num_rows: int) -> NDArray[np.int64]:
        """Which places of the order are this rank's."""
        size, ranks = self.batch_size, self.num_replicas
        whole = num_rows // (size * ranks) * size * ranks
        dealt = np.arange(whole).reshape(-1, ranks, size)[:, self.rank].reshape(-1)
        rest = np.array_split(np.arange(whole, num_rows), ranks)[self.rank]
        return np.concatenate([dealt, rest])


def group_sampler(data: Any, batch_size: int, *, key: str | Sequence[Hashable] | None = None, seed: int = 0,
                  shuffle: bool = True, num_replicas: int = 1, rank: int = 0) -> GroupSampler:  # fmt: skip
    """A torch.utils.data.Sampler that keeps the rows of a group, or of a conversation, together in micro-batches.

    data        a dataset with a length whose rows are dicts, such as one of Hugging Face datasets
    batch_size  rows of a micro-batch: the `batch_size` of the DataLoader, `per_device_train_batch_size` of a Trainer
    key         the column that names the group of a row, or the names themselves, one for each row. Default: by the prefixes
                that rows of `input_ids` share. A branch of the prefix tree with at most `batch_size` rows is one group; of
                a larger one, branches are put together as long as they fit.

    The rest as GroupSampler has it. Raises InputError where the data has no such column.

    >>> import espalier.hf
    >>> rows = [{"input_ids": [1, 2, n % 3, n]} for n in range(6)]
    >>> sorted(sorted(batch) for batch in zip(*[iter(espalier.hf.group_sampler(rows, 2))] * 2))
    [[0, 3], [1, 4], [2, 5]]

    With a Trainer: `trainer._get_train_sampler = lambda dataset=None: sampler`."""
    if key is None:
        groups = _groups_by_prefix(build(list(_column(data, "input_ids"))), batch_size, seed)
    else:
        groups = _groups_by_key(_column(data, key) if isinstance(key, str) else key, len(data))
    return GroupSampler(groups, batch_size, seed=seed, shuffle=shuffle, num_replicas=num_replicas, rank=rank)


def _column(data: Any, name: str) -> Sequence[Any]:
    names = getattr(data, "column_names", None)  # of Hugging Face datasets
    if names is None:
        rows = [data[number] for number in range(len(data))]
        names = rows[0].keys() if rows else [name]
        if all(name in row for row in rows):
            return [row[name] for row in rows]
    elif name in names:
        column: Sequence[Any] = data[name]
        return column
    raise InputError(f"group_sampler: expected rows with the column {name!r}, received {', '.join(sorted(names))}")


def _groups_by_key(keys: Sequence[Any], num_rows: int) -> list[Group]:
    if len(keys) != num_rows:
        raise InputError(f"key: expected one for each of {num_rows} rows, received {len(keys)}")
    groups: dict[Hashable, list[int]] = {}
    for number, key in enumerate(keys):
        plain = key.tolist() if hasattr(key, "tolist") else key  # equal tensors are no equal keys
        groups.setdefault(plain if isinstance(plain, str | int | float | None) else repr(plain), []).append(number)
    return [np.array(rows, np.int64) for rows in groups.values()]


def _groups_by_prefix(forest: Forest, most: int, seed: int) -> list[Group]:
    """Groups of at most `most` rows: branches of the trees that are as large as that, and smaller ones of one node put
    together."""
    rows = np.argsort(forest.end_node, kind="stable")  # those that end in a subtree follow one another
    begin = np.searchsorted(forest.end_node[rows], np.arange(forest.num_nodes + 1))
    is_large = forest.multiplicity > most
    parent = forest.parent.tolist()
    pieces: dict[int, list[Group]] = {-1: []}  # of each large node, and above the roots: groups to put together
    for node in np.flatnonzero(is_large).tolist():
        pieces[node] = [rows[begin[node] + k:begin[node] + k + 1] for k in range(begin[node + 1] - begin[node])]
    above = np.array(parent, np.int64)
    for node in np.flatnonzero(~is_large & ((above < 0) | is_large[above])).tolist():
        pieces[parent[node]].append(rows[begin[node]:begin[forest.subtree_last[node]]])
    groups: list[Group] = []
    shuffling = random.Random(seed)
    for node in reversed(list(pieces)):
        shuffling.shuffle(pieces[node])
        for group in _put_together(pieces[node], most):
            full = len(group) == most or node == -1
            (groups if full else pieces[parent[node]]).append(group)
    return groups


def _put_together(pieces: list[Group], most: int) -> list[Group]:
    """Groups of at most `most` rows, each of one or several pieces, large pieces first."""
    open_groups: list[list[Group]] = []
    room: list[int] = []
    done: list[Group] = []
    for piece in sorted(pieces, key=len, reverse=True):
        at = next((k for k, left in enumerate(room) if left >= len(piece)), None)
        if at is None:
            open_groups.append([])
            room.append(most)
            at = len(room) - 1
        open_groups[at].append(piece)
        room[at] -= len(piece)
        if room[at] == 0 or len(room) > LOOK_AHEAD:
            at = at if room[at] == 0 else 0
            done.append(np.concatenate(open_groups.pop(at)))
            room.pop(at)
    return done + [np.concatenate(parts) for parts in open_groups]


def _filled(groups: list[Group], size: int) -> NDArray[np.int64]:
    """The rows of all groups in micro-batches of `size` rows that groups fill exactly; at the end, one after another, those
    with which none was filled."""
    waiting = groups[::-1]
    order: list[Group] = []
    left: list[Group] = []
    while waiting:
        first = waiting.pop()
        whole = len(first) // size * size
        order.append(first[:whole])
        taken, room = [first[whole:]], size - len(first[whole:])
        while 0 < room < size:
            near = range(len(waiting) - 1, max(len(waiting) - 1 - LOOK_AHEAD, -1), -1)
            at = max((k for k in near if len(waiting[k]) <= room), key=lambda k: len(waiting[k]), default=None)
            if at is None:
                break
            taken.append(waiting.pop(at))
            room -= len(taken[-1])
        (left if 0 < room < size else order).extend(taken)
    return np.concatenate([*order, *left]) if groups else np.zeros(0, np.int64)
