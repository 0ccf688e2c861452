# SPDX-License-Identifier: Apache-2.0
"""Forests that recurrences and convolutions prove themselves on, their plain forms, and what both forms of recurrences take of
time."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import ops
from . import causal_conv, gated_delta, ssm_scan
from .cases import OUT, Case, Results, detached, error_of_sum, named, seconds_of
from .recurrences import VARIABLE, Rates, Recurrence
from .waves import Waves

HEADS, GROUPS = 4, 2
# Of a state, or of rows, and of the logarithms of decays: 8 leaves next to nothing of a state. Kernels of Mamba-2 are tuned anew,
# for minutes, for each size of a state.
SIZES = {"gated_delta_rule": ((64, 0.1), (128, 0.1), (128, 8.0)), "ssm_scan": ((128, 0.1), (128, 8.0)),
         "causal_conv1d": ((64, 0.0), (136, 0.0))}  # fmt: skip


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


class Layer(NamedTuple):
    """What an operator is given, but for prev; those of sums are in the dtype of sums already.

    inputs    by name, what it is differentiable in: `states` or `tails` where paths go on from them
    grads     of its results, by their names, in float64
    shared    the inputs that all tokens have in common
    """

    inputs: dict[str, Tensor]
    grads: dict[str, Tensor]
    shared: tuple[str, ...] = ()


class Problem(NamedTuple):
    """An operator: `layer` of (prev, size, decay, generator, dtype); `ours`, and `plain` in a dtype, of its inputs by name, prev
    and ends give its results in the order of `grads`."""

    layer: Callable[..., Layer]
    ours: Callable[..., Sequence[Tensor]]
    plain: Callable[[torch.dtype], Callable[..., Sequence[Tensor]]]


def cases(operator: str, dtype: torch.dtype, device: str) -> Iterator[Case]:
    for number, (name, prev) in enumerate(forests().items()):
        for size, decay in SIZES[operator]:
            yield case(operator, f"{name}, {size}, decays of {decay}", prev, (size, decay), number, dtype, device)


def case(operator: str, name: str, before: list[int], shape: tuple[int, float], seed: int, dtype: torch.dtype,
         device: str) -> Case:  # fmt: skip
    problem, generator = PROBLEMS[operator], torch.Generator().manual_seed(seed)
    prev = torch.tensor(before, dtype=torch.int32, device="cpu")
    ends = torch.arange(0, len(before), 1 + len(before) // 3, device="cpu")
    layer = problem.layer(before, len(ends), *shape, generator, dtype)

    def results(function: Callable[..., Sequence[Tensor]], place: str, kind: torch.dtype | None) -> Results:
        leaves = {name: each.to(place, kind or each.dtype).requires_grad_() for name, each in layer.inputs.items()}
        outs = function(**leaves, prev=prev, ends=ends)
        grads = [grad.to(out) for grad, out in zip(layer.grads.values(), outs)]
        gradients = torch.autograd.grad(outs, list(leaves.values()), grads)
        input_gradients = {f"gradient of {name}": gradient for name, gradient in zip(leaves, gradients)}
        return detached(dict(zip(layer.grads, outs)) | input_gradients)

    names = [*layer.grads, *(f"gradient of {name}" for name in layer.inputs)]
    floors = dict.fromkeys(names, torch.finfo(dtype).eps / 4)  # sums as well are of numbers in the dtype
    long_sum = error_of_sum(len(before))  # which libraries add up in any order
    floors.update({f"gradient of {name}": max(long_sum, torch.finfo(dtype).eps / 4) for name in layer.shared})
    return Case(name, lambda: results(problem.ours, device, None), lambda: results(problem.plain(dtype), "cpu", None),
                lambda: results(problem.plain(torch.float64), "cpu", torch.float64), floors=floors)  # fmt: skip


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")


def _recurrent_layer(rows: dict[str, Tensor], state: tuple[int, int], width: int, before: list[int], num_ends: int,
                     generator: torch.Generator, dtype: torch.dtype) -> Layer:  # fmt: skip
    """A recurrence of HEADS heads with states [*state] and outputs of `width`, with two states where paths go on."""
    sums = torch.promote_types(dtype, torch.float32)
    if min(before) < -1:
        rows["states"] = (_normal(generator, 2, HEADS, *state) / state[0] ** 0.5).to(sums)
    grads = {OUT: _normal(generator, len(before), HEADS, width), "end states": _normal(generator, num_ends, HEADS, *state)}
    return Layer(rows, grads)


def _gated_delta_layer(before: list[int], num_ends: int, dim: int, decay: float, generator: torch.Generator,
                       dtype: torch.dtype) -> Layer:  # fmt: skip
    tokens, sums = len(before), torch.promote_types(dtype, torch.float32)
    q, k, v = (_normal(generator, tokens, heads, dim).to(dtype) for heads in (GROUPS, GROUPS, HEADS))
    g, beta = -decay * _normal(generator, tokens, HEADS).abs(), _normal(generator, tokens, HEADS).sigmoid()
    rows = {"q": q, "k": k, "v": v, "g": g.to(sums), "beta": beta.to(sums)}
    return _recurrent_layer(rows, (dim, dim), dim, before, num_ends, generator, dtype)


def _ssm_layer(before: list[int], num_ends: int, size: int, decay: float, generator: torch.Generator,
               dtype: torch.dtype) -> Layer:  # fmt: skip
    tokens, dim, sums = len(before), 64, torch.promote_types(dtype, torch.float32)
    x, b, c = (_normal(generator, tokens, *shape).to(dtype) for shape in ((HEADS, dim), (GROUPS, size), (GROUPS, size)))
    dt, a = torch.nn.functional.softplus(_normal(generator, tokens, HEADS) - 1), -decay * _normal(generator, HEADS).abs()
    rows = {"x": x, "dt": dt.to(sums), "A": a.to(sums), "B": b, "C": c, "D": _normal(generator, HEADS).to(sums)}
    return _recurrent_layer(rows, (size, dim), dim, before, num_ends, generator, dtype)._replace(shared=("A", "D"))


def _convolution_layer(before: list[int], _num_ends: int, channels: int, _decay: float, generator: torch.Generator,
                       dtype: torch.dtype) -> Layer:  # fmt: skip
    taps = 4
    inputs = {"x": _normal(generator, len(before), channels), "weight": _normal(generator, channels, taps) / taps**0.5,
              "bias": _normal(generator, channels)}  # fmt: skip
    if min(before) < -1:
        inputs["tails"] = _normal(generator, 2, taps - 1, channels)
    return Layer({name: each.to(dtype) for name, each in inputs.items()}, {OUT: _normal(generator, len(before), channels)},
                 ("weight", "bias"))  # fmt: skip


def _along(prev: Tensor, states: Tensor | None, zero: Tensor, step: Callable[[int, Tensor], tuple[Tensor, Tensor]],
           ends: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(outputs, states after the ends) of step(t, the state before), which gives a token's state and output."""
    after: list[Tensor] = []
    outs = []
    for t, before in enumerate(prev.tolist()):
        if before >= 0:
            state = after[before]
        else:
            state = zero if before == -1 or states is None else states[-2 - before]
        state, out = step(t, state)
        after.append(state)
        outs.append(out)
    return torch.stack(outs), torch.stack([after[end] for end in ends.tolist()])


