# SPDX-License-Identifier: Apache-2.0
"""What the problems have in common on which kernels prove themselves."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch


class Case(NamedTuple):
    """A problem and three functions of it, which give results in order: ours in the dtype, the plain form in it, and the
    exact one, in float64."""

    name: str
    ours: Callable[[], list[torch.Tensor]]
    plain: Callable[[], list[torch.Tensor]]
    exact: Callable[[], list[torch.Tensor]]


@contextlib.contextmanager
def named(variable: str, value: str) -> Iterator[None]:
    """An environment variable has this value inside."""
    before = os.environ.get(variable)
    os.environ[variable] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def seconds_of(call: Callable[[], None], device: str) -> float:
    """The least of three calls, after one that compiles."""
    taken = []
    for _ in range(4):
        if device != "cpu":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        call()
        if device != "cpu":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def values_of(results: Any) -> list[torch.Tensor]:
    return [each.detach() for each in results]
