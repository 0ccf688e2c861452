# SPDX-License-Identifier: Apache-2.0
"""What a patched model is compared with: the unpatched model, each row alone, in float64 where its layers can.

Proofs of families, `verify` and `patch(check=True)` have their reference from here.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import modeling_utils

from .for_now import with_values
from .origin import is_library_code

Measure = Callable[[int, Tensor], tuple[Tensor, Tensor]]


def rows_alone(model: Any, rows: Sequence[Tensor], measure: Measure) -> tuple[list[Tensor], dict[str, Tensor]]:
    """(values of each row alone, gradients by parameter of `model`, summed over rows), float64 on the CPU. rows: token ids [1, n]
    of each; measure runs the model on a row, by its number and ids, and returns (values, loss)."""
    values: list[Tensor] = []
    gradients: dict[str, Tensor] = {}
    for number, ids in enumerate(rows):
        results, loss = measure(number, ids)
        values.append(results.detach().cpu().double())
        for name, gradient in gradients_of(model, loss).items():
            gradients[name] = gradients[name].add_(gradient) if name in gradients else gradient
    return values, gradients


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


def without_gradients(module: nn.Module) -> AbstractContextManager[None]:
    """Inside, parameters have no gradients; afterwards they have those of before. Functions whose backward calls that of others,
    as in MLPs in tiles, add to them whatever gradients are asked for."""
    return with_values((parameter, "grad", None) for parameter in module.parameters())


def without_renorm(model: Any) -> AbstractContextManager[None]:
    """Inside, embeddings with max_norm leave their weights as they are, which a forward pass would change."""
    return with_values((module, "max_norm", None) for module in model.modules()
                       if isinstance(module, nn.Embedding) and module.max_norm is not None)  # fmt: skip


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
