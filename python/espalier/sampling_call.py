# SPDX-License-Identifier: Apache-2.0
"""What `Engine.sample` hands to the native engine, and sampling of prompts that come one after the other."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import InputError
from .native_options import given_options, named_texts, whole_number
from .options import SamplingParams
from .options_base import Options

if TYPE_CHECKING:
    from .engine import Data
    from .native_engine import native
    from .rows.files import Trajectories

Watch: TypeAlias = Callable[[NDArray[np.int64]], Iterable[bool] | None]
Named: TypeAlias = list[tuple[str, str]]

_OF_A_CALL = ("whole_rows", "batch_size", "token_budget")  # options of sampling that are the same for all prompts


def options_of_prompts(params: SamplingParams | Sequence[SamplingParams] | None, own: dict[str, Any], call: int,
                       prompts: int) -> tuple[Named, list[Named]]:  # fmt: skip
    """(options of the call, those of each prompt where `params` are several, else none). own: arguments that count more; call:
    calls of `sample` before this one; prompts: how many there are."""
    if params is None or isinstance(params, Options):
        return _named({"seed": call, **given_options("params", params, SamplingParams), **own}), []
    call_options = {name: own[name] for name in _OF_A_CALL if name in own}
    shared_options = {name: value for name, value in own.items() if name not in _OF_A_CALL}
    # Every prompt has its own random numbers, as with one set of options.
    each = [{"seed": (call << 32) + row, **given_options("params", one, SamplingParams), **shared_options}
            for row, one in enumerate(params)]  # fmt: skip
    for name in _OF_A_CALL:
        if any(name in options for options in each):
            raise InputError(f"params: expected {name} as an argument of sample where there are several, received it in one")
    if len(each) != prompts:
        raise InputError(f"params: expected one for each of {prompts} prompts, received {len(each)}")
    return _named(call_options), [_named(options) for options in each]


def truncation_text(engine: "native.Engine", rows: "Trajectories", objective: Named) -> str:
    """A warning of rows whose tokens were chosen among fewer than all, for an objective with ratios; empty: none."""
    from .native_engine import native

    text = "; ".join(native.truncation_warnings(rows, objective))
    counts = dict(engine.sampling_counts())
    if text and counts["truncation"] > 0:
        text += f"; of all that this engine sampled, by {counts['truncation'] / counts['sampled_tokens']:.3g} nats on average"
    return text


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


class Completion(NamedTuple):
    """A completion that `Sampling.step` returns.

    Attributes:
        prompt: Its number, which `Sampling.add` gave.
        sample: Its number among the completions of the prompt, from 0.
        tokens: int32 [n].
        logprobs: float64 [n], of the tokens, as `Engine.sample` gives them.
        is_stopped: Whether its last token is a stop id, or the watch ended it.
        kept_tokens: Of the prompt: were not encoded for it, as `prefix_cache` had them.
        prompt_logprobs: float64 [n] of the n tokens of the prompt, where SamplingParams ask for them: as `Engine.logprobs` gives
            them, whatever the temperature. Empty where not.
        error: Why it, with all others of its prompt, could not be sampled: an InputError where the model's logits are not
            finite, a RuntimeError where memory does not suffice for the prompt. It then has no tokens. None: it was sampled.

    Examples:
        >>> import espalier
        >>> sampling = engine.sampling()
        >>> numbers = sampling.add([[11, 12]], [espalier.SamplingParams(max_new_tokens=1)])
        >>> [completion] = sampling.step()
        >>> completion.prompt, completion.sample, len(completion.tokens)
        (0, 0, 1)
    """

    prompt: int
    sample: int
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float64]
    is_stopped: bool
    kept_tokens: int
    prompt_logprobs: NDArray[np.float64]
    error: Exception | None = None


class Sampling:
    """Prompts whose completions are sampled side by side. They join and leave between tokens. Made by `Engine.sampling`.

    Each prompt is sampled with the weights that were in use when it was added, whatever is in use now. Prompts of different
    adapters share the products with the engine's weights. The engine can do other things between the steps; where these change
    the weights of a prompt, the sampling can no longer be used.

    Clients that share a sampling have equal shares of its places and its time, so that a short prompt of one does not wait for
    long or many ones of another. A prompt that cannot be sampled ends with an error of its own, and others go on.

    Args:
        engine: What samples.
        sampling: What the engine works on.
        rows: Makes rows of prompts.
        calls: Counts calls, for seeds.

    Examples:
        >>> import espalier
        >>> sampling = engine.sampling(batch_size=8)
        >>> long, short = (espalier.SamplingParams(max_new_tokens=size, stop_ids=[], seed=1) for size in (9, 2))
        >>> sampling.add([[11, 12, 13]], [long])
        [0]
        >>> sampling.step(), sampling.add([[11, 12]], [short])
        ([], [1])
        >>> done = []
        >>> while not sampling.is_idle:
        ...     done += sampling.step()
        >>> [(each.prompt, len(each.tokens)) for each in done]
        [(1, 2), (0, 9)]
    """

    def __init__(self, engine: "native.Engine", sampling: "native.Sampling", rows: "Callable[[Data], Trajectories]",
                 calls: Callable[[], int]) -> None:  # fmt: skip
        self._engine, self._sampling, self._rows, self._calls = engine, sampling, rows, calls
        self._prompts = 0  # so far
        self._going_on = 0  # completions

    def add(self, prompts: "Data", params: Sequence[SamplingParams], *, client: int = 0) -> list[int]:
        """Prompts that are sampled from the next step on, or once there is room.

        Args:
            prompts: Rows in any form that `Engine` names, as a whole.
            params: Those of each prompt, whose completions are those of `Engine.sample` with it alone.
            client: A number from 0 on, of the one for whom they are sampled.

        Returns:
            Numbers of the prompts, which count up from 0.

        Raises:
            InputError: Prompts or options cannot be used.

        Examples:
            >>> import espalier
            >>> engine.sampling().add([[11], [12]], [espalier.SamplingParams(seed=seed) for seed in (3, 4)])
            [0, 1]
        """
        found = self._rows(prompts)
        _, each = options_of_prompts(list(params), {}, self._calls(), len(found))
        numbers = range(self._prompts, self._prompts + len(each))
        self._engine.add(self._sampling, self._prompts, found, each, whole_number(client, "client", "a whole number"))
        self._prompts += len(each)
        self._going_on += sum(1 if one.samples is None else one.samples for one in params)
        return list(numbers)

    def remove(self, prompt: int, *, client: int = 0) -> None:
        """Ends a prompt: its completions that are not done never are.

        Args:
            prompt: Its number.
            client: As of `add`.

        Examples:
            >>> import espalier
            >>> sampling = engine.sampling()
            >>> [number] = sampling.add([[11]], [espalier.SamplingParams(samples=100)])
            >>> sampling.remove(number)
            >>> sampling.is_idle
            True
        """
        self._going_on -= self._engine.remove(self._sampling, prompt, client)

    def step(self, watch: Watch | None = None) -> list[Completion]:
        """Encodes prompts that have come, and samples a token of each completion that goes on.

        A pass has at most 4,096 tokens of prompts, and 512 where several clients wait for its end.

        Args:
            watch: As of `Engine.sample`, with numbers of prompts.

        Returns:
            Completions that are done, and those that could not be sampled, with their `error`.

        Raises:
            InputError: The weights have changed. After any exception nothing goes on.

        Examples:
            >>> engine.sampling().step()
            []
        """
        try:
            done = self._engine.sample_on(self._sampling, None if watch is None else watched(watch))
        except BaseException:
            self._going_on = 0
            raise
        self._going_on -= len(done)
        return [Completion(*each)._replace(error=None if error is None else (InputError if error[0] else RuntimeError)(error[1]))
                for *each, error in done]  # fmt: skip

    @property
    def is_idle(self) -> bool:
        """Whether all completions are done."""
        return self._going_on == 0
