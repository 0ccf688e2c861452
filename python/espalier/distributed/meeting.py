# SPDX-License-Identifier: Apache-2.0
"""Where ranks tell each other what they are about to do, and find out that they are not of one mind."""

import contextlib
import itertools
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist

from ..errors import InputError
from . import watch
from .alarm import Alarm


class RankError(InputError):
    """The ranks of a job do not do the same, or one of them has failed. Every rank that took part raises it.

    Examples:
        >>> import espalier
        >>> issubclass(espalier.distributed.RankError, espalier.InputError)
        True
    """


class Meeting:
    """Exchanges of small messages between all ranks, over Gloo and apart from the collectives of the model.

    waited  seconds that this rank has spent waiting for others
    """

    _numbers = itertools.count()  # the same on all ranks, which make them together

    def __init__(self) -> None:
        self._group: Any = dist.new_group(backend="gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.waited = 0.0
        self._number = next(Meeting._numbers)

    def close(self) -> None:
        """Gives the group back. Harmless where that has happened, or where the process group is gone."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            with contextlib.suppress(ValueError):  # it went with the process group, of which there is another one
                dist.destroy_process_group(group)

    def alarm(self, step: int) -> Alarm:
        """The Alarm of a step, the same one on all ranks."""
        store = dist.distributed_c10d._get_default_store()  # which has no public name
        return Alarm(store, self.rank, self.size, f"espalier {self._number} {step}")

    def meet(self, place: str, failure: str | None = None, **message: Any) -> list[dict[str, Any]]:
        """The messages of all ranks, dicts of plain values, by rank. Raises RankError on all ranks where they are
        not at the same place, and where one tells of a failure: what is wrong with it, as text."""
        if self._group is None:
            raise InputError("Ranks: expected a call before close(), received one after it")
        began = time.perf_counter()
        try:
            with watch.waiting():
                messages: list[Any] = [None] * self.size
                dist.all_gather_object(messages, (place, failure, message), group=self._group)
        except RuntimeError as error:  # of what the end of another process breaks
            if heard := watch.heard_failure():
                raise RankError(heard) from error
            raise
        self.waited += time.perf_counter() - began
        _check_failures([failure for _, failure, _ in messages])
        check_equal("order", [place for place, _, _ in messages])
        return [said for _, _, said in messages]

    def tell(self, error: BaseException) -> None:
        """Lets the other ranks know of an error of this one, instead of what they meet for."""
        with contextlib.suppress(RankError):
            self.meet("a failure", failure=f"{type(error).__name__}: {error}")


_ADVICE = {
    "division": "the ranks of one cp or tp group have to give steps of the same plan and loss_mask",
    "order": "every rank has to run the same steps, with as many forwards and backwards in the same order",
    "rows": "every rank has to give the rows of the whole step, the same ones in the same order",
    "model": "every rank has to shard the same model in the same way",
}


def check_equal(name: str, values: Sequence[object], ranks: Sequence[int] | None = None) -> None:
    """Raises RankError, naming who has what, unless `values` are equal: one of each of `ranks`, by default of all."""
    if all(value == values[0] for value in values):
        return
    ranks_by_value = _grouped(range(len(values)) if ranks is None else ranks, map(str, values))
    found = "; ".join(f"{value} on {_named(ranks)}" for value, ranks in ranks_by_value.items())
    advice = _ADVICE.get(name, "every rank has to be given the same")
    raise RankError(f"{name}: expected the same on all ranks, received {found}; {advice}")


def _check_failures(failures: Sequence[str | None]) -> None:
    ranks_by_failure = _grouped(range(len(failures)), failures)
    ranks_by_failure.pop(None, None)
    if ranks_by_failure:
        raise RankError("; ".join(f"{_named(ranks)}: {failure}" for failure, ranks in ranks_by_failure.items()))


def _grouped(ranks: Iterable[int], values: Iterable[Any]) -> dict[Any, list[int]]:
    """The ranks of each value."""
    found: dict[Any, list[int]] = {}
    for rank, value in zip(ranks, values):
        found.setdefault(value, []).append(rank)
    return found


def _named(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
