# SPDX-License-Identifier: Apache-2.0
"""One optimiser step on several ranks."""

import hashlib
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InputError, Unsupported
from ..trees import Plan
from .alarm import Alarm
from .fsdp import Sharded
from .meeting import Meeting, RankError, check_equal
from .report import Report
from .share import Share

if TYPE_CHECKING:
    from .ranks import Ranks


class RankStep:
    """What Ranks.step returns. Iterating gives the rank's micro-batches and then, in mode "zero3", runs dummies."""

    def __init__(self, ranks: "Ranks", share: Share | None, micro_batches: Any) -> None:
        self._ranks, self._share, self._micro_batches = ranks, share, micro_batches
        self._meeting = ranks._meeting
        self._is_gathered = ranks.mode == "gathered"
        self._trace: Trace | None = None
        self._alarm: Alarm | None = None
        self._divided: Any = None  # of the espalier.Step, on a mesh with the dimension cp
        self._left = 0  # micro-batches, with dummies, that are still to be taken
        self._counts: list[int | None] = []  # micro-batches, by rank
        self._began = self._waited = 0.0
        self.report: Report | None = None

    def __enter__(self) -> "RankStep":
        ranks = self._ranks
        if ranks._is_open:  # the others hear of it from the step outside
            raise InputError("step: expected one at a time, received one inside another")
        try:
            self._check_arguments()
            if ranks.dimensions.context is not None:
                self._divided = self._micro_batches._divided_over(ranks.dimensions.context)
        except InputError as error:
            self._meeting.tell(error)
            raise
        batches, plan = self._micro_batches, self._plan()
        messages = self._meeting.meet(
            "the beginning of a step", step=ranks._steps, rows=self._share and self._share.digest(),
            token_budget=None if plan is None else plan.token_budget,
            micro_batches=None if batches is None else len(batches),
            division=self._division(), peers=ranks.dimensions.peers)  # fmt: skip
        for name in ("step", "rows", "token_budget"):
            check_equal(name, [said[name] for said in messages])
        for peers in {tuple(said["peers"]) for said in messages}:
            for name in ("micro_batches", "division"):
                check_equal(name, [messages[peer][name] for peer in peers], peers)
        self._counts = [said["micro_batches"] for said in messages]
        if batches is not None:
            self._left = len(batches) if self._is_gathered else max(count or 0 for count in self._counts)
        is_watched = not self._is_gathered and (ranks.watch == "always" or ranks._steps == 0)
        if len(ranks.dimensions.peers) > 1 or not (self._is_gathered or is_watched):
            self._alarm = self._meeting.alarm(ranks._steps)
        if not self._is_gathered:
            self._trace = Trace(self._meeting if is_watched else None, self._alarm)
        if self._divided is not None:
            self._begin_parts()
        ranks._is_open = True
        ranks.held.begin(self._is_gathered, self._trace)
        if self._alarm is not None:
            self._alarm.start()
        self._began, self._waited = time.perf_counter(), self._meeting.waited
        return self

    def _check_arguments(self) -> None:
        share, batches = self._share, self._micro_batches
        if share is not None and not isinstance(share, Share):
            raise InputError(f"share: expected what Ranks.share returns, received {type(share).__name__}")
        if batches is not None and not hasattr(batches, "__len__"):
            raise InputError(f"micro_batches: expected a list or a Plan, received {type(batches).__name__}, which has "
                             "no length")  # fmt: skip
        if self._ranks.dimensions.context is not None and not hasattr(batches, "_divided_over"):
            raise Unsupported("micro_batches: expected an espalier.Step on a mesh with the dimension cp, whose ranks have parts "
                              f"of its micro-batches, received {type(batches).__name__}")  # fmt: skip
        if self._is_gathered:
            return
        if batches is None:
            raise InputError('micro_batches: expected those of this rank, received none: in mode "zero3" ranks with '
                             "fewer than others run dummies")  # fmt: skip
        if (plan := self._plan()) is not None and plan.strategy == "partition":
            raise Unsupported('strategy: expected tree-packing or sequence-packing in mode "zero3", received '
                              "partition, whose order of forwards and backwards differs from rank to rank; take "
                              'mode="gathered"')  # fmt: skip

    def _division(self) -> str | None:
        """What ranks with the same rows have to have alike, as text."""
        planned = getattr(self._micro_batches, "_plan", None) if self._divided is None else self._divided  # of an espalier.Step
        return None if planned is None else str(planned.digest())

    def _begin_parts(self) -> None:
        """From here on the loop runs this rank's parts of micro-batches."""

        def check() -> None:
            if self._alarm is not None and self._alarm.failure is not None:
                raise RankError(self._alarm.failure)

        self._divided.group.sent_bytes, self._divided.group.check = 0, check
        self._micro_batches._divided = self._divided

    def _plan(self) -> Plan | None:
        plan = getattr(self._micro_batches, "plan", self._micro_batches)  # of an espalier.Step
        return plan if isinstance(plan, Plan) else None

    def __iter__(self) -> Iterator[Any]:
        if self._micro_batches is None:
            raise InputError("step: expected micro_batches to iterate over, received none; give them to Ranks.step")
        for micro_batch in self._micro_batches:
            yield micro_batch
            self._left -= 1
        while self._left > 0:  # in mode "zero3"
            self._run_dummy()
            self._left -= 1

    def _run_dummy(self) -> None:
        output = self._ranks.dummy(self._ranks.held.model)
        if not isinstance(output, torch.Tensor) or not output.requires_grad:
            raise Unsupported("dummy: expected a function of the model that returns a tensor with a backward, received "
                              f"{type(output).__name__}")  # fmt: skip
        output.backward(torch.zeros_like(output))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 _traceback: TracebackType | None) -> None:  # fmt: skip
        ranks = self._ranks
        ranks._is_open = False
        ranks._steps += 1
        if self._divided is not None:
            self._micro_batches._divided = None
        if error is None and self._left > 0:
            error = InputError("step: expected a loop over the step to its end, `for micro_batch in step`, received "
                               f"one that left {self._left} of its micro-batches out")  # fmt: skip
        try:
            said = self._agreed(error)
        except BaseException:
            ranks.held.abandon()
            raise
        finally:
            if self._alarm is not None:
                self._alarm.stop()
        if error is not None:
            ranks.held.abandon()
            if kind is None:
                raise error
            return
        assert said is not None  # without an error
        if self._is_gathered:
            ranks.held.reduce(["1" in bits for bits in zip(*(each["present"] for each in said))])
        else:
            assert isinstance(ranks.held, Sharded)  # as Ranks has it in mode "zero3"
            ranks.held.end()
        self.report = self._reported(said)

    def _agreed(self, error: BaseException | None) -> list[dict[str, Any]] | None:
        """What all ranks say at the end of the step; None where this one has failed."""
        if error is not None:
            if isinstance(error, RankError) or not isinstance(error, Exception):
                return None
            if self._alarm is None:
                self._meeting.tell(error)
            else:  # the others wait in collectives
                self._alarm.ring(error)
            return None
        _finish_device()
        seconds = time.perf_counter() - self._began - (self._meeting.waited - self._waited)
        present = "".join("01"[each] for each in self._ranks.held.present()) if self._is_gathered else ""
        divided = self._divided
        said = self._meeting.meet("the end of a step", seconds=seconds, present=present,
                                  imbalance=divided and divided.division.imbalance(), sent=divided and divided.group.sent_bytes,
                                  trace=self._trace and self._trace.digest())  # fmt: skip
        check_equal("order", [each["trace"] for each in said])
        return said

    def _reported(self, said: list[dict[str, Any]]) -> Report:
        share = self._share
        counts = None if None in self._counts else tuple(count or 0 for count in self._counts)
        can_measure = self._divided is None and (self._trace is None or self._trace.is_watched)
        dummies = (0,) * len(said) if self._is_gathered or counts is None else tuple(max(counts) - each for each in counts)
        return Report(
            share.whole.flat_tokens if share else None, share.encoded_tokens if share else None,
            share.distribution.imbalance if share else None,
            tuple(each["seconds"] for each in said) if can_measure else None,
            counts, dummies, None if self._divided is None else max(each["imbalance"] for each in said),
            None if self._divided is None else tuple(each["sent"] for each in said))  # fmt: skip


class Trace:
    """The collectives of a step, in their order. With a Meeting, each is compared over the ranks before it runs; with an
    Alarm, none runs once another rank has failed."""

    def __init__(self, meeting: Meeting | None, alarm: Alarm | None = None) -> None:
        self._meeting, self._alarm = meeting, alarm
        self._digest = hashlib.blake2b(digest_size=8)
        self._count = 0

    @property
    def is_watched(self) -> bool:
        return self._meeting is not None

    def add(self, collective: str) -> None:
        if self._meeting is not None:
            self._meeting.meet(collective)
        elif self._alarm is not None and self._alarm.failure is not None:
            raise RankError(self._alarm.failure)
        self._digest.update(collective.encode() + b";")
        self._count += 1

    def digest(self) -> str:
        """What was run, as text."""
        return f"{self._count} collectives ({self._digest.hexdigest()})"


def _finish_device() -> None:
    """Waits for the kernels that are under way, so that they are in the measured time."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
