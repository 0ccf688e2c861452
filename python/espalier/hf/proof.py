# SPDX-License-Identifier: Apache-2.0
"""The proof of a version of Transformers that this package is not tested with: a small random model of the class, patched
against unpatched, before the first batch of a user's model."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig

from ..errors import Unsupported
from .families import stock_class
from .float64 import InFloat64

TESTED = ("5.23", "5.24")  # minor versions of Transformers
MAX_ERROR = 1e-6  # relative; exact models are at 1e-12, and mistakes above 1e-3

_SIZES: dict[str, Any] = dict(hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
                              num_key_value_heads=2, vocab_size=48, rms_norm_eps=1e-2)  # fmt: skip
_EXPERTS: dict[str, Any] = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=10)
_DELTA: dict[str, Any] = dict(linear_conv_kernel_dim=4, linear_key_head_dim=8, linear_num_key_heads=2,
                              linear_num_value_heads=4, linear_value_head_dim=8,
                              layer_types=["linear_attention", "full_attention"], head_dim=16)  # fmt: skip
_ROPE_OF_QWEN3_5 = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5, "mrope_interleaved": True,
                    "mrope_section": [2, 1, 1]}  # fmt: skip
_WINDOWS = ["sliding_attention", "full_attention"]
# model_type -> settings beside _SIZES. Windows are smaller than rows.
SMALL: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": dict(sliding_window=4),
    "olmo3": dict(sliding_window=4, layer_types=_WINDOWS, pad_token_id=None),
    "qwen2": dict(use_sliding_window=True, sliding_window=4, layer_types=_WINDOWS),
    "qwen3": dict(use_sliding_window=True, sliding_window=4, layer_types=_WINDOWS, head_dim=16),
    "qwen3_moe": _EXPERTS,
    "glm4_moe": dict(n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=10, n_group=3, topk_group=2,
                     first_k_dense_replace=1),
    "gpt_oss": dict(head_dim=16, num_local_experts=5, num_experts_per_tok=2, sliding_window=4),
    "qwen3_next": dict(shared_expert_intermediate_size=8, **_EXPERTS, **_DELTA),
    "qwen3_5_text": dict(rope_parameters=_ROPE_OF_QWEN3_5, **_DELTA),
    "qwen3_5_moe_text": dict(rope_parameters=_ROPE_OF_QWEN3_5, shared_expert_intermediate_size=8, **_EXPERTS, **_DELTA),
    "mamba2": dict(num_heads=8, head_dim=8, state_size=12, n_groups=2, chunk_size=16, layer_norm_epsilon=1e-2),
    "granitemoehybrid": dict(layer_types=["mamba", "attention"], num_local_experts=5, num_experts_per_tok=2,
                             shared_intermediate_size=14, mamba_n_heads=8, mamba_d_state=6, mamba_chunk_size=16,
                             pad_token_id=None),
}  # fmt: skip
_OF_ATTENTION = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")

_TRUNK = [7, 3, 41, 5, 19, 2]
_ROWS = [[*_TRUNK, 11, 4, 30], [*_TRUNK, 11, 4, 9, 9, 22, 6], _TRUNK, [*_TRUNK, 40, 1, 17, 8, 8], [5, 33, 21, 3]]

_faults: dict[type, str | None] = {}  # class -> None, or what is wrong with it


def is_tested() -> bool:
    return ".".join(transformers.__version__.split(".")[:2]) in TESTED


def check_version(backbone: Any, attach: Callable[[Any], None]) -> None:
    """Raises Unsupported where Transformers is of another minor version than TESTED and a small random model of the class of
    `backbone` is not exact on trees. attach: patches a backbone. Takes a second, once for each class."""
    if is_tested():
        return
    cls = stock_class(backbone)
    if cls not in _faults:
        _faults[cls] = _fault_of(cls, backbone.config.model_type, attach)
    if _faults[cls] is not None:
        raise Unsupported(f"Transformers: expected {' or '.join(TESTED)}, with which {cls.__name__} is tested on trees, "
                          f"received {transformers.__version__}, with which {_faults[cls]}; install one of those, or "
                          "call espalier.hf.patch(model, check=True), which verifies the first batch")  # fmt: skip


def _fault_of(cls: Any, model_type: str, attach: Callable[[Any], None]) -> str | None:
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
            error = error_of(_small_model(cls, model_type), attach)
    except Unsupported as refusal:
        return f"a small model of it is refused: {refusal}"
    except Exception as failure:  # whatever another version may do
        return f"a small model of it fails: {type(failure).__name__}: {failure}"
    return None if error <= MAX_ERROR else f"a small model of it is wrong on trees, by {error:.1g}"


def _small_model(cls: Any, model_type: str) -> Any:
    settings = _SIZES | {"sliding_window": None} | SMALL[model_type]
    if model_type == "mamba2":
        settings = {name: value for name, value in settings.items() if name not in _OF_ATTENTION}
    config = AutoConfig.for_model(model_type, **settings)
    config._experts_implementation = "eager"  # the others have no float64
    torch.manual_seed(0)
    model = cls(config).double().train()
    with torch.no_grad():  # as models are born, mistakes are small
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or name.endswith("bias"):
                parameter.normal_(std=0.4 if "conv1d" in name else 0.2)
    return model


def error_of(model: Any, attach: Callable[[Any], None]) -> float:
    """The largest relative error of the gradients of a loss, by parameter, and of the loss, of `model` on the rows, which
    are a batch once it is patched, against each row alone."""
    probe = torch.randn(len(_ROWS), max(map(len, _ROWS)), model.config.hidden_size, dtype=torch.float64)
    with InFloat64():
        alone: Any = sum((_hidden(model, torch.tensor([row]))[0] * probe[number, :len(row)]).sum()
                    for number, row in enumerate(_ROWS))  # fmt: skip
        theirs = _gradients(model, alone)
        attach(model)
        ids, mask = torch.zeros(probe.shape[:2], dtype=torch.int64), torch.zeros(probe.shape[:2], dtype=torch.int64)
        for number, row in enumerate(_ROWS):
            ids[number, :len(row)], mask[number, :len(row)] = torch.tensor(row), 1
        together = (_hidden(model, ids, attention_mask=mask) * probe * mask.unsqueeze(-1)).sum()
        ours = _gradients(model, together)
    everything = torch.stack([gradient.norm() for gradient in theirs]).norm()
    errors = [(a - b).norm() / torch.clamp(b.norm(), min=1e-2 * everything) for a, b in zip(ours, theirs)]
    of_loss = abs(together - alone).item() / abs(alone.item())
    return float(max([of_loss, *(error.item() for error in errors)]))


def _hidden(model: Any, input_ids: Tensor, **more: Any) -> Tensor:
    hidden: Tensor = model(input_ids=input_ids, use_cache=False, **more).last_hidden_state
    return hidden


def _gradients(model: Any, loss: Tensor) -> list[Tensor]:
    parameters = list(model.parameters())
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(parameter) if gradient is None else gradient for parameter, gradient in zip(parameters, found)]
