# SPDX-License-Identifier: Apache-2.0
"""What rounding decides in a model, made the same in all precisions, so that errors can be compared.

Where two experts score nearly alike, rounding decides which one a router chooses, and whoever takes another one computes
another function. Where a value lies at the bound of a clamp, rounding decides whether a gradient passes. Such flips are
no errors of rounding: a single one outweighs them all.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .routes import routers_of, weights_of


class RouterChoices:
    """What the routers of a model choose for the T tokens of a forest.

    table     [R, T, K] int64 on the CPU, ascending in K: the choices that are taken. -1 at tokens that have not run yet, for
              which a router takes its own.
    recorded  the same, as a batch says them (routes.of_forest); -1 at tokens that leave the choice to the router. None:
              all do."""

    def __init__(self, backbone: Any, num_tokens: int, recorded: Tensor | None = None) -> None:
        routers = list(routers_of(backbone).values())
        top_k = routers[0].top_k if routers else 0
        nothing = torch.full((len(routers), num_tokens, top_k), -1, dtype=torch.int64, device="cpu")
        self.table = nothing.clone() if recorded is None else recorded.clone()
        self.is_recorded = (self.table >= 0).any(-1)

    @property
    def num_free(self) -> int:
        """For how many tokens and routers no choice is recorded."""
        return int((~self.is_recorded).sum())

    def without_recorded(self) -> "RouterChoices":
        """The same where recorded choices are left to whoever else replays them."""
        twin = copy.copy(self)
        twin.table = torch.where(self.is_recorded.unsqueeze(-1), -1, self.table)
        return twin

    @contextlib.contextmanager
    def taken(self, backbone: Any) -> "Iterator[Own]":
        """Inside, the routers of `backbone` take the choices of the table, and fill it where there are none. Yields
        Own: what they would choose."""
        own = Own(self)
        with contextlib.ExitStack() as hooks:
            for number, router in enumerate(routers_of(backbone).values()):
                hooks.enter_context(router.register_forward_hook(own.hook(number), prepend=True))
            yield own


class Own:
    """The routers' own choices, [R, T, K] as the table, -1 at tokens that have not run."""

    def __init__(self, choices: RouterChoices) -> None:
        self._taken, self._is_recorded = choices.table, choices.is_recorded
        self.table = torch.full_like(choices.table, -1)
        self._tokens = torch.empty(0, dtype=torch.int64, device="cpu")
        self._asked: set[int] = set()

    def begin(self, tokens: Any) -> None:
        """Call before each forward pass, with the tokens of the forest [n] that it runs."""
        self._tokens = torch.as_tensor(tokens, device="cpu")
        self._asked = set()

    def num_different(self) -> int:
        """For how many tokens and routers another choice was taken, where none is recorded."""
        return int(((self.table != self._taken).any(-1) & ~self._is_recorded).sum())

    def hook(self, number: int) -> Callable[[Any, Any, Any], Any]:
        def take(router: Any, _args: Any, output: Any) -> Any:
            logits, weights, chosen = output
            own = chosen.detach().cpu().sort(-1).values
            wanted = self._taken[number, self._tokens]
            experts = torch.where(wanted < 0, own, wanted)
            if number not in self._asked:  # else it is computed again for the backward pass
                self._asked.add(number)
                self.table[number, self._tokens] = own
                self._taken[number, self._tokens] = experts
            differs = (experts != own).any(-1, keepdim=True).to(chosen.device)
            experts = torch.where(differs, experts.to(chosen.device), chosen)
            others = weights_of(router)(router, logits, experts).to(weights.dtype)
            return logits, torch.where(differs, others, weights), experts

        return take


@contextlib.contextmanager
def gradients_through_clamps(model: Any) -> Iterator[None]:
    """Inside, gradients pass the clamps in the experts of `model` as if they were not there. Values are as before."""

    def smooth(module: Any) -> Callable[..., Any]:
        stock = module._apply_gate

        def apply(*args: Any) -> Any:
            with _ThroughClamps():
                return stock(*args)

        return apply

    gated = [module for module in model.modules() if hasattr(type(module), "_apply_gate")]
    for module in gated:
        module._apply_gate = smooth(module)
    try:
        yield
    finally:
        for module in gated:
            del module._apply_gate


class _ThroughClamps(TorchFunctionMode):
    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:  # fmt: skip
        result = function(*args, **(kwargs or {}))
        if function is torch.Tensor.clamp or function is torch.clamp:
            return _Through.apply(args[0], result.detach())  # type: ignore[no-untyped-call]
        return result


class _Through(torch.autograd.Function):
    """The second tensor, with the first one's gradient."""

    @staticmethod
    def forward(_ctx: Any, _value: Tensor, result: Tensor) -> Tensor:
        return result.view_as(result)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
