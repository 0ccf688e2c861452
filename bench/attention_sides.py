# SPDX-License-Identifier: Apache-2.0
"""What gpu_attention.py compares: tree attention by operators, FlexAttention and gathered keys, and dense causal attention.
A side is a pair of calls (forward, backward) and its results for the comparison: (out, dq, dk, dv), [T, heads, d]."""

import contextlib
import copy
import os
from typing import NamedTuple

import gpu_trees as trees
from gpu_measure import PASSES, relative_distance

MOST_DENSE_MASK = 1 << 15  # tokens
SAMPLED = 256  # queries whose results are compared with float64


class Side(NamedTuple):
    forward: object
    backward: object  # None where there is none
    results: object  # () -> list of tensors, or None where it computes another shape


class Inputs:
    def __init__(self, case, tokens, device, dtype, seed):
        import torch

        generator = torch.Generator(device=device).manual_seed(seed)

        def normal(heads):
            values = torch.randn(tokens, heads, case.head_dim, generator=generator, device=device)
            return values.to(dtype)

        self.q, self.k, self.v = normal(case.heads), normal(case.key_heads), normal(case.key_heads)
        self.grad = normal(case.heads)
        self.scale = case.head_dim**-0.5


DETERMINISTIC = "+deterministic"


@contextlib.contextmanager
def attention_kind(kind):
    """ESPALIER_ATTENTION, and deterministic algorithms, for the calls inside; the operators read both each time."""
    import torch

    before = os.environ.get("ESPALIER_ATTENTION")
    os.environ["ESPALIER_ATTENTION"] = kind.removesuffix(DETERMINISTIC)
    torch.utils.deterministic.fill_uninitialized_memory = False  # the operators write all that they allocate
    torch.use_deterministic_algorithms(kind.endswith(DETERMINISTIC))
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        if before is None:
            del os.environ["ESPALIER_ATTENTION"]
        else:
            os.environ["ESPALIER_ATTENTION"] = before


def espalier_side(kind, inputs, ends):
    import torch

    no_context = torch.empty(0, 5, dtype=torch.int64)
    q, k, v, grad, scale = inputs.q, inputs.k, inputs.v, inputs.grad, inputs.scale

    def forward():
        with attention_kind(kind):
            return torch.ops.espalier.tree_attention(q, k, v, ends, scale, [], [], no_context)

    out, lse = forward()

    def backward():
        with attention_kind(kind):
            return torch.ops.espalier.tree_attention_backward(grad, q, k, v, ends, out, lse, scale, [], [], no_context)

    return Side(forward, backward, lambda: [out, *backward()[:3]])


def autograd_side(call, inputs, same_tree):
    """call: q, k, v [1, heads, T, d] -> out likewise."""
    import torch

    # In this order the strides are those of a batch of one, [1, T, heads, d], which cuDNN looks at.
    leaves = [tensor.unsqueeze(0).transpose(1, 2).detach().requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v)]
    grad = inputs.grad.unsqueeze(0).transpose(1, 2)

    def forward():
        with torch.enable_grad():
            return call(*leaves)

    kept = forward()

    def backward():
        return torch.autograd.grad(kept, leaves, grad, retain_graph=True)

    def results():
        return [tensor.squeeze(0).transpose(0, 1) for tensor in (kept.detach(), *backward())]

    return Side(forward, backward, results if same_tree else None)


def dense_side(backend, inputs, problems):
    """Keys and values of fewer heads are shared where the backend can, and repeated before where it cannot."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    chosen = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}[backend]

    def call(q, k, v):
        with sdpa_kernel(chosen):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=inputs.scale, enable_gqa=q.shape[1] != k.shape[1])  # fmt: skip

    try:
        return autograd_side(call, inputs, same_tree=False)
    except RuntimeError:
        group = inputs.q.shape[1] // inputs.k.shape[1]
        if group == 1:
            raise
        inputs = copy.copy(inputs)
        inputs.k, inputs.v = (tensor.repeat_interleave(group, 1) for tensor in (inputs.k, inputs.v))
        side = autograd_side(call, inputs, same_tree=False)
        problems[f"{backend} with fewer key heads than query heads: measured with keys and values repeated before"] = None
        return side


def tree_mask_mod(ends):
    """FlexAttention's mask of the tree: docs/math.md, Visibility. `ends` is as long as the queries."""

    def visible(batch, head, query, key):
        return (key <= query) & (query < ends[key])

    return visible


