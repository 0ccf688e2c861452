# SPDX-License-Identifier: Apache-2.0
"""Libraries of recurrences and convolutions played on the CPU: token by token, in any dtype, with what their interfaces document
and validate (fla 0.6, ops/gated_delta_rule/chunk.py; mamba_ssm 2.3, ops/triton/ssd_combined.py; causal-conv1d 1.7,
csrc/causal_conv1d.cpp), except for the device and the dtype."""

import contextlib
import functools
import sys
import types
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

import espalier.ops  # noqa: F401  # first: operators that are loaded later would take the place of a stand-in
from espalier.kernels import causal_conv, gated_delta, recurrences, ssm_scan, waves


class StandIn:
    """The one function of a module. `change` spoils the initial states of a call, `drop` the gradient of final states, as
    controls."""

    def __init__(self) -> None:
        self.calls = 0
        self.change = lambda states: states
        self.drop = False


class GatedDelta(StandIn):
    module, function = "fla.ops.gated_delta_rule", "chunk_gated_delta_rule"
    loader = staticmethod(gated_delta._fla)
    register = staticmethod(functools.partial(recurrences.register, gated_delta.GatedDeltaRule))

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


class Mamba(StandIn):
    module, function = "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined"
    loader = staticmethod(ssm_scan._mamba)
    register = staticmethod(functools.partial(recurrences.register, ssm_scan.SsmScan))

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, int]] = []

    def mamba_chunk_scan_combined(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int,
                                  D: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
                                  initial_states: Tensor | None = None, seq_idx: Tensor | None = None,
                                  cu_seqlens: Tensor | None = None, dt_softplus: bool = False,
                                  dt_limit: tuple[float, float] = (0.0, float("inf")), return_final_states: bool = False,
                                  return_varlen_states: bool = False) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        batch, length, heads, dim = x.shape
        groups, size = B.shape[2:]
        assert z is seq_idx is cu_seqlens is None and not return_varlen_states
        if dt_softplus:  # Transformers itself
            dt = softplus(dt + dt_bias).clamp(*dt_limit)
        else:
            self.calls += 1
            self.shapes.append((batch, length))
            assert dt_bias is None and chunk_size in (64, 256)
        assert heads % groups == 0 and B.shape == C.shape == (batch, length, groups, size) and dt.shape == (batch, length, heads)
        assert A.shape == (heads,) and (D is None or D.shape == (heads,))
        states = x.new_zeros(batch, heads, dim, size) if initial_states is None else self.change(initial_states)
        assert states.shape == (batch, heads, dim, size)
        b, c = (each.repeat_interleave(heads // groups, 2) for each in (B, C))
        outs = []
        for t in range(length):
            added = dt[:, t, :, None, None] * x[:, t].unsqueeze(-1) * b[:, t].unsqueeze(-2)
            states = states * (dt[:, t] * A).exp()[..., None, None] + added
            out = torch.einsum("bhpn,bhn->bhp", states, c[:, t])
            outs.append(out if D is None else out + D[:, None] * x[:, t])
        out = torch.stack(outs, 1)
        return (out, states.detach() if self.drop else states) if return_final_states else out


class Convolution(StandIn):
    module, function = "causal_conv1d", "causal_conv1d_fn"
    loader = staticmethod(causal_conv._library)
    register = staticmethod(causal_conv.register)

    def causal_conv1d_fn(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None,
                         initial_states: Tensor | None = None, return_final_states: bool = False,
                         final_states_out: Tensor | None = None, activation: str | None = None) -> Tensor:  # fmt: skip
        batch, channels, length = x.shape
        taps = weight.shape[1]
        assert initial_states is final_states_out is None and not return_final_states and activation in (None, "silu", "swish")
        assert weight.shape[0] == channels and 2 <= taps <= 4 and (bias is None or bias.shape == (channels,))
        if seq_idx is None:  # Transformers itself
            seq_idx = torch.zeros(batch, length)
        else:
            self.calls += 1
            assert x.stride(1) == 1 and channels % 8 == x.stride(0) % 8 == x.stride(2) % 8 == 0
            assert seq_idx.dtype == torch.int32 and seq_idx.is_contiguous() and seq_idx.shape == (batch, length)
            seq_idx = self.change(seq_idx)
        out = x.new_zeros(x.shape) if bias is None else bias.to(x.dtype)[:, None].expand(x.shape)
        for back in range(taps):
            is_seen = pad(seq_idx, (back, 0), value=-1)[:, :length] == seq_idx
            out = out + weight[:, taps - 1 - back, None] * pad(x, (back, 0))[..., :length] * is_seen[:, None]
        return out if activation is None else silu(out)


@contextlib.contextmanager
def installed(monkeypatch: pytest.MonkeyPatch, library=None) -> Iterator[StandIn]:
    """Inside, an operator on the CPU is computed by a stand-in, or by `library`, where that serves."""
    stand_in = library or GatedDelta()
    package = types.ModuleType(stand_in.module)
    setattr(package, stand_in.function, getattr(stand_in, stand_in.function))
    with monkeypatch.context() as patch:
        parts = stand_in.module.split(".")
        for count in range(1, len(parts)):
            patch.setitem(sys.modules, ".".join(parts[:count]), types.ModuleType(".".join(parts[:count])))
        patch.setitem(sys.modules, stand_in.module, package)
        for count in range(1, len(parts)):
            setattr(sys.modules[".".join(parts[:count])], parts[count], sys.modules[".".join(parts[:count + 1])])
        patch.setenv(recurrences.VARIABLE, "library")
        stand_in.loader.cache_clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is a kernel for the CPU
            registered = stand_in.register("CPU")
        try:
            yield stand_in
        finally:
            registered._destroy()
            stand_in.loader.cache_clear()
            waves._kept.clear()
