# SPDX-License-Identifier: Apache-2.0
"""Commands (`espalier train` and others) as a rank of torchrun: Python makes the process group, and the command runs in this
process."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ..commands.native import Ranks
from ..commands.process import Process
from ..commands.registry import COMMANDS
from ..commands.rerun import train_arguments
from ..errors import InputError
from ..native_engine import native
from .alarm import Alarm

_RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # set by torchrun


def main(arguments: Sequence[str]) -> NoReturn:
    """Runs the command that the first argument names, and ends the process."""
    arguments = _with_resume(arguments)
    _take_own_gpu()
    has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
    given, rank, size = next(dist.rendezvous("env://"))
    # PyTorch 2.11 gives a run that is started again the store of the first time, whose addresses Gloo would wait for.
    store = dist.PrefixStore(f"start {os.environ.get(_RESTARTS, '0')}", given)
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_nccl else "gloo", store=store, rank=rank, world_size=size)
    alarm = RunAlarm(store, dist.get_rank(), dist.get_world_size(), "espalier train")
    alarm.start()
    process = Process()
    try:
        status = process.run(lambda: _run(arguments, process))
    except InputError as error:
        _fail(alarm, error)
    except SystemExit:  # wrong arguments, which all ranks have
        raise
    except BaseException as error:
        _fail(alarm, error)
    alarm.stop()
    dist.destroy_process_group()
    sys.exit(status)


def _run(arguments: Sequence[str], process: Process) -> int:
    name, *words = arguments
    if name == "rerun":
        name, words = "train", train_arguments(words, dist.get_world_size())
    command: Any = import_module(COMMANDS[name].module)
    values = command.parse(words)
    world = dist.group.WORLD
    if name in ("logprobs", "sample"):
        command.work(values, process, world)
        return 0
    ranks = Ranks(world.group_name, _split_ranks, is_first=dist.get_rank() == 0)  # type: ignore[union-attr]
    status: int = command.work(values, process, ranks)
    return status


class RunAlarm(Alarm):
    """Of a whole run, not of a step. What waits for other ranks raises the failure. A rank that does not wait goes on: it may
    be writing a checkpoint."""

    def on_failure(self, failure: str) -> None:
        native.fail_ranks(failure)

    def is_stuck(self) -> bool:
        waits: bool = native.waits_for_ranks()
        return waits


def _split_ranks(ranks: int) -> str:
    """The name of the group of this rank, of groups of so many successive ranks."""
    name: str = dist.new_subgroups(ranks)[0].group_name
    return name


def _with_resume(arguments: Sequence[str]) -> list[str]:
    """torchrun --max-restarts starts the processes of a run that has failed again by the arguments of the first time."""
    is_again = os.environ.get(_RESTARTS, "0") != "0"
    return [*arguments, *(["--resume"] if is_again and arguments[0] == "train" and "--resume" not in arguments else [])]


def _take_own_gpu() -> None:
    """Hides the GPUs of other ranks of this machine, so that `--device cuda` is another one on each. Before CUDA starts."""
    own, visible = os.environ["LOCAL_RANK"], os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [own] if visible is None else visible.split(",")[int(own) :][:1]
    if names:
        os.environ["CUDA_VISIBLE_DEVICES"] = names[0]


def _fail(alarm: Alarm, error: BaseException) -> NoReturn:
    """Ends the process with the failure that came first, and with what this rank says of it."""
    first, own = alarm.ring(error) if alarm.failure is None else alarm.failure, str(error)
    for text in [first] if own in first else [own] if first in own else [first, own]:
        print(f"espalier: error: {text}", file=sys.stderr, flush=True)
    os._exit(1)  # other threads may wait for ranks that are gone
