# SPDX-License-Identifier: Apache-2.0
"""What the problems have in common on which kernels prove themselves."""

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch


OUT = "out"  # the result of the forward pass, whose bits are the same in each run
FLOAT32_ROUNDOFF = torch.finfo(torch.float32).eps / 2
Results = dict[str, torch.Tensor]


class Case(NamedTuple):
    """A problem and three functions of it, which give results by name: ours in the dtype, the plain form in it, and the exact
    one, in float64.

    kind      errors of a result are pooled over the cases of one kind
    floors    of results: a relative error that any right implementation may have, as of long sums
    same_bits results whose bits are the same in each run; None: all"""

    name: str
    ours: Callable[[], Results]
    plain: Callable[[], Results]
    exact: Callable[[], Results]
    kind: str = ""
    floors: Mapping[str, float] = MappingProxyType({})
    same_bits: Collection[str] | None = (OUT,)


def error_of_sum(terms: int) -> float:
    """The relative error to expect of a sequential sum of so many terms in float32, whose rounding errors are random:
    sqrt(terms) / 2 unit roundoffs (Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019)."""
    return float(terms**0.5) * FLOAT32_ROUNDOFF / 2


def error_of_tensor_core_sum(terms: int) -> float:
    """Likewise of products in bfloat16 by tensor cores, which cut off instead of rounding, once for 8 or more terms (Fasi,
    Higham, Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021)."""
    return max(error_of_sum(terms), terms / 8 * FLOAT32_ROUNDOFF / 2)


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


@contextlib.contextmanager
def deterministic(is_on: bool) -> Iterator[None]:
    """torch.use_deterministic_algorithms(is_on) inside."""
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(is_on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


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
