# SPDX-License-Identifier: Apache-2.0
"""What a patched model is compared with: the unpatched model, each row alone, in float64 where its layers can.

Proofs of families, `verify` and `patch(check=True)` have their reference from here.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import modeling_utils

from .origin import is_library_code

Measure = Callable[[int, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Results:
    """values: of each row, float64 on the CPU; gradients: by parameter, summed over rows, float64 on the CPU."""

    values: list[Tensor]
    gradients: dict[str, Tensor]


def rows_alone(model: Any, rows: Sequence[Tensor], measure: Measure) -> Results:
    """Results of each row alone.

    Args:
        model: The model whose parameters the gradients are of.
        rows: Token ids [1, n] of each row.
        measure: Runs the model on a row, by its number and ids; returns (values, loss).
    """
    values: list[Tensor] = []
    gradients: dict[str, Tensor] = {}
    for number, ids in enumerate(rows):
        results, loss = measure(number, ids)
        values.append(results.detach().cpu().double())
        for name, gradient in gradients_of(model, loss).items():
            gradients[name] = gradients[name].add_(gradient) if name in gradients else gradient
    return Results(values, gradients)


def gradients_of(model: Any, loss: Tensor) -> dict[str, Tensor]:
    """Gradients of a loss by the parameters that require them, float64 on the CPU; zeros where it does not depend on one."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    with without_gradients(model):
        found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        return {name: whole_gradient(parameter, gradient).cpu().double()
                for (name, parameter), gradient in zip(trained.items(), found)}  # fmt: skip


def whole_gradient(leaf: Tensor, gradient: Tensor | None) -> Tensor:
    """The gradient of a leaf, with what a backward inside of another has added to its `.grad`, which becomes None."""
    added, leaf.grad = leaf.grad, None
    if gradient is None:
        return torch.zeros_like(leaf) if added is None else added
    return gradient if added is None else gradient + added


@contextlib.contextmanager
def without_gradients(module: nn.Module) -> Iterator[None]:
    """Inside, parameters have no gradients; afterwards they have those of before. Functions whose backward calls that of others,
    as in MLPs in tiles, add to them whatever gradients are asked for."""
    before = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


@contextlib.contextmanager
def without_renorm(model: Any) -> Iterator[None]:
    """Inside, embeddings with max_norm leave their weights as they are, which a forward pass would change."""
    modules = [module for module in model.modules() if isinstance(module, nn.Embedding) and module.max_norm is not None]
    most = [module.max_norm for module in modules]
    for module in modules:
        module.max_norm = None
    try:
        yield
    finally:
        for module, value in zip(modules, most, strict=True):
            module.max_norm = value


def to_float64(model: Any) -> Any:
    """Turns an unpatched model into float64, in place; InFloat64 (float64.py) has to be around its forward passes. It computes by
    its own code, whoever wrote it, but for attention in Transformers' kernels and fused experts, which know no float64."""
    model.double()
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = False  # recomputation would be outside of InFloat64
        config = module.__dict__.get("config")
        name = getattr(config, "_attn_implementation", None)
        function = modeling_utils.ALL_ATTENTION_FUNCTIONS.get(name)
        if name not in (None, "eager", "sdpa") and (function is None or is_library_code(function)):
            config._attn_implementation = "sdpa" if getattr(module, "_supports_sdpa", True) else "eager"
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"
    return model


@torch.no_grad()
def moved_by_rounding(model: Any) -> Any:
    """Moves each weight of a model up or down by one unit of rounding of its dtype, in place, at random but always alike."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            signs = torch.randint(0, 2, parameter.shape, generator=generator, device="cpu").to(parameter.device) * 2 - 1
            parameter.mul_(1 + torch.finfo(parameter.dtype).eps * signs.to(parameter.dtype))
    return model
