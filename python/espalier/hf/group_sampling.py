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
    """An order of rows in which batches of a DataLoader have whole groups wherever they fit.

    Groups are shuffled, not rows; each row comes once. Trainers call `set_epoch(n)` before epoch n, which selects the order
    of that epoch. `group_sampler` makes the groups.

    Args:
        groups: [G] integer arrays: the rows of each group. Each row is in exactly one of them.
        batch_size: Rows of a micro-batch.
        seed: Seed of the order; the same on all ranks.
        shuffle: False keeps the groups in the given order.
        num_replicas: Number of ranks, if each rank has its own DataLoader. Micro-batches are dealt to ranks in turn, and each
            row is on exactly one rank. The rows left at the end are spread evenly. Accelerate and Trainers deal batches to
            ranks themselves: leave this and `rank` out there.
        rank: This rank.

    Raises:
        InputError: The batch size or the rank is out of range.

    Examples:
        >>> import espalier.hf
        >>> sampler = espalier.hf.GroupSampler([[0, 3], [1, 4], [2, 5]], batch_size=2, shuffle=False)
        >>> list(sampler)
        [0, 3, 1, 4, 2, 5]
    """

    def __init__(self, groups: Sequence[Group | Sequence[int]], batch_size: int, *, seed: int = 0, shuffle: bool = True,
                 num_replicas: int = 1, rank: int = 0) -> None:  # fmt: skip
        if batch_size < 1:
            raise InputError(f"batch_size: expected a whole number above 0, received {batch_size}")
        if not 0 <= rank < num_replicas:
            raise InputError(f"rank: expected one of {num_replicas} ranks, 0 to {num_replicas - 1}, received {rank}")
        self.groups = [np.asarray(group, np.int64) for group in groups]
        self.batch_size, self.seed, self.shuffle = batch_size, seed, shuffle
        self.num_replicas, self.rank = num_replicas, rank
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Selects the order of an epoch.

        Args:
            epoch: Its number, from 0.

        Examples:
            >>> import espalier.hf
            >>> sampler = espalier.hf.GroupSampler([[0], [1], [2]], batch_size=1)
            >>> sampler.set_epoch(1)
        """
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

    With a Trainer: `trainer._get_train_sampler = lambda dataset=None: sampler`.

    Args:
        data: A dataset with a length whose rows are dicts, such as one of Hugging Face datasets.
        batch_size: Rows of a micro-batch: `batch_size` of the DataLoader, `per_device_train_batch_size` of a Trainer.
        key: The column that names the group of a row, or one name per row. By default rows are grouped by the prefixes that
            their `input_ids` share: a branch of the prefix tree with at most `batch_size` rows is one group; branches of a
            larger one are combined while they fit.
        seed: As in GroupSampler.
        shuffle: As in GroupSampler.
        num_replicas: As in GroupSampler.
        rank: As in GroupSampler.

    Returns:
        The sampler.

    Raises:
        InputError: The data has no such column, or as in GroupSampler.

    Examples:
        >>> import espalier.hf
        >>> rows = [{"input_ids": [1, 2, n % 3, n]} for n in range(6)]
        >>> sorted(sorted(batch) for batch in zip(*[iter(espalier.hf.group_sampler(rows, 2))] * 2))
        [[0, 3], [1, 4], [2, 5]]
    """
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
