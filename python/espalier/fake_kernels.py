# SPDX-License-Identifier: Apache-2.0
"""Fake kernels of the operators that read some of their arguments on the host: `prev`, `ends` and `context_blocks` are
on the CPU whatever the device of the others is. PyTorch takes the device of a fake result from a kernel in Python
alone; kernels of the dispatch key Meta, which every operator has in C++, are for arguments on one device.

`espalier.ops` imports this module when it has loaded the operators.
"""

import torch


def _fake(name):
    return torch.library.register_fake(f"espalier::{name}", allow_override=True)


def _like(tensor):
    """Contiguous, as the operators' results are; None for None."""
    return None if tensor is None else tensor.new_empty(tensor.shape)


@_fake("tree_attention")
def _(q, k, v, subtree_end, softmax_scale, context_k, context_v, context_blocks, sliding_window=0, position=None,
      context_positions=None, sinks=None, softcap=0.0):  # fmt: skip
    lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32)).t()
    return q.new_empty((*q.shape[:2], v.shape[2])), lse


@_fake("tree_attention_backward")
def _(grad_out, q, k, v, subtree_end, out, lse, softmax_scale, context_k, context_v, context_blocks, sliding_window=0,
      position=None, context_positions=None, softcap=0.0):  # fmt: skip
    return _like(q), _like(k), _like(v), [_like(each) for each in context_k], [_like(each) for each in context_v]


@_fake("causal_conv1d")
def _(x, weight, bias, prev, tails, silu):
    return _like(x)


@_fake("causal_conv1d_backward")
def _(grad_y, x, weight, bias, prev, tails, silu):
    return _like(x), _like(weight), _like(bias), _like(tails)


@_fake("causal_conv1d_tails")
def _(x, prev, tails, ends, taps):
    return x.new_empty((ends.shape[0], taps - 1, x.shape[1]))


@_fake("causal_conv1d_tails_backward")
def _(grad, prev, ends, num_tails):
    _, history, channels = grad.shape
    return (grad.new_empty((prev.shape[0], channels)),
            None if num_tails is None else grad.new_empty((num_tails, history, channels)))  # fmt: skip


@_fake("gated_delta_rule")
def _(q, k, v, g, beta, prev, states, ends, chunk_size=64):
    return _like(v), g.new_empty((ends.shape[0], v.shape[1], q.shape[2], v.shape[2]))


@_fake("gated_delta_rule_backward")
def _(grad_out, grad_end_states, q, k, v, g, beta, prev, states, ends, chunk_size):
    return _like(q), _like(k), _like(v), _like(g), _like(beta), _like(states)


@_fake("ssm_scan")
def _(x, dt, A, B, C, D, prev, states, ends, chunk_size=64):
    return _like(x), dt.new_empty((ends.shape[0], x.shape[1], B.shape[2], x.shape[2]))


@_fake("ssm_scan_backward")
def _(grad_out, grad_end_states, x, dt, A, B, C, D, prev, states, ends, chunk_size):
    return _like(x), _like(dt), _like(A), _like(B), _like(C), _like(D), _like(states)
