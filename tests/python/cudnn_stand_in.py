# SPDX-License-Identifier: Apache-2.0
"""cudnn.flex_attention played on the CPU: dense, in any dtype, with what the library's own validation asks of tensors
(cudnn-frontend 1.32, flex_attention/plan/validation.py), except for the device and the dtype."""

import contextlib
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from espalier.kernels import attention, waves


@dataclass(frozen=True)
class MaskPlan:
    visible: Tensor  # [Sq, Sk] bool
    form: tuple[torch.Size, ...]


def check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for tensor in (query, key, value):
        assert tensor.dim() == 4 and tensor.stride(-1) == 1 and tensor.dtype == query.dtype
    assert len(query) == len(key) == len(value) == 1
    assert query.shape[-1] == key.shape[-1] and key.shape[1:3] == value.shape[1:3]
    assert query.shape[2] > 0 and key.shape[2] > 0 and query.shape[2] % key.shape[2] == 0
    assert 8 <= query.shape[3] <= 128 and query.shape[3] % 8 == 0


class StandIn:
    """What the two modules of the library have. `shift` moves the bounds of one query, as a control."""

    def __init__(self) -> None:
        self.plans, self.calls = 0, {"forward": 0, "backward": 0}
        self.change = lambda bounds: bounds

    def create_mask_plan(self, mask_func: Tensor, query: Tensor, key: Tensor, value: Tensor, *, build_backward: bool) -> MaskPlan:
        check_tensors(query, key, value)
        assert mask_func.dim() == 3 and mask_func.dtype == torch.int32 and mask_func.is_contiguous()
        assert len(mask_func) == 1 and mask_func.shape[1] % 2 == 1 and mask_func.shape[2] == query.shape[1]
        assert bool((mask_func[:, 1:] >= mask_func[:, :-1]).all()) and int(mask_func.min()) >= 0
        assert int(mask_func.max()) <= key.shape[1] and build_backward
        self.plans += 1
        bounds = self.change(mask_func[0].clone())
        number = torch.arange(key.shape[1])
        visible = number < bounds[0, :, None]
        for row in range(1, len(bounds), 2):
            visible |= (bounds[row, :, None] <= number) & (number < bounds[row + 1, :, None])
        return MaskPlan(visible, (query.shape, key.shape, value.shape))

    def _dense(self, query: Tensor, key: Tensor, value: Tensor, plan: MaskPlan, scale: float) -> tuple[Tensor, Tensor]:
        check_tensors(query, key, value)
        assert plan.form == (query.shape, key.shape, value.shape)
        group = query.shape[2] // key.shape[2]
        key, value = (tensor.repeat_interleave(group, 2).transpose(1, 2) for tensor in (key, value))
        scores = (query.transpose(1, 2) @ key.transpose(-1, -2) * scale).masked_fill(~plan.visible, -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2), scores.logsumexp(-1)

    def flex_attn_func(self, query: Tensor, key: Tensor, value: Tensor, *, mask_plan: MaskPlan, softmax_scale: float,
                       return_lse: bool) -> tuple[Tensor, Tensor]:  # fmt: skip
        self.calls["forward"] += 1
        assert return_lse
        return self._dense(query, key, value, mask_plan, softmax_scale)

    def backward(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, grad: Tensor, lse: Tensor, *, mask_plan: MaskPlan,
                 softmax_scale: float, deterministic: bool, dlse_tensor: None) -> tuple[Tensor, ...]:  # fmt: skip
        """By the formulas that the library's kernels have: weights are exp(scores - lse), with the lse that it is given."""
        self.calls["backward"] += 1
        check_tensors(query, key, value)
        assert out.shape == grad.shape == query.shape and lse.shape == (1, query.shape[2], query.shape[1])
        assert out.is_contiguous() and grad.is_contiguous() and lse.is_contiguous() and dlse_tensor is None
        group = query.shape[2] // key.shape[2]
        wide_key, wide_value = (tensor.repeat_interleave(group, 2).transpose(1, 2) for tensor in (key, value))
        scores = (query.transpose(1, 2) @ wide_key.transpose(-1, -2) * softmax_scale).masked_fill(~mask_plan.visible, -torch.inf)
        weights, grad = torch.exp(scores - lse.unsqueeze(-1)), grad.transpose(1, 2)
        delta = (grad * out.transpose(1, 2)).sum(-1, keepdim=True)
        grad_scores = weights * (grad @ wide_value.transpose(-1, -2) - delta) * softmax_scale
        by_head = (grad_scores.transpose(-1, -2) @ query.transpose(1, 2), weights.transpose(-1, -2) @ grad)
        grad_key, grad_value = (each.unflatten(1, (-1, group)).sum(2).transpose(1, 2) for each in by_head)
        return (grad_scores @ wide_key).transpose(1, 2), grad_key, grad_value


@contextlib.contextmanager
def installed(monkeypatch: pytest.MonkeyPatch, library: StandIn | None = None) -> Iterator[StandIn]:
    """Inside, tree_attention on the CPU is computed by a stand-in, or by `library`, where that serves."""
    stand_in = library or StandIn()
    package, flex, execution = (types.ModuleType(name) for name in
                                ("cudnn", "cudnn.flex_attention", "cudnn.flex_attention.execution"))  # fmt: skip
    package.flex_attention, flex.execution = flex, execution
    flex.create_mask_plan, flex.flex_attn_func = stand_in.create_mask_plan, stand_in.flex_attn_func
    execution._flex_attention_backward = stand_in.backward
    for module in (package, flex, execution):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("ESPALIER_ATTENTION", "library")
    attention._cudnn.cache_clear()
    waves._kept.clear()
    registered = attention.register("stand-in", "CPU")
    try:
        yield stand_in
    finally:
        registered._destroy()
        attention._cudnn.cache_clear()
        waves._kept.clear()
