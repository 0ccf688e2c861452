# SPDX-License-Identifier: Apache-2.0
"""flash-linear-attention played on the CPU: token by token, in any dtype, with what its interface documents and validates
(fla 0.6, ops/gated_delta_rule/chunk.py), except for the device and the dtype."""

import contextlib
import sys
import types
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from espalier.kernels import recurrences, waves


class StandIn:
    """What the module of the library has. `change` spoils the initial states of a call, `drop` the gradient of final states,
    as controls."""

    def __init__(self) -> None:
        self.calls = 0
        self.change = lambda states: states
        self.drop = False

    def chunk_gated_delta_rule(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
                               initial_state: Tensor | None = None, output_final_state: bool = False,
                               use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
                               cu_seqlens_cpu: Tensor | None = None) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        self.calls += 1
        assert len(q) == 1 and q.shape == k.shape and q.shape[:2] == v.shape[:2] == g.shape[:2]
        assert v.shape[2] % q.shape[2] == 0 and g.shape == beta.shape == v.shape[:3]
        assert all(each.is_contiguous() for each in (q, k, v, g, beta))
        assert cu_seqlens.dtype == torch.int64 and torch.equal(cu_seqlens.cpu(), cu_seqlens_cpu)
        borders = cu_seqlens_cpu.tolist()
        assert borders[0] == 0 and borders[-1] == q.shape[1] and sorted(set(borders)) == borders
        if use_qk_l2norm_in_kernel:
            q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
        shape = (len(borders) - 1, v.shape[2], q.shape[3], v.shape[3])
        states = v.new_zeros(shape) if initial_state is None else self.change(initial_state)
        assert states.shape == shape
        group = v.shape[2] // q.shape[2]
        q, k = (each[0].repeat_interleave(group, 1) for each in (q, k))
        outs, finals = [], []
        for begin, end, state in zip(borders[:-1], borders[1:], states):
            for t in range(begin, end):
                state = state * g[0, t].exp()[:, None, None]
                update = beta[0, t][:, None] * (v[0, t] - torch.einsum("hkv,hk->hv", state, k[t]))
                state = state + k[t].unsqueeze(-1) * update.unsqueeze(1)
                outs.append(torch.einsum("hkv,hk->hv", state, q[t]) * (q.shape[-1] ** -0.5 if scale is None else scale))
            finals.append(state)
        final = torch.stack(finals)
        return torch.stack(outs).unsqueeze(0), (final.detach() if self.drop else final) if output_final_state else None


@contextlib.contextmanager
def installed(monkeypatch: pytest.MonkeyPatch, library=None) -> Iterator[StandIn]:
    """Inside, gated_delta_rule on the CPU is computed by a stand-in, or by `library`, where that serves."""
    stand_in = library or StandIn()
    package = types.ModuleType("fla.ops.gated_delta_rule")
    package.chunk_gated_delta_rule = stand_in.chunk_gated_delta_rule
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["fla"].ops, sys.modules["fla.ops"].gated_delta_rule = sys.modules["fla.ops"], package
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setenv(recurrences.VARIABLE, "library")
    recurrences._fla.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is a kernel for the CPU
        registered = recurrences.register("CPU")
    try:
        yield stand_in
    finally:
        registered._destroy()
        recurrences._fla.cache_clear()
        waves._kept.clear()
