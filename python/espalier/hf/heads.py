# SPDX-License-Identifier: Apache-2.0
"""Whether the logits of a model are those of its output layer alone, divided by logits_scaling."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from .attention import as_autocast
from .families import FAMILIES, backbone_of
from .float64 import InFloat64, OnCpu
from .small_copy import small_model


def is_plain(inner: Any, backbone: Any) -> bool:
    """Whether `inner`, a model with a head around `backbone`, does nothing else to its logits, as a softcap or a scale would.
    A small copy says so, for models that the tests do not cover; False where none can be made."""
    if backbone.config.model_type in FAMILIES:
        return True
    cls = next(cls for cls in type(inner).__mro__ if cls.__module__.startswith("transformers.models."))
    try:
        with torch.random.fork_rng(devices=[]), OnCpu(), torch.inference_mode(False), torch.no_grad(), InFloat64():
            return _is_plain(small_model(cls, inner.config))
    except Exception:  # NotSmall, or whatever layers of other libraries say on a CPU
        return False


def logit_scale(inner: Any) -> float:
    """What a model with a head multiplies its logits by: 1 / logits_scaling of its config in families that read it (Granite)."""
    reads = "logits_scaling" in inspect.unwrap(type(inner).forward).__code__.co_names
    return 1 / backbone_of(inner).config.logits_scaling if reads else 1.0


def edge_logprobs(hidden: Tensor, linear: nn.Linear, edge_row: Tensor, edge_target: Tensor, **options: Any) -> Any:
    """ops.edge_logprobs of hidden states by the output layer, in the dtype of autocast where that is on."""
    hidden, weight = as_autocast(hidden, linear.weight)
    bias = None if linear.bias is None else linear.bias.to(weight.dtype)
    return ops.edge_logprobs(hidden.to(weight.dtype), weight, edge_row, edge_target, bias=bias, **options)


def _is_plain(model: Any) -> bool:
    own = backbone_of(model)
    hidden: list[Tensor] = []

    def enlarge(_module: Any, _args: Any, output: Any) -> Any:  # so that a softcap shows
        hidden.append(9 * torch.randn_like(output.last_hidden_state))
        output.last_hidden_state = hidden[0]
        return output

    own.register_forward_hook(enlarge)
    logits = model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False).logits
    expected = model.get_output_embeddings()(hidden[0]) * logit_scale(model)
    return bool((logits - expected).norm() <= 1e-9 * expected.norm())
