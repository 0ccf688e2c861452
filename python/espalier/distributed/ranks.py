# SPDX-License-Identifier: Apache-2.0
"""Optimiser steps on several ranks: who trains on what, and how gradients come together."""

import math
import sys
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from ..errors import InputError, Unsupported
from ..native import __version__
from ..rank_group import TENSOR
from .fsdp import EXPERTS, Sharded, ranks_along
from .meeting import Meeting, check_equal
from .mesh import Dimensions, dimensions_of, mesh_of
from .replicas import Replicated
from .share import Share, share_of
from .step import RankStep
from .watch import watch_ranks

MODES = ("gathered", "zero3")


class Ranks:
    """The ranks of a job, as torchrun starts them, and the model that they train.

    Inside a step gradients are sums over the ranks, not means, whatever the divide factor is elsewhere. Made on all ranks,
    after torch.distributed.init_process_group.

    Args:
        model: A model of fully_shard (FSDP2), its layers first and then itself, over all ranks; or, in mode "gathered", of
            DistributedDataParallel; or one that Transformers has divided by its `distributed_config`.
            `espalier.hf.patch` may come before or after.
        mesh: A DeviceMesh of all ranks whose dimensions have names, where not every rank has its own rows. Ranks along
            "cp" have the same rows, and each computes a part of every micro-batch of an `espalier.Step`. Ranks along "tp"
            have the same rows and other heads of the model. Ranks along "dp", "fsdp", and names that begin with "dp_", have
            different rows. None: the mesh of Transformers, where it has divided the model.
        mode: "gathered": the parameters are whole on every rank from the beginning of a step to its end, where gradients are
            reduced once. In between no rank talks to another, so each may run as many micro-batches as it has, in any order,
            and by `espalier.Step`. "zero3": every layer gathers its parameters for itself, as fully_shard was told to. Ranks
            then have to run equally many forwards and backwards in the same order; those with fewer micro-batches run dummies.
        dummy: For "zero3": a function of the model that runs one forward in the way in which micro-batches do, and returns a
            tensor of which one backward is run, with a gradient of zeros. Default: the logits of one token.
        watch: For "zero3": "first" compares, before every collective of the first step, what the ranks are about to do, so
            that another order is an error instead of a hang; "always" does it in every step. In any step the order is compared
            at the end.

    Raises:
        Unsupported: The model or its mesh is not served.
        RankError: Ranks differ in the model, the mode or the versions of libraries. Every rank raises it.

    Examples:
        >>> import espalier, torch
        >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        >>> ranks = espalier.distributed.Ranks(model)
        >>> with ranks.step() as step:
        ...     model(torch.ones(3, 2)).sum().backward()
        >>> model.module.weight.grad.tolist()
        [[3.0, 3.0]]
    """

    def __init__(self, model: torch.nn.Module, mesh: DeviceMesh | None = None, *, mode: str = "gathered",
                 dummy: Callable[[Any], torch.Tensor] | None = None, watch: str = "first") -> None:  # fmt: skip
        if not dist.is_available() or not dist.is_initialized():
            raise Unsupported("Ranks: expected a process group, found none; start the program by torchrun and call "
                              "torch.distributed.init_process_group first")  # fmt: skip
        watch_ranks()
        self._meeting = Meeting()
        weakref.finalize(self, self._meeting.close).atexit = False
        self.rank, self.size = self._meeting.rank, self._meeting.size
        self.mode, self.dummy, self.watch = mode, dummy or _one_token, watch
        self._steps = 0
        self._is_open = False
        model = getattr(model, "_orig_mod", model)  # of torch.compile
        try:
            self.dimensions = dimensions_of(mesh_of(model) if mesh is None else mesh)
            self.held = self._checked(model)
        except InputError as error:
            self._meeting.tell(error)
            raise
        messages = self._meeting.meet("Ranks are made", mode=mode, watch=watch, mesh=self.dimensions.description,
                                      model=self.held.description(), **_versions())  # fmt: skip
        for name in messages[0]:
            check_equal(name, [said[name] for said in messages])

    def _checked(self, model: torch.nn.Module) -> Replicated | Sharded:
        if self.mode not in MODES:
            raise InputError(f"mode: expected {' or '.join(MODES)}, received {self.mode!r}")
        if self.watch not in ("first", "always"):
            raise InputError(f"watch: expected first or always, received {self.watch!r}")
        if self.mode == "zero3" and isinstance(model, torch.nn.parallel.DistributedDataParallel):
            raise Unsupported('mode="zero3": expected a model of fully_shard, received DistributedDataParallel')
        for module in model.modules():
            if getattr(module.__dict__.get("_espalier"), "unchecked", None) is not None:
                raise Unsupported("espalier.hf.patch(check=True): expected False on several ranks, received True: the "
                                  "check needs a copy of the whole model; run espalier.hf.verify on one")  # fmt: skip
        experts = ranks_along(model, EXPERTS)
        if self.mode == "gathered" and not set(experts) <= set(self.dimensions.peers):
            raise Unsupported('mode="gathered": expected experts that are divided over ranks with the same rows, '
                              f'{list(self.dimensions.peers)}, received {experts}; take mode="zero3", where all run equally many '
                              "micro-batches")  # fmt: skip
        return held_as(model, self.dimensions)

    def close(self) -> None:
        """Gives back the process group over which the ranks compare notes.

        It goes with the object, or with torch.distributed.destroy_process_group(), as well. Nothing else of `Ranks` can be
        called afterwards.

        Examples:
            >>> ranks.close()   # doctest: +SKIP
        """
        self._meeting.close()

    def share(self, rows: Any, *, tree_keys: Sequence[Hashable] | None = None, model: Any = None) -> Share:
        """What this rank trains on of the rows of a step, by `espalier.distribute`.

        Ranks along the dimensions cp and tp of a mesh have the same share. Talks to nobody; `step` finds out where ranks were
        given different rows.

        Args:
            rows: R rows, as `espalier.build` takes them (not packed), the same ones in the same order on all ranks.
            tree_keys: [R], as `espalier.build` takes them.
            model: By whose costs work is divided, as `espalier.distribute` takes it: the same one on all ranks.

        Returns:
            A Share.

        Raises:
            InputError: As `espalier.build` and `espalier.distribute` do.

        Examples:
            >>> share = ranks.share([[11, 12, 13, 14], [11, 12, 13, 15]])
            >>> share.forest.tree_tokens
            5
        """
        return share_of(rows, self.dimensions.data_rank, self.dimensions.data_size, tree_keys, model)

    def sum(self, value: float) -> float:
        """The sum over the ranks of a number: for normalisers, where no rank knows the rows of the others.

        Ranks along the dimension tp of a mesh, which have the same tokens, count once.

        Args:
            value: This rank's.

        Returns:
            The sum, the same bits on all ranks.

        Raises:
            RankError: A rank does something else, or has failed.

        Examples:
            >>> ranks.sum(3)
            3.0
        """
        value = float(value)
        counts = self.dimensions.tensor_rank == 0
        messages = self._meeting.meet("a sum", value=value.hex(), counts=counts)
        return math.fsum(float.fromhex(said["value"]) for said in messages if said["counts"])

    def step(self, share: Share | None = None, micro_batches: Any = None) -> RankStep:
        """One optimiser step, a context manager that is entered on all ranks, those without work among them.

        Leaving it reduces gradients into `grad`, adding to what was there. Where a rank leaves with an error, no rank has
        gradients of the step: that rank raises its error and the others RankError. In mode "zero3" a step that is not
        watched cannot be left where a rank waits in a collective: its process prints the error of the other rank, and ends
        with status 1 within seconds. Afterwards `step.report` is a Report.

        Args:
            share: What `share` returned. Ranks with other rows are found out.
            micro_batches: Those of this rank, anything with a length: a list, an `espalier.Plan`, an `espalier.Step`. Needed in
                mode "zero3", where each stands for one forward and one backward, and where iteration runs dummies after them. In
                mode "gathered" they may be left out, and what runs is the caller's affair. On a mesh with the dimension cp an
                `espalier.Step`: inside, its micro-batches have the terms of this rank's part, maybe none.

        Returns:
            The context; iterating over it gives the micro-batches.

        Raises:
            RankError: Ranks differ in step, share or settings. Entering raises it on every rank, before parameters are gathered.

        Examples:
            >>> share = ranks.share([[11, 12, 13, 14], [11, 12, 13, 15]])
            >>> with ranks.step(share, espalier.plan(share.forest, token_budget=8)) as step:
            ...     for micro_batch in step:
            ...         print(micro_batch)
            <espalier.MicroBatch 0: 5 tokens, 2 trajectories, 0 tokens of context>
            >>> step.report.encoded_tokens
            5
        """
        return RankStep(self, share, micro_batches)


def held_as(model: torch.nn.Module, dimensions: Dimensions) -> Replicated | Sharded:
    """What a model is over one step. Raises Unsupported where it does not fit the mesh."""
    own = dimensions.with_the_same_heads
    place = own[dimensions.tensor_rank].index(dist.get_rank())
    expected, found = ranks_along(model, TENSOR), [each[place] for each in own]
    if found != expected and not (len(expected) == 1 and mesh_of(model) is not None):  # whose plan may divide experts alone
        raise Unsupported(f"mesh: expected a dimension tp over the ranks {expected}, which have other heads of the model, "
                          f"received one over {found}; its length is tp_size of Transformers' distributed_config")  # fmt: skip
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return Replicated(model)
    if not isinstance(model, FSDPModule) and len(expected) > 1:
        return Replicated(model, dist.new_subgroups_by_enumeration(own)[0])
    return Sharded(model, dist.get_world_size(), dimensions.tensor_size)


def _one_token(model: Any) -> torch.Tensor:
    ids = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def _versions() -> dict[str, Any]:
    transformers = sys.modules.get("transformers")
    return {"Espalier": __version__, "PyTorch": torch.__version__,
            "Transformers": getattr(transformers, "__version__", None)}  # fmt: skip