def gated_delta_plain(dtype: torch.dtype) -> Callable[..., Sequence[Tensor]]:
    """gated_delta_rule token by token, as a kernel has it that multiplies in `dtype` and adds in float32."""

    def computed(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, prev: Tensor, ends: Tensor,
                 states: Tensor | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
        def held(values: Tensor) -> Tensor:
            return values.to(dtype).to(g.dtype)

        def units(values: Tensor) -> Tensor:
            values = values.to(g.dtype)
            return held(values / (values.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(group, 1)

        group = v.shape[1] // q.shape[1]
        unit_q, unit_k, zero = units(q), units(k), g.new_zeros(v.shape[1], q.shape[2], v.shape[2])

        def step(t: int, state: Tensor) -> tuple[Tensor, Tensor]:
            state = state * g[t].exp()[:, None, None]
            update = held(beta[t][:, None] * (v[t].to(g.dtype) - (held(state) * unit_k[t].unsqueeze(-1)).sum(1)))
            state = state + unit_k[t].unsqueeze(-1) * update.unsqueeze(1)
            return state, (held(state) * unit_q[t].unsqueeze(-1)).sum(1) * q.shape[-1] ** -0.5

        out, found = _along(prev, states, zero, step, ends)
        return out.to(q.dtype), found

    return computed


def ssm_plain(dtype: torch.dtype) -> Callable[..., Sequence[Tensor]]:
    """ssm_scan in the same way."""

    def computed(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, prev: Tensor, ends: Tensor,
                 states: Tensor | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
        def held(values: Tensor) -> Tensor:
            return values.to(dtype).to(dt.dtype)

        group = x.shape[1] // B.shape[1]
        b, c = (each.to(dt.dtype).repeat_interleave(group, 1).unsqueeze(-1) for each in (B, C))
        values, zero = x.to(dt.dtype), dt.new_zeros(x.shape[1], B.shape[2], x.shape[2])

        def step(t: int, state: Tensor) -> tuple[Tensor, Tensor]:
            added = held(dt[t][:, None, None] * b[t]) * values[t].unsqueeze(1)
            state = state * (dt[t] * A).exp()[:, None, None] + added
            return state, (held(state) * c[t]).sum(1) + D[:, None] * values[t]

        out, found = _along(prev, states, zero, step, ends)
        return out.to(x.dtype), found

    return computed


def convolution_plain(_dtype: torch.dtype) -> Callable[..., Sequence[Tensor]]:
    """causal_conv1d with SiLU token by token, in the dtype of sums."""

    def computed(x: Tensor, weight: Tensor, bias: Tensor, prev: Tensor, ends: Tensor,
                 tails: Tensor | None = None) -> list[Tensor]:  # fmt: skip
        sums, taps = torch.promote_types(x.dtype, torch.float32), weight.shape[1]
        seen: list[Tensor] = []  # of each token, [W, C]
        for t, before in enumerate(prev.tolist()):
            if before >= 0:
                history = seen[before][1:]
            else:
                history = x.new_zeros(taps - 1, x.shape[1]) if before == -1 or tails is None else tails[-2 - before]
            seen.append(torch.cat([history, x[t:t + 1]]))
        out = (torch.stack(seen).to(sums) * weight.to(sums).t()).sum(1) + bias.to(sums)
        return [torch.nn.functional.silu(out).to(x.dtype)]

    return computed


def _convolution(ends: Tensor, **given: Any) -> list[Tensor]:
    return [ops.causal_conv1d(**given, silu=True)]


PROBLEMS = {
    gated_delta.LIBRARY.operator: Problem(_gated_delta_layer, ops.gated_delta_rule, gated_delta_plain),
    ssm_scan.LIBRARY.operator: Problem(_ssm_layer, ops.ssm_scan, ssm_plain),
    causal_conv.LIBRARY.operator: Problem(_convolution_layer, _convolution, convolution_plain),
}


def _timed_gated_delta(tokens: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    q, k, v = (torch.randn(tokens, 32, 128, device=device, dtype=dtype) for _ in range(3))
    return {"q": q, "k": k, "v": v, "g": -torch.rand(tokens, 32, device=device), "beta": torch.rand(tokens, 32, device=device)}


def _timed_ssm(tokens: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    x, b, c = (torch.randn(tokens, *shape, device=device, dtype=dtype) for shape in ((64, 64), (8, 128), (8, 128)))
    dt, a = torch.rand(tokens, 64, device=device), -torch.rand(64, device=device)
    return {"x": x, "dt": dt, "A": a, "B": b, "C": c, "D": torch.rand(64, device=device)}


# Operators by whose time a form is chosen: inputs of (tokens, dtype, device) at the size of Rates.
TIMED: dict[str, tuple[Callable[..., Recurrence], Callable[..., dict[str, Tensor]]]] = {
    gated_delta.LIBRARY.operator: (gated_delta.GatedDeltaRule, _timed_gated_delta),
    ssm_scan.LIBRARY.operator: (ssm_scan.SsmScan, _timed_ssm),
}


def measured(operator: str, dtype: torch.dtype, device: str) -> tuple[float, ...]:
    """The Rates of a device in a dtype, of three forests: a sequence, many short ones, and a comb."""
    kind, inputs_of = TIMED[operator]
    forest_of = {"sequence": [*range(-1, 4095)], "wide": [t - 1 if t % 64 else -1 for t in range(4096)], "deep": _deep(64, 16)}
    rows, taken, none = [], [], torch.empty(0, dtype=torch.int64, device="cpu")
    for before in forest_of.values():
        prev, inputs = torch.tensor(before, dtype=torch.int32, device="cpu"), inputs_of(len(before), dtype, device)
        rows.append(kind(**inputs, prev=prev, states=None, ends=none).counts(Waves(prev, none, torch.device("cpu"))))
        taken.append([_seconds(form, operator, inputs, prev, device) for form in ("library", "composed")])
    counts, seconds = np.array(rows, float), np.array(taken)
    found = [np.linalg.lstsq(counts[:, [2 * form, 2 * form + 1]], seconds[:, form], rcond=None)[0].clip(min=0) for form in (0, 1)]
    return tuple(Rates(*map(float, np.concatenate(found))))


def _deep(levels: int, tokens: int) -> list[int]:
    """A spine of nodes, beside each of which is a leaf."""
    before, spine = [*range(-1, tokens - 1)], tokens - 1
    for _ in range(levels):
        before += _node(spine, len(before), tokens) + _node(spine, len(before) + tokens, tokens)
        spine = len(before) - 1
    return before


def _seconds(form: str, operator: str, inputs: dict[str, Tensor], prev: Tensor, device: str) -> float:
    """Of a forward and a backward pass."""
    leaves = {name: each.detach().requires_grad_() for name, each in inputs.items()}

    def passes() -> None:
        out, _ = getattr(ops, operator)(**leaves, prev=prev)
        torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))

    with named(VARIABLE, form):
        return seconds_of(passes, device)
