# SPDX-License-Identifier: Apache-2.0
"""The losses of the Tinker API, of the log-probabilities of targets.

All are sums over targets; normalising is the client's. With p the log-probability of a target under the model in training, q
that under the policy that sampled it (`logprobs`), A its advantage, and r = exp(p - q) (Tinker documentation, "Loss
functions"; sources of the objectives beside each):

    cross_entropy         -sum w p
    importance_sampling   -sum r A
    ppo                   -sum min(r A, clip(r, low, high) A)               Schulman et al., 2017
    cispo                 -sum sg[clip(r, low, high)] p A                   MiniMax, 2025
    dro                   -sum (p A - beta/2 (p - q)^2)                     Richemond et al., 2024
    gspo                  ppo with r = s * exp(p - sg[p]), s = sg[exp(mean of p - q where sequence_ratio_mask is not 0)]
                                                                            Zheng et al., 2025 (GSPO-token)
    stable_reinforce      -sum sg[min(r, 2)] p A over sampled targets       truncated importance sampling, Espeholt et al., 2018

The hosted service does not publish its `stable_reinforce`. The one here takes q from what this server recorded when it
sampled the sequence, so that it does not depend on what the client sends; on the policy that sampled, its gradient is that
of importance_sampling.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .data import Datum
from .errors import Refused

if TYPE_CHECKING:
    from torch import Tensor

Config = Mapping[str, float | str]
Record = Callable[[str], "np.ndarray[Any, Any] | None"]  # sequence_id -> log-probabilities of its sampled tokens


@dataclass(frozen=True)
class Loss:
    """A loss of the API: inputs that each datum has, and options with their defaults."""

    value: "Callable[[Tensor, dict[str, Tensor], dict[str, float]], Tensor]"
    inputs: tuple[str, ...]
    options: Mapping[str, float]
    more: tuple[str, ...] = ()  # inputs that a datum may have


def _ratio(p: "Tensor", given: "dict[str, Tensor]") -> "Tensor":
    return (p - given["logprobs"]).exp()


def _clipped(ratio: "Tensor", given: "dict[str, Tensor]", options: dict[str, float]) -> "Tensor":
    import torch

    bounds = (given.get(name, ratio.new_tensor(options[name]))
              for name in ("clip_low_threshold", "clip_high_threshold"))  # fmt: skip
    return torch.clamp(ratio, *bounds)


def _pessimistic(ratio: "Tensor", given: "dict[str, Tensor]", options: dict[str, float]) -> "Tensor":
    advantages = given["advantages"]
    return -(ratio * advantages).minimum(_clipped(ratio, given, options) * advantages).sum()


def _cispo(p: "Tensor", given: "dict[str, Tensor]", options: dict[str, float]) -> "Tensor":
    return -(_clipped(_ratio(p, given), given, options).detach() * p * given["advantages"]).sum()


def _dro(p: "Tensor", given: "dict[str, Tensor]", options: dict[str, float]) -> "Tensor":
    return -(p * given["advantages"] - 0.5 * options["beta"] * (p - given["logprobs"]) ** 2).sum()


def _gspo(p: "Tensor", given: "dict[str, Tensor]", options: dict[str, float]) -> "Tensor":
    taken = given["sequence_ratio_mask"] != 0
    mean = (p.detach() - given["logprobs"])[taken].mean() if bool(taken.any()) else p.new_zeros(())
    return _pessimistic((mean + p - p.detach()).exp(), given, options)


def _stable_reinforce(p: "Tensor", given: "dict[str, Tensor]", options: dict[str, float]) -> "Tensor":
    ratio = (p - given["recorded"]).exp().clamp(max=options["max_ratio"]).detach()
    return -(given["sampled"] * ratio * p * given["advantages"]).sum()


_RL = ("logprobs", "advantages")
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(lambda p, given, _: -(given["weights"] * p).sum(), ("weights",), {}),
    "importance_sampling": Loss(lambda p, given, _: -(_ratio(p, given) * given["advantages"]).sum(), _RL, {}),
    "ppo": Loss(lambda p, given, options: _pessimistic(_ratio(p, given), given, options), _RL, _CLIP, tuple(_CLIP)),
    "cispo": Loss(_cispo, _RL, _CLIP, tuple(_CLIP)),
    "dro": Loss(_dro, _RL, {"beta": 0.05}),
    "gspo": Loss(_gspo, (*_RL, "sequence_ratio_mask"), _CLIP, tuple(_CLIP)),
    "stable_reinforce": Loss(_stable_reinforce, ("advantages",), {"max_ratio": 2.0}, ("logprobs",)),
}


class RequestLoss:
    """The loss of one request. recorded: what was recorded of sampled sequences, for stable_reinforce. Raises Refused where the
    name, an option or an input of a datum does not fit."""

    def __init__(self, name: str, config: Config, data: list[Datum], recorded: Record) -> None:
        loss = LOSSES.get(name)
        if loss is None:
            raise Refused(f"loss_fn: expected one of {', '.join(LOSSES)}, received {name[:100]!r}")
        self._options = dict(loss.options)
        for option, value in config.items():
            if option not in loss.options or isinstance(value, str):
                raise Refused(f"loss_fn_config: expected for {name} numbers for {', '.join(loss.options) or 'no option'}, "
                              f"received {option[:100]}={repr(value)[:100]}")  # fmt: skip
            self._options[option] = value
        self.name = name
        self._loss = loss
        self._given = [self._inputs(name, datum, number, recorded) for number, datum in enumerate(data)]

    def record(self) -> "tuple[dict[str, float], list[dict[str, NDArray[np.float64]]]]":
        """Options, and of each datum what the loss reads, from which `restored` makes it again."""
        return dict(self._options), [{name: values.numpy() for name, values in given.items()} for given in self._given]

    @classmethod
    def restored(cls, name: str, options: Config, inputs: "list[dict[str, NDArray[np.float64]]]") -> "RequestLoss":
        """That of a record. Raises Refused where the name or an option does not fit."""
        import torch

        loss = cls(name, options, [], lambda sequence_id: None)
        loss._given = [{each: torch.from_numpy(values) for each, values in given.items()} for given in inputs]
        return loss

    def _inputs(self, name: str, datum: Datum, number: int, recorded: Record) -> "dict[str, Tensor]":
        import torch

        found = dict(datum.inputs)
        if name == "stable_reinforce":
            found["recorded"], found["sampled"] = _recorded(datum, number, recorded)
        elif missing := [each for each in self._loss.inputs if each not in found]:
            raise Refused(f"data[{number}]: expected loss_fn_inputs {', '.join(('target_tokens', *self._loss.inputs))} for "
                          f"{name}, received no {missing[0]}")  # fmt: skip
        if name != "cross_entropy" and datum.targets.ndim != 1:
            raise Refused(f"data[{number}]: expected one target for each token for {name}, received target_tokens of shape "
                          f"{list(datum.targets.shape)}")  # fmt: skip
        known = {*self._loss.inputs, *self._loss.more, "recorded", "sampled"}
        if unknown := sorted(found.keys() - known):
            all_known = ", ".join(("target_tokens", *self._loss.inputs, *self._loss.more))
            raise Refused(f"data[{number}]: expected of {name} no loss_fn_inputs but {all_known}, received {unknown[0][:100]}")
        return {each: torch.from_numpy(np.ascontiguousarray(values)) for each, values in found.items()}

    def value(self, logprobs: "list[Tensor]") -> "Tensor":
        """The loss, a sum over the data. logprobs: [N] or [N, K] of each datum, float64."""
        import torch

        values = [self._loss.value(p, given, self._options) for p, given in zip(logprobs, self._given)]
        return torch.stack(values).sum()


def _recorded(datum: Datum, number: int, recorded: Record) -> tuple[Any, Any]:
    """Of each target, the log-probability when it was sampled, and 1 where it was sampled."""
    if not datum.spans:
        raise Refused(f"data[{number}]: expected loss_fn_input_spans for stable_reinforce (Datum.with_provenance), received none")
    values, sampled = np.zeros(len(datum.targets)), np.zeros(len(datum.targets))
    begin = 0
    for sequence_id, offset, length in datum.spans:
        if sequence_id:
            known = recorded(sequence_id)
            if known is None:
                raise Refused(f"data[{number}]: expected the sequence_id of a sequence that this server sampled with "
                              f"record_stability_info and still remembers, received {sequence_id[:200]!r}")  # fmt: skip
            if offset < 0 or offset + length > len(known):
                raise Refused(f"data[{number}]: expected a span within the {len(known)} tokens of {sequence_id}, received "
                              f"{length} from {offset} on")  # fmt: skip
            values[begin : begin + length] = known[offset : offset + length]
            sampled[begin : begin + length] = 1
        begin += length
    return values, sampled
