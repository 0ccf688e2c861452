# SPDX-License-Identifier: Apache-2.0
"""Cases of other projects' tests of attention and recurrences on trees, on Espalier's operators in float64.

Their shapes, decays and trees, none of their code; the references here run token by token or path by path. Every comparison
is repeated with a wrong tree or a wrong value, which it has to find. The sources:

Megatron   NVIDIA/Megatron-LM, pull request 7387: the test of TreePackedSeqParams against independent causal paths (theirs
           allows a relative error of 2.5 % in bfloat16).
fla        fla-org/flash-linear-attention bc3b101d, tests/ops/test_gdn.py (test_chunk; theirs allows 0.8 to 2 % in float16), and
           its issue 891, which asks for gates of zero.
FlashQLA   QwenLM/FlashQLA, pull request 28: dg at strong decay, and zero for the first token.
TRL        huggingface/trl 5592ca71: the test of trl.kernels.tree_gated_delta_rule (theirs allows 0.2 % in float32).
"""

import pytest
import torch

import espalier
from conftest import seed_of
from espalier import ops

EXACT = 1e-12


def results(function, inputs, weights):
    """Outputs and the gradients of the inputs."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad((out * weights.to(out.dtype)).sum(), leaves)]


def worst(found, expected):
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True))


# ---- NVIDIA Megatron-LM ------------------------------------------------------------------------------------------------

LENGTHS = (48, 32, 16, 32)
PATHS = [[*range(48)], [*range(80)], [*range(96)], [*range(48), *range(96, 128)]]


def by_path(q, k, v):
    """Causal attention along each path, of which each keeps the outputs of its last segment."""
    parts = []
    for path, length in zip(PATHS, LENGTHS, strict=True):
        heads = [x[path].transpose(0, 1) for x in (q, *(each.repeat_interleave(2, 1) for each in (k, v)))]
        parts.append(torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(0, 1)[-length:])
    return torch.cat(parts)


def test_megatron_attention():
    layout = espalier.build(PATHS).layout()  # the ids are the places, so that equal tokens are shared ones
    torch.manual_seed(seed_of(37))
    values = [torch.randn(128, heads, 64, dtype=torch.float64) * 0.2 for heads in (4, 2, 2)]
    weights = torch.randn_like(values[0]) * 0.1
    ends = torch.from_numpy(layout.subtree_end.copy())
    found = [
        results(lambda *x, ends=end: ops.tree_attention(*x, ends), values, weights) for end in (ends, torch.full_like(ends, 128))
    ]
    expected = results(by_path, values, weights)
    assert worst(found[0], expected) < EXACT < worst(found[1], expected)


# ---- flash-linear-attention, TRL: the gated delta rule -----------------------------------------------------------------


def recurrent(q, k, v, g, beta):
    """One sequence, token by token."""
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q * q.shape[-1] ** -0.5, k))
    state, out = v.new_zeros(v.shape[1], k.shape[-1], v.shape[-1]), []
    for token in range(len(q)):
        state = state * g[token].exp()[:, None, None]
        change = (v[token] - (state * k[token][:, :, None]).sum(1)) * beta[token][:, None]
        state = state + k[token][:, :, None] * change[:, None, :]
        out.append((state * q[token][:, :, None]).sum(1))
    return torch.stack(out)


# tokens, key heads, value heads, size of a head, what divides the gates' logarithms, the part of the gates that is zero
FLA = [(75, 4, 4, 64, 0.01, 0.0), (100, 3, 3, 60, 1, 0.0), (100, 3, 3, 64, 1, 0.5), (128, 2, 2, 100, 0.1, 0.0),
       (128, 2, 2, 128, 1, 1.0), (150, 2, 2, 128, 10, 0.0), (128, 2, 8, 64, 0.1, 0.0), (63, 1, 1, 64, 1, 0.0)]  # fmt: skip


@pytest.mark.parametrize("case", FLA, ids=str)
def test_fla_gates(case):
    tokens, groups, heads, size, divisor, zeros = case
    torch.manual_seed(seed_of(42))
    g = torch.nn.functional.logsigmoid(torch.rand(tokens, heads)) / divisor
    inputs = [*(torch.rand(tokens, each, size) for each in (groups, groups, heads)), g * (torch.rand_like(g) >= zeros),
              torch.rand(tokens, heads).sigmoid()]  # fmt: skip
    weights, prev = torch.randn(tokens, heads, size), torch.arange(-1, tokens - 1, dtype=torch.int32)
    ours = lambda *x: ops.gated_delta_rule(*x, prev)[0]
    exact = [x.double() for x in inputs]
    expected, found = results(recurrent, exact, weights), results(ours, exact, weights)
    assert worst(found, expected) < EXACT
    assert worst(results(ours, inputs, weights), expected) < 1e-5
    assert not found[4][0].any()  # the gate of a first token decays nothing
    # Controls: dg as small as 1e-14 counts by itself, and so does one gate.
    for place in range(1, 6):
        wrong = [*expected[:place], expected[place] * (1 + 1e-9), *expected[place + 1 :]]
        assert worst(found, wrong) > EXACT
    exact[3] = exact[3].clone()
    exact[3][-1, 0] += 1e-6
    assert divisor < 0.05 or worst(results(ours, exact, weights), expected) > EXACT


def tree_of(offsets, parents):
    """prev of nodes that begin at these places, and the paths to the leaves."""
    prev = torch.arange(-1, offsets[-1] - 1, dtype=torch.int32)
    paths = []
    for node, parent in enumerate(parents):
        prev[offsets[node]] = offsets[parent + 1] - 1 if parent >= 0 else -1
        paths.append((paths[parent] if parent >= 0 else []) + [*range(offsets[node], offsets[node + 1])])
    return prev, [path for node, path in enumerate(paths) if node not in parents]


@pytest.mark.parametrize("decay", (0.2, 20.0))
@pytest.mark.parametrize("prefix", (1, 3, 63, 64, 65, 129))
def test_trl_delta_rule_on_a_tree(prefix, decay):
    prev, paths = tree_of([0, *(prefix + more for more in (0, 2, 5, 9, 14, 17))], (-1, 0, 1, 1, 0, -1))
    torch.manual_seed(seed_of(12))
    tokens = len(prev)
    inputs = [torch.randn(tokens, heads, 32, dtype=torch.float64) for heads in (2, 2, 4)]
    inputs += [-torch.rand(tokens, 4, dtype=torch.float64) * decay, torch.rand(tokens, 4, dtype=torch.float64)]
    along = lambda q, k, v, g, beta: torch.cat([recurrent(*(x[path] for x in (q, k, v, g, beta))) for path in paths])
    order = [token for path in paths for token in path]
    weights = torch.randn(len(order), 4, 32, dtype=torch.float64)
    expected = results(along, inputs, weights)
    wrong_prev = torch.arange(-1, tokens - 1, dtype=torch.int32)  # siblings after one another
    found, wrong = (results(lambda *x, prev=each: ops.gated_delta_rule(*x, prev)[0][order], inputs, weights)
                    for each in (prev, wrong_prev))  # fmt: skip
    assert worst(found, expected) < EXACT < worst(wrong, expected)


def test_trl_convolution_on_a_tree():
    prev, paths = tree_of((0, 2, 3, 5, 6, 9), (-1, 0, 1, 0, -1))
    torch.manual_seed(seed_of(0))
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in ((9, 8), (8, 4), (8,))]

    def along(x, weight, bias):
        padded = (torch.nn.functional.pad(x[path].T, (3, 0))[None] for path in paths)
        out = [torch.nn.functional.conv1d(each, weight[:, None], bias, groups=8)[0].T for each in padded]
        return torch.nn.functional.silu(torch.cat(out))

    order = [token for path in paths for token in path]
    weights = torch.randn(len(order), 8, dtype=torch.float64)
    expected = results(along, inputs, weights)
    found, wrong = (results(lambda *x, prev=each: ops.causal_conv1d(*x, prev, silu=True)[order], inputs, weights)
                    for each in (prev, torch.arange(-1, 8, dtype=torch.int32)))  # fmt: skip
    assert worst(found, expected) < EXACT < worst(wrong, expected)
