# SPDX-License-Identifier: Apache-2.0
"""What `Engine.sample` hands to the native engine."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import InputError
from .native_options import given_options, named_texts, whole_number
from .options import SamplingParams
from .options_base import Options

Watch: TypeAlias = Callable[[NDArray[np.int64]], Iterable[bool] | None]
Named: TypeAlias = list[tuple[str, str]]

_OF_A_CALL = ("whole_rows", "batch_size", "token_budget")  # options of sampling that are the same for all prompts


def options_of_prompts(params: SamplingParams | Sequence[SamplingParams] | None, own: dict[str, Any], call: int,
                       prompts: int) -> tuple[Named, list[Named]]:  # fmt: skip
    """Options of the call, and of each prompt where `params` are several.

    Args:
        params: What `sample` was given.
        own: Arguments that count more.
        call: Calls of `sample` before this one.
        prompts: How many there are.

    Returns:
        The call's options, and a list of each prompt's, or an empty one.
    """
    if params is None or isinstance(params, Options):
        return _named({"seed": call, **given_options("params", params, SamplingParams), **own}), []
    of_call = {name: own[name] for name in _OF_A_CALL if name in own}
    of_each = {name: value for name, value in own.items() if name not in _OF_A_CALL}
    # Every prompt has random numbers of its own, as with one set of options.
    each = [{"seed": (call << 32) + row, **given_options("params", one, SamplingParams), **of_each}
            for row, one in enumerate(params)]  # fmt: skip
    for name in _OF_A_CALL:
        if any(name in options for options in each):
            raise InputError(f"params: expected {name} as an argument of sample where there are several, received it in one")
    if len(each) != prompts:
        raise InputError(f"params: expected one for each of {prompts} prompts, received {len(each)}")
    return _named(of_call), [_named(options) for options in each]


def _named(options: Mapping[str, Any]) -> Named:
    """Stop ids one by one."""
    ids = options.get("stop_ids")
    pairs = named_texts({name: value for name, value in options.items() if name != "stop_ids"})
    if ids is None:
        return pairs
    return pairs + ([("stop-id", str(whole_number(id, "stop_ids", "token ids"))) for id in ids] or [("ignore-stop-ids", "true")])


def watched(watch: Watch) -> Callable[[NDArray[np.int64]], list[bool]]:
    """What the native engine calls, with the tokens as one flat array."""

    def ends(flat: NDArray[np.int64]) -> list[bool]:
        tokens = flat.reshape(-1, 3)
        told = watch(tokens)
        found = [] if told is None else [bool(end) for end in told]
        if told is not None and len(found) != len(tokens):
            raise InputError(f"watch: expected None or a boolean for each of {len(tokens)} tokens, received {len(found)}")
        return found

    return ends