class Flex:
    """FlexAttention, compiled once for each shape of inputs."""

    def __init__(self):
        import torch
        import torch._functorch.config
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        # Backward runs again and again on one graph.
        torch._functorch.config.donated_buffer = False
        torch._dynamo.config.cache_size_limit = 64
        self.attention = torch.compile(flex_attention, dynamic=False)
        self.block_mask = create_block_mask  # not compiled: it is not what is measured

    def side(self, inputs, ends):
        tokens = len(ends)
        compiled = {"_compile": True} if tokens > MOST_DENSE_MASK else {}  # a mask [T, T] would not fit
        mask = self.block_mask(tree_mask_mod(ends), None, None, tokens, tokens, device=str(ends.device), **compiled)
        enable_gqa = inputs.q.shape[1] != inputs.k.shape[1]

        def call(q, k, v):
            return self.attention(q, k, v, block_mask=mask, scale=inputs.scale, enable_gqa=enable_gqa)

        return autograd_side(call, inputs, same_tree=True)


def gather_side(inputs, tree):
    """A query is one of its node's tokens, which are the last of the node's root path."""
    import torch

    begins = [0]
    for length in tree.lengths:
        begins.append(begins[-1] + length)
    paths = [[token for node in trees.root_path(tree, node) for token in range(begins[node], begins[node + 1])]
             for node in range(len(tree.lengths))]  # fmt: skip
    device = inputs.q.device
    index = torch.tensor([token for path in paths for token in path], device=device)
    borders = [0]
    for path in paths:
        borders.append(borders[-1] + len(path))
    group = inputs.q.shape[1] // inputs.k.shape[1]

    def call(q, k, v):
        q, k, v = (each.transpose(1, 2).squeeze(0) for each in (q, k, v))
        k, v = (each.index_select(0, index).repeat_interleave(group, 1) for each in (k, v))
        if device.type == "cuda":
            from torch.nn.attention.varlen import varlen_attn

            out = varlen_attn(q, k, v, *(torch.tensor(each, dtype=torch.int32, device=device) for each in (begins, borders)),
                              max(tree.lengths), max(map(len, paths)), scale=inputs.scale, window_size=(-1, 0))  # fmt: skip
            return out.transpose(0, 1).unsqueeze(0)
        outs = []
        for node, length in enumerate(tree.lengths):
            keys = slice(borders[node], borders[node + 1])
            mask = torch.ones(length, borders[node + 1] - borders[node], dtype=torch.bool).tril(len(paths[node]) - length)
            outs.append(torch.nn.functional.scaled_dot_product_attention(
                q[begins[node]:begins[node + 1]].transpose(0, 1), k[keys].transpose(0, 1), v[keys].transpose(0, 1),
                attn_mask=mask, scale=inputs.scale))  # fmt: skip
        return torch.cat(outs, 1).unsqueeze(0)

    return autograd_side(call, inputs, same_tree=True)


def exact_rows(inputs, ends):
    """(queries, [out, dq] of them in float64), of some queries spread over the tree."""
    import torch

    tokens = len(ends)
    rows = torch.linspace(0, tokens - 1, min(SAMPLED, tokens), device=ends.device).round().long().unique()
    group = inputs.q.shape[1] // inputs.k.shape[1]
    outs, grads = [], []
    for head in range(inputs.q.shape[1]):
        q, grad = inputs.q[rows, head].double(), inputs.grad[rows, head].double()
        k, v = inputs.k[:, head // group].double(), inputs.v[:, head // group].double()
        number = torch.arange(tokens, device=ends.device)
        seen = (number[None, :] <= rows[:, None]) & (rows[:, None] < ends[None, :])
        weights = (q @ k.t() * inputs.scale).masked_fill(~seen, -torch.inf).softmax(-1)
        out, products = weights @ v, grad @ v.t()
        outs.append(out)
        grads.append((weights * (products - (grad * out).sum(-1, keepdim=True))) @ k * inputs.scale)
    return rows, [torch.stack(outs, 1), torch.stack(grads, 1)]


def errors_of(sides, inputs, ends):
    """{side: {"forward": of the output, "backward": of dq}}, relative to float64."""
    rows, exact = exact_rows(inputs, ends)
    found = {}
    for name, side in sides.items():
        if side.results:
            both = [relative_distance(mine[rows], right) for mine, right in zip(side.results(), exact)]
            found[name] = dict(zip(PASSES, both))
    return found
