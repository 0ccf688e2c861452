# SPDX-License-Identifier: Apache-2.0
"""What the problems have in common on which kernels prove themselves."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch


OUT = "out"  # the result of the forward pass, whose bits are the same in each run
Results = dict[str, torch.Tensor]


class Case(NamedTuple):
    """A problem and three functions of it, which give results by name: ours in the dtype, the plain form in it, and the exact
    one, in float64."""

    name: str
    ours: Callable[[], Results]
    plain: Callable[[], Results]
    exact: Callable[[], Results]
    terms: Mapping[str, int] = MappingProxyType({})  # of results that are long sums, which libraries add up in any order


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


def detached(results: Results) -> Results:
    return {name: result.detach() for name, result in results.items()}
