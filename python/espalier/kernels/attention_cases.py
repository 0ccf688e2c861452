# SPDX-License-Identifier: Apache-2.0
"""Awkward forests, and tree attention on them, its plain form and its exact one."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import ops
from .attention import OURS
from .cases import OUT, Case, Results, detached, deterministic, named, seconds_of

_HALF, _EVERY = (torch.bfloat16, torch.float16), (torch.float64, torch.float32, torch.bfloat16)
# Dtypes and sizes of heads that an implementation is checked in, by its name.
SERVED = {"library": (_HALF, (64, 96, 128, 256)), "ampere": (_HALF, OURS), "masked": (_EVERY, (40, 128)),
          "cpu": (_EVERY, (8, 64))}  # fmt: skip

Grow = Callable[["Ends"], object]


class Ends(list[int]):
    """subtree_end of a forest that grows in preorder."""

    def node(self, tokens: int, children: Grow = lambda _ends: None) -> int:
        """Appends a node with the subtrees that `children` appends; returns the number of tokens."""
        begin = len(self)
        self += [0] * tokens
        children(self)
        self[begin:begin + tokens] = [len(self)] * tokens
        return len(self)


class Forest(NamedTuple):
    subtree_end: list[int]
    segments: tuple[int, ...] = ()
    blocks: tuple[tuple[int, ...], ...] = ()
    period: int = 0  # of keys and values in tokens
    # Factor of queries. Larger ones are of no use in float32, since backward computes weights from rounded scores.
    sharpness: float = 1.0


_CHAIN = Forest([8] * 8)


def forests() -> dict[str, Forest]:
    def leaves(sizes: Iterable[int]) -> Grow:
        return lambda ends: [ends.node(size) for size in sizes]

    def star(prompt: int, count: int, tokens: int) -> list[int]:
        return _grown(lambda ends: ends.node(prompt, leaves(tokens + leaf % 3 for leaf in range(count))))

    several = _grown(lambda ends: [ends.node(1 + tree % 7, leaves(range(1, 1 + tree % 4))) for tree in range(30)])
    found = {
        "one token": Forest([1]), "chain": Forest([300] * 300), "star": Forest(star(70, 40, 4)),
        "long prompt": Forest(star(1000, 30, 5)), "single tokens": Forest(_grown(_single_tokens(8))),
        "deep": Forest(_grown(_deep(60))), "wide": Forest(_grown(_broad(3))),
        "trajectories ending inside": Forest(_grown(_ending_inside(30))), "several trees": Forest(several),
        "borders of tiles": Forest(_borders()), "equal keys": Forest(star(64, 16, 12), period=7),
        "sharp softmax": Forest(star(130, 10, 9), sharpness=8),
    }  # fmt: skip
    for name, ends in (("context of a chain", [130] * 130), ("context of a tree", _borders())):
        size, half = len(ends), len(ends) // 2
        blocks = ((0, 0, 100, 0, size), (0, 110, 150, 20, half), (1, 0, 64, half, size), (1, 64, 65, half, half + 1))
        found[name] = Forest(ends, (150, 90), blocks)
    return found


def _grown(grow: Grow) -> list[int]:
    ends = Ends()
    grow(ends)
    return list(ends)


def _single_tokens(depth: int) -> Grow:
    state = 7

    def grow(ends: Ends, depth: int) -> None:
        def children(ends: Ends) -> None:
            nonlocal state
            count = 0
            if depth:
                state = state * 48271 % (2**31 - 1)  # std::minstd_rand
                count = 1 + state % 3
            for _ in range(count):
                grow(ends, depth - 1)

        ends.node(1, children)

    return lambda ends: grow(ends, depth)


def _deep(levels: int) -> Grow:
    """A path with a short branch at every node."""

    def children(ends: Ends) -> None:
        if levels and levels % 2 == 0:
            ends.node(2)
        if levels:
            _deep(levels - 1)(ends)
        if levels and levels % 3 == 0:
            ends.node(1)

    return lambda ends: ends.node(1 + levels % 5, children)


def _broad(levels: int) -> Grow:
    return lambda ends: ends.node(3 + 2 * levels, lambda ends: [_broad(levels - 1)(ends) for _ in range(5 if levels else 0)])


def _ending_inside(levels: int) -> Grow:
    """Nodes with one child: a trajectory ends where another goes on."""

    def children(ends: Ends) -> None:
        if levels:
            _ending_inside(levels - 1)(ends)
        if levels and levels % 4 == 0:
            ends.node(11)

    return lambda ends: ends.node(7, children)


def _borders() -> list[int]:
    """Nodes that end one before, at and one after the sizes of tiles."""

    def inner(ends: Ends) -> None:
        ends.node(65)
        ends.node(64, lambda ends: [ends.node(127), ends.node(1)])
        ends.node(128)

    return _grown(lambda ends: [ends.node(63, inner), ends.node(129)])


def cases(dim: int, dtype: torch.dtype, device: str) -> Iterator[Case]:
    """Of the attention that ESPALIER_ATTENTION names, on the forests that it serves; none where it does not serve such heads."""
    if _is_served(dim, dtype, device):
        for number, (name, forest) in enumerate(forests().items()):
            if _is_served(dim, dtype, device, forest):
                yield from _cases(name, forest, dim, number, dtype, device)


def measured(device: str, tokens: int = 16384) -> tuple[float, ...] | None:
    """Seconds of a forward and a backward pass by library and by ampere, 16 heads over 4 of 128 in bfloat16, on a binary tree;
    None where one does not serve the device."""
    ends = torch.tensor(_grown(_binary(tokens, 5)), dtype=torch.int32, device=device)
    q, k, v = (torch.randn(tokens, heads, 128, dtype=torch.bfloat16, device=device, requires_grad=True) for heads in (16, 4, 4))

    def passes() -> None:
        out = ops.tree_attention(q, k, v, ends)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    taken = []
    for family in ("library", "ampere"):
        with named("ESPALIER_ATTENTION", family):
            if not _is_served(128, torch.bfloat16, device):
                return None
            taken.append(seconds_of(passes, device))
    return tuple(taken)


def _binary(tokens: int, levels: int) -> Grow:
    """Half of the tokens in the node, a quarter in each of two subtrees."""
    child = tokens // 4 if levels else 0

    def children(ends: Ends) -> None:
        for _ in range(2 if child else 0):
            _binary(child, levels - 1)(ends)

    return lambda ends: ends.node(tokens - 2 * child, children)


def _on_cpu(forest: Forest) -> tuple[Tensor, Tensor]:
    """(subtree_end, context_blocks) as the operator takes them."""
    ends = torch.tensor(forest.subtree_end, dtype=torch.int32, device="cpu")
    return ends, torch.tensor(forest.blocks, dtype=torch.int64, device="cpu").view(-1, 5)


def _is_served(dim: int, dtype: torch.dtype, device: str, forest: Forest = _CHAIN) -> bool:
    """Whether the attention that ESPALIER_ATTENTION names takes such heads, and the forest, which may have too many intervals of
    keys for a library; it raises where it does not."""
    q = torch.zeros(len(forest.subtree_end), 2, dim, dtype=dtype, device=device)
    context = [q.new_zeros(size, 2, dim) for size in forest.segments]
    ends, blocks = _on_cpu(forest)
    try:
        ops.tree_attention(q, q, q, ends.to(device), context_k=context, context_v=context, context_blocks=blocks)
    except RuntimeError as error:
        if "attention does not serve" in str(error):
            return False
        raise
    return True


def _cases(name: str, forest: Forest, dim: int, seed: int, dtype: torch.dtype, device: str) -> Iterator[Case]:
    """Without and with deterministic algorithms, under which gradients have the same bits in each run as well."""
    generator = torch.Generator().manual_seed(seed + 1)
    tokens, heads, key_heads = len(forest.subtree_end), 4, 2 if seed % 2 == 0 else 4

    def normal(length: int, heads: int, factor: float = 1) -> Tensor:
        drawn = torch.randn(length, heads, dim, generator=generator, dtype=torch.float64, device="cpu")
        return (factor * drawn).to(dtype)

    repeated = torch.arange(tokens, device="cpu") % (forest.period or tokens)
    inputs = [normal(tokens, heads, forest.sharpness), *(normal(tokens, key_heads)[repeated] for _ in range(2))]
    inputs += [normal(size, key_heads) for _ in range(2) for size in forest.segments]
    grad, (ends, blocks) = normal(tokens, heads), _on_cpu(forest)

    def results(function: Callable[..., list[Tensor]], place: str, kind: torch.dtype) -> Results:
        moved = [each.to(place, kind) for each in inputs]
        count = len(forest.segments)
        out, *gradients = function(*moved[:3], ends.to(place), moved[3:3 + count], moved[3 + count:], blocks,
                                   grad.to(place, kind))  # fmt: skip
        found = {OUT: out, **{f"gradient of {name}": gradient for name, gradient in zip("qkv", gradients)}}
        if count:
            found["gradient of context keys"] = torch.cat(gradients[3:3 + count])
            found["gradient of context values"] = torch.cat(gradients[3 + count:])
        return detached(found)

    def ours(is_deterministic: bool) -> Results:
        with deterministic(is_deterministic):
            return results(_by_operator, device, dtype)

    exact = functools.cache(lambda: results(_by_dense, "cpu", torch.float64))
    plain = exact if dtype == torch.float64 else functools.cache(lambda: results(_by_dense, device, dtype))
    yield Case(name, lambda: ours(False), plain, exact)
    yield Case(f"{name} with deterministic algorithms", lambda: ours(True), plain, exact, same_bits=None)


@torch.no_grad()
def _by_operator(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, context_k: list[Tensor], context_v: list[Tensor],
                 blocks: Tensor, grad: Tensor) -> list[Tensor]:  # fmt: skip
    """[out, the gradients of q, k, v, context_k and context_v], all computed in this thread, whose outputs may be guarded."""
    forest = ends, q.shape[-1] ** -0.5, context_k, context_v, blocks
    out, lse = torch.ops.espalier.tree_attention(q, k, v, *forest)
    *own, keys, values = torch.ops.espalier.tree_attention_backward(grad, q, k, v, ends, out, lse, *forest[1:])
    return [out, *own, *keys, *values]


def _by_dense(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, context_k: list[Tensor], context_v: list[Tensor],
              blocks: Tensor, grad: Tensor) -> list[Tensor]:  # fmt: skip
    leaves = [each.requires_grad_() for each in (q, k, v, *context_k, *context_v)]
    out = dense(q, k, v, ends, context_k=context_k, context_v=context_v, context_blocks=blocks)
    return [out, *torch.autograd.grad(out, leaves, grad)]


def dense(q: Tensor, k: Tensor, v: Tensor, subtree_end: Tensor, *, context_k: list[Tensor], context_v: list[Tensor],
          context_blocks: Tensor) -> Tensor:  # fmt: skip
    """ops.tree_attention with a mask over all keys, products in the dtype, the softmax in float32 at least."""
    number = torch.arange(len(q), device=q.device)
    masks = [(number[None, :] <= number[:, None]) & (number[:, None] < subtree_end[None, :])]
    keys, values = [k], [v]
    for segment, begin, end, first, last in context_blocks.tolist():
        keys.append(context_k[segment][begin:end])
        values.append(context_v[segment][begin:end])
        masks.append(((number >= first) & (number < last))[:, None].expand(-1, end - begin))
    group = q.shape[1] // k.shape[1]
    key, value = (torch.cat(each).repeat_interleave(group, 1).transpose(0, 1) for each in (keys, values))
    scores = (q.transpose(0, 1) @ key.transpose(1, 2)).to(torch.promote_types(q.dtype, torch.float32)) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~torch.cat(masks, 1), float("-inf")).softmax(-1)
    return (weights.to(q.dtype) @ value).transpose(0, 1)
