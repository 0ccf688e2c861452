# SPDX-License-Identifier: Apache-2.0
"""Forests that gated_delta_rule proves itself on, its plain form, and what both of its forms take of time."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import ops
from . import recurrences
from .cases import OUT, Case, Results, detached, named, seconds_of
from .recurrences import Rates
from .waves import Waves

HEADS, KEY_HEADS = 4, 2
# (size of a head, scale of the logarithms of decays): 8 leaves next to nothing of a state.
SIZES = ((64, 0.1), (128, 0.1), (128, 8.0))
INPUTS = ("q", "k", "v", "g", "beta", "states")


def forests() -> dict[str, list[int]]:
    """`prev` by name: one token, a sequence longer than chunks, a star, a comb, nodes of one token, several trees, and trees
    that go on from two states."""
    sequence = [*range(-1, 199)]
    star = [*range(-1, 69), *(before for leaf in range(9) for before in _node(69, 70 + 20 * leaf, 20))]
    comb = [-1]
    for _ in range(30):  # a leaf of three tokens, then the spine
        spine = len(comb) - 1
        comb += [spine, len(comb), len(comb) + 1, spine, len(comb) + 3]
    single = [-1] + [(token - 1) // 2 for token in range(1, 63)]
    trees = [before for tree in range(20) for before in _node(-1, 7 * tree, 7)]
    context = [before for tree in range(12) for before in _node(-1 - tree % 3, 9 * tree, 9)]
    return {"one token": [-1], "sequence": sequence, "star": star, "comb": comb, "single tokens": single, "several trees": trees,
            "context": context}  # fmt: skip


def _node(parent: int, begin: int, tokens: int) -> list[int]:
    return [parent, *range(begin, begin + tokens - 1)]


def cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for number, (name, prev) in enumerate(forests().items()):
        for dim, decay in SIZES:
            yield _case(f"{name}, {dim}, decays of {decay}", prev, dim, decay, number, dtype, device)


def _case(name: str, before: list[int], dim: int, decay: float, seed: int, dtype: torch.dtype, device: str) -> Case:
    generator = torch.Generator().manual_seed(seed)
    prev, tokens, sums = torch.tensor(before, dtype=torch.int32), len(before), torch.promote_types(dtype, torch.float32)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs = [normal(tokens, heads, dim).to(dtype) for heads in (KEY_HEADS, KEY_HEADS, HEADS)]
    inputs += [each.to(sums) for each in (-decay * normal(tokens, HEADS).abs(), normal(tokens, HEADS).sigmoid())]
    states = normal(2, HEADS, dim, dim).to(sums) / dim**0.5 if min(before) < -1 else None
    ends = torch.arange(0, tokens, 1 + tokens // 3)
    grads = normal(tokens, HEADS, dim).to(dtype), normal(len(ends), HEADS, dim, dim).to(sums)

    def results(function: Callable[..., Any], place: str, kind: torch.dtype | None) -> Results:
        given = inputs if states is None else [*inputs, states]
        leaves = [each.to(place, kind or each.dtype).requires_grad_() for each in given]
        *rows, first = leaves if states is not None else [*leaves, None]
        outs = function(*rows, prev, states=first, ends=ends)
        gradients = torch.autograd.grad(outs, leaves, [grad.to(out) for grad, out in zip(grads, outs)])
        named_gradients = {f"gradient of {name}": gradient for name, gradient in zip(INPUTS, gradients)}
        return detached({OUT: outs[0], "end states": outs[1], **named_gradients})

    return Case(name, lambda: results(ops.gated_delta_rule, device, None),
                lambda: results(plain_form(dtype), "cpu", None), lambda: results(plain_form(torch.float64), "cpu", torch.float64))


def plain_form(dtype: torch.dtype) -> Callable[..., tuple[Tensor, Tensor]]:
    """gated_delta_rule token by token, as a kernel has it that multiplies in `dtype` and adds in float32."""

    def computed(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, prev: Tensor, *, states: Tensor | None,
                 ends: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
        def held(values: Tensor) -> Tensor:
            return values.to(dtype).to(g.dtype)

        def units(values: Tensor) -> Tensor:
            values = values.to(g.dtype)
            return held(values / (values.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(group, 1)

        group = v.shape[1] // q.shape[1]
        unit_q, unit_k, zero = units(q), units(k), g.new_zeros(v.shape[1], q.shape[2], v.shape[2])
        after: list[Tensor] = []
        outs = []
        for t, before in enumerate(prev.tolist()):
            if before >= 0:
                state = after[before]
            else:
                state = zero if before == -1 or states is None else states[-2 - before]
            state = state * g[t].exp()[:, None, None]
            update = held(beta[t][:, None] * (v[t].to(g.dtype) - (held(state) * unit_k[t].unsqueeze(-1)).sum(1)))
            after.append(state + unit_k[t].unsqueeze(-1) * update.unsqueeze(1))
            outs.append((held(after[-1]) * unit_q[t].unsqueeze(-1)).sum(1) * q.shape[-1] ** -0.5)
        return torch.stack(outs).to(q.dtype), torch.stack([after[end] for end in ends.tolist()])

    return computed


def measured(dtype: torch.dtype, device: str) -> tuple[float, ...]:
    """The Rates of a device in a dtype, of three forests: a sequence, many short ones, and a comb."""
    forest_of = {"sequence": [*range(-1, 4095)], "wide": [t - 1 if t % 64 else -1 for t in range(4096)], "deep": _deep(64, 16)}
    rows, taken = [], []
    for before in forest_of.values():
        prev = torch.tensor(before, dtype=torch.int32)
        waves = Waves(prev, torch.empty(0, dtype=torch.int64), torch.device("cpu"))
        rows.append((len(waves.waves), waves.num_levels, len(prev)))
        taken.append([_seconds(form, prev, dtype, device) for form in ("library", "composed")])
    counts, seconds = np.array(rows, float), np.array(taken)
    found = [np.linalg.lstsq(counts[:, [column, 2]], seconds[:, form], rcond=None)[0].clip(min=0)
             for form, column in ((0, 0), (1, 1))]  # fmt: skip
    return tuple(Rates(*map(float, np.concatenate(found))))


def _deep(levels: int, tokens: int) -> list[int]:
    """A spine of nodes, beside each of which is a leaf."""
    before, spine = [*range(-1, tokens - 1)], tokens - 1
    for _ in range(levels):
        before += _node(spine, len(before), tokens) + _node(spine, len(before) + tokens, tokens)
        spine = len(before) - 1
    return before


def _seconds(form: str, prev: Tensor, dtype: torch.dtype, device: str) -> float:
    """Of a forward and a backward pass with 32 heads of 128."""
    heads, dim = 32, 128
    q, k, v = (torch.randn(len(prev), heads, dim, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    g, beta = -torch.rand(len(prev), heads, device=device), torch.rand(len(prev), heads, device=device)

    def passes() -> None:
        out, _ = ops.gated_delta_rule(q, k, v, g, beta, prev)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    with named(recurrences.VARIABLE, form):
        return seconds_of(passes, device)
