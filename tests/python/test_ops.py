# SPDX-License-Identifier: Apache-2.0
"""torch.ops.espalier from Python: what torch.library.opcheck asks of operators, torch.compile, torch.export, and the
arguments of espalier.ops.

That results and gradients are right is the subject of tests/ops, in C++; here are those that come from Python.
"""

import hashlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing

from conftest import REPOSITORY, seed_of
from espalier import ops

SCHEMAS_TEXT = b"ESPALIER_OPS_SCHEMAS=%d;" % ops._SCHEMAS
T, H, K, D = 7, 4, 2, 3
PREV = [-1, 0, 1, 2, 1, 4, 5]  # one branching: 0 1 | 2 3 | 4 5 6
SUBTREE_END = [7, 7, 4, 4, 7, 7, 7]


def ints(values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


class Random:
    """Random tensors in float64, of a seed."""

    def __init__(self, seed=0):
        self.generator = torch.Generator().manual_seed(seed_of(seed))

    def __call__(self, *shape, grad=True, dtype=torch.float64):
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return values.to(dtype).requires_grad_(grad)


def attention_samples(n, back):
    q, k, v = n(T, H, D), n(T, K, D), n(T, K, 2)
    ends, no_blocks = ints(SUBTREE_END, torch.int32), torch.empty((0, 5), dtype=torch.int64)
    position = ints([0, 1, 2, 3, 2, 3, 4], torch.int32)
    context = ([n(3, K, D)], [n(3, K, 2)], ints([[0, 0, 3, 0, 7]]))
    if not back:
        yield q, k, v, ends, 0.5, [], [], no_blocks
        yield q, k, v, ends, 0.5, *context, 3, position + 3, ints([0]), n(H), 0.7
        return
    for rest, softcap in [(([], [], no_blocks, 0, None, None), 0.0), ((*context, 3, position + 3, ints([0])), 0.7)]:
        out, lse = torch.ops.espalier.tree_attention(q, k, v, ends, 0.5, *rest, softcap=softcap)
        yield n(T, H, 2), q, k, v, ends, out, lse, 0.5, *rest, softcap


def edge_samples(n, back):
    hidden, weight, row, target = n(5, 3), n(11, 3), ints([0, 0, 2, 3, 4]), ints([1, 10, 0, 5, 5])
    if not back:
        yield hidden, weight, row, target
        return
    lse = torch.ops.espalier.edge_logprobs(hidden, weight, row, target)[1]
    for last in ([True, True], [False, True]) if back == "both" else (n(11, 3), None):
        yield n(5), hidden, weight, row, target, lse, last


def distribution_samples(n, back):
    hidden, weight, row, target = n(5, 3), n(11, 3), ints([0, 0, 2, 3, 4]), ints([1, 10, 0, 5, 5])
    for options in [(None, None, 1.0, 1.0, 0.0), (n(11), n(5, grad=False).exp(), 0.7, 0.5, 2.0)]:
        if not back:
            yield hidden, weight, row, target, *options
            continue
        _, _, lse, mean = torch.ops.espalier.edge_distribution(hidden, weight, row, target, *options)
        yield n(5), n(5), lse, mean, hidden, weight, row, target, *options, [True, True, options[0] is not None]
        yield None, n(5), lse, mean, hidden, weight, row, target, *options, [True, False, False]


def norm_samples(n, back):
    x, weight = n(T, 5), n(5)
    for addend in (None, n(T, 5)):
        if not back:
            yield x, addend, weight, 1e-6
            continue
        inverse_rms = torch.ops.espalier.rms_norm(x, addend, weight, 1e-6)[2]
        yield n(T, 5), addend, x, weight, inverse_rms, [True, True]


def moe_samples(n, back):
    experts, weights = ints([[0, 1], [0, 2], [1, 2]] * 2 + [[0, 1]]), n(T, 2)
    for tensors in [(n(3, 4, D), n(3, D, 2), None, None, None), (n(3, D, 4), n(3, 2, D), n(3, 4), n(3, D), 1.5)]:
        given = n(T, D), weights, experts, *tensors, 1.702
        has_bias = tensors[2] is not None
        yield (n(T, D), *given, [True] * 4 + [has_bias] * 2) if back else given


def route_samples(n):
    yield n(T, 6), None, None, 2
    yield n(T, 6), n(6, grad=False), ints([[0, 1]] + [[-1, -1]] * 6), 2, True, True, 2.5, 3, 2
    yield n(T, 6), None, None, 2, False, False, 1.0, 1, 1, True


def convolution_samples(n, back):
    x, weight = n(T, 5), n(5, 3)
    for prev, bias, tails in [(PREV, None, None), ([-2] + PREV[1:], n(5), n(1, 2, 5))]:
        given = x, weight, bias, ints(prev, torch.int32), tails, bias is not None
        yield (n(T, 5), *given) if back else given


def tail_samples(n, back):
    for prev, tails in [(PREV, None), ([-2] + PREV[1:], n(1, 2, 5))]:
        prev, ends = ints(prev, torch.int32), ints([0, 3, 6])
        yield (n(3, 2, 5), prev, ends, None if tails is None else 1) if back else (n(T, 5), prev, tails, ends, 3)


def scan_samples(inputs, state_shape, out_shape, back, n):
    """Of gated_delta_rule and ssm_scan: `inputs`, then prev, states, ends and the size of chunks."""
    for prev, states, ends in [(PREV, None, []), ([-2] + PREV[1:], n(1, *state_shape), [3, 6])]:
        given = *inputs, ints(prev, torch.int32), states, ints(ends), 4
        yield (n(*out_shape), n(len(ends), *state_shape), *given) if back else given


def delta_samples(n, back):
    inputs = n(T, K, D), n(T, K, D), n(T, H, 2), (-n(T, H, grad=False).abs()).requires_grad_(), n(T, H)
    yield from scan_samples(inputs, (H, D, 2), (T, H, 2), back, n)


def ssm_samples(n, back):
    steps, decays = n(T, H, grad=False).abs().requires_grad_(), (-n(H, grad=False).abs()).requires_grad_()
    for skip in (None, n(H)):
        inputs = n(T, H, 2), steps, decays, n(T, K, D), n(T, K, D), skip
        yield from scan_samples(inputs, (H, D, 2), (T, H, 2), back, n)


SAMPLES = {
    "tree_attention": lambda n: attention_samples(n, back=False),
    "tree_attention_backward": lambda n: attention_samples(n, back=True),
    "edge_logprobs": lambda n: edge_samples(n, back=None),
    "edge_logprobs_backward": lambda n: edge_samples(n, back="both"),
    "edge_logprobs_backward_": lambda n: edge_samples(n, back="in place"),
    "edge_distribution": lambda n: distribution_samples(n, back=False),
    "edge_distribution_backward": lambda n: distribution_samples(n, back=True),
    "rms_norm": lambda n: norm_samples(n, back=False),
    "rms_norm_backward": lambda n: norm_samples(n, back=True),
    "rotary": lambda n: [(n(T, H, 4), n(T, 2, grad=False), n(T, 2, grad=False), back) for back in (False, True)],
    "swiglu": lambda n: [(n(T, 5), n(T, 5))],
    "swiglu_backward": lambda n: [(n(T, 5), n(T, 5), n(T, 5))],
    "moe_route": route_samples,
    "moe": lambda n: moe_samples(n, back=False),
    "moe_backward": lambda n: moe_samples(n, back=True),
    "causal_conv1d": lambda n: convolution_samples(n, back=False),
    "causal_conv1d_backward": lambda n: convolution_samples(n, back=True),
    "causal_conv1d_tails": lambda n: tail_samples(n, back=False),
    "causal_conv1d_tails_backward": lambda n: tail_samples(n, back=True),
    "gated_delta_rule": lambda n: delta_samples(n, back=False),
    "gated_delta_rule_backward": lambda n: delta_samples(n, back=True),
    "ssm_scan": lambda n: ssm_samples(n, back=False),
    "ssm_scan_backward": lambda n: ssm_samples(n, back=True),
}


def detached(value):
    if isinstance(value, list):
        return [detached(each) for each in value]
    return value.detach() if isinstance(value, torch.Tensor) else value


def samples_of(name):
    """What the operator may be called with. Backward operators have no gradients themselves."""
    for sample in SAMPLES[name](Random()):
        yield tuple(map(detached, sample)) if "backward" in name else sample


def operators():
    """All but those that tree_attention calls where Python has registered them, which nothing traces."""
    names = [name for name in torch._C._dispatch_get_all_op_names()
             if name.startswith("espalier::") and not name.startswith("espalier::tree_attention_library")]  # fmt: skip
    return sorted(name.removeprefix("espalier::") for name in names)


def has_fake_kernel(name):
    fake = torch._library.simple_registry.singleton.find(name).fake_impl.kernel
    return fake is not None or any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
                                   for key in ("Meta", "CompositeImplicitAutograd"))  # fmt: skip


def test_every_operator_has_a_fake_kernel_and_samples():
    assert [name for name in operators() if not has_fake_kernel(f"espalier::{name}")] == []
    assert operators() == sorted(SAMPLES)


def test_an_operator_without_a_fake_kernel_is_noticed():
    with torch.library._scoped_library("espalier_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: 2 * x, "CPU")
        assert not has_fake_kernel("espalier_test::twice")
        library.impl("twice", torch.empty_like, "Meta")
        assert has_fake_kernel("espalier_test::twice")


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_opcheck(name):
    """Schema, autograd registration, fake kernels, and AOTAutograd with dynamic shapes, which compares results and
    gradients."""
    op = getattr(torch.ops.espalier, name).default
    for sample in samples_of(name):
        torch.library.opcheck(op, sample)


def test_opcheck_notices_a_wrong_fake_kernel():
    @torch.library.custom_op("espalier_test::half", mutates_args=())
    def half(x: torch.Tensor) -> torch.Tensor:
        return x[: len(x) // 2].clone()

    half.register_fake(torch.empty_like)
    with pytest.raises(torch.testing._internal.optests.OpCheckError):
        torch.library.opcheck(half._opoverload, (torch.randn(4),))


HOST_ARGUMENTS = {"prev", "ends", "context_blocks", "context_positions"}


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_fake_results_are_on_the_device_of_the_tensors(name):
    """Without a GPU: fake tensors need none. Arguments that the host reads stay on the CPU."""
    op = getattr(torch.ops.espalier, name).default
    for sample in samples_of(name):
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            def on_gpu(value, argument):
                if isinstance(value, list):
                    return [on_gpu(each, argument) for each in value]
                if not isinstance(value, torch.Tensor):
                    return value
                place = "cpu" if argument in HOST_ARGUMENTS else "cuda"
                return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=place)

            arguments = [on_gpu(value, argument.name) for value, argument in zip(sample, op._schema.arguments)]
            for result in torch.utils._pytree.tree_leaves(op(*arguments)):
                assert result is None or result.device.type == "cuda"


class Layer(torch.nn.Module):
    """Every operator of espalier.ops, one after another."""

    def __init__(self, n, vocabulary=13):
        super().__init__()
        for name, shape in {"conv": (H * D, 3), "gate_up": (3, 8, H * D), "down": (3, H * D, 4), "router": (H * D, 3),
                            "head": (vocabulary, H * D)}.items():  # fmt: skip
            setattr(self, name, torch.nn.Parameter(n(*shape, grad=False)))

    def forward(self, x, prev, subtree_end, edge_row, edge_target):
        heads = x.view(-1, H, D)
        x = x + ops.tree_attention(heads, heads[:, :K], heads[:, K:], subtree_end).flatten(1)
        x = x + ops.causal_conv1d(x, self.conv, None, prev, silu=True)
        heads = x.view(-1, H, D)
        decay, gate = -heads[..., 0].abs(), heads[..., 1].sigmoid()
        x = x + ops.gated_delta_rule(heads, heads, heads, decay, gate, prev)[0].flatten(1)
        x = x + ops.ssm_scan(heads, gate, decay.mean(0), heads, heads, prev)[0].flatten(1)
        weights, experts = ops.moe_route(x @ self.router, 2, normalise=True)
        x = x + ops.moe(x, weights, experts, self.gate_up, self.down)
        x = torch.nn.functional.rms_norm(x, x.shape[-1:])
        logprobs = ops.edge_logprobs(x, self.head, edge_row, edge_target)
        cool, entropy = ops.edge_logprobs(x, self.head, edge_row, edge_target, temperature=0.5, softcap=4.0,
                                          entropy=True)  # fmt: skip
        return logprobs, cool, entropy


def tree_inputs(n, copies):
    """That many copies of the tree."""
    each = range(copies)
    prev = [(before + T * c if before >= 0 else -1) for c in each for before in PREV]
    ends = [end + T * c for c in each for end in SUBTREE_END]
    children = [token for token, before in enumerate(prev) if before >= 0]
    edges = sorted((prev[token], token % 13) for token in children)
    return (n(T * copies, H * D), ints(prev, torch.int32), ints(ends, torch.int32), ints([row for row, _ in edges]),
            ints([target for _, target in edges]))  # fmt: skip


def loss_and_gradients(function, parameters, inputs):
    results = function(*inputs)
    loss = sum((each * each.detach().cos()).sum() for each in results)
    return [loss.detach(), *torch.autograd.grad(loss, [inputs[0], *parameters])]


def test_compile_makes_one_graph_for_all_sizes():
    torch._dynamo.reset()
    n = Random(1)
    layer = Layer(n)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled, compiled_for = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True), []
    for copies in (3, 4, 6):  # no size of the layer is one of theirs, which would be taken for the same
        inputs = tree_inputs(n, copies)
        ours = loss_and_gradients(compiled, layer.parameters(), inputs)
        for got, expected in zip(ours, loss_and_gradients(layer, layer.parameters(), inputs)):
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        compiled_for.append(counter.frame_count)
    assert compiled_for == compiled_for[:1] * 3


def test_export_takes_other_sizes():
    n = Random(2)
    layer = Layer(n)
    tokens, edges = torch.export.Dim("tokens", min=2), torch.export.Dim("edges", min=2)
    exported = torch.export.export(layer, tree_inputs(n, 3), dynamic_shapes=({0: tokens},) * 3 + ({0: edges},) * 2)
    names = {str(node.target) for node in exported.graph.nodes if str(node.target).startswith("espalier.")}
    assert {"espalier.tree_attention.default", "espalier.moe.default", "espalier.edge_distribution.default"} <= names
    inputs = tree_inputs(n, 4)
    for got, expected in zip(exported.module()(*inputs), layer(*inputs)):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_tree_attention_is_dense_attention_with_the_mask_of_the_tree():
    n = Random(3)
    q, k, v = n(T, H, D), n(T, K, D), n(T, K, 2)
    end, token = ints(SUBTREE_END), torch.arange(T)
    sees = (token[:, None] >= token) & (token[:, None] < end)
    dense = torch.nn.functional.scaled_dot_product_attention(
        *(each.transpose(0, 1) for each in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))), attn_mask=sees)
    ours = ops.tree_attention(q, k, v, end.int())
    torch.testing.assert_close(ours, dense.transpose(0, 1), rtol=1e-12, atol=1e-12)
    wrong = ops.tree_attention(q, k, v, torch.full((T,), T, dtype=torch.int32))
    assert (wrong - dense.transpose(0, 1)).abs().max() > 1e-3


def plain_distribution(hidden, weight, row, target, *, bias=0.0, temperature=1.0, logit_scale=1.0, softcap=None):
    logits = logit_scale * (hidden @ weight.T + bias)[row]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logprobs = (logits / torch.as_tensor(temperature, dtype=logits.dtype).reshape(-1, 1)).log_softmax(-1)
    return logprobs.gather(1, target[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def head_problem(seed):
    n = Random(seed)
    return n, (n(9, 6), n(31, 6), ints([0, 0, 1, 3, 3, 3, 7, 8]), ints([4, 30, 0, 1, 1, 17, 2, 29]))


OPTIONS = {"temperature": 0.6, "logit_scale": 0.25, "softcap": 1.5, "bias": "vocabulary", "temperatures": "edges"}


ALL_OF_THEM = ["bias", "temperatures", "logit_scale", "softcap"]


@pytest.mark.parametrize("names", [[name] for name in OPTIONS] + [ALL_OF_THEM], ids=str)
def test_logprobs_and_entropies_are_those_of_plain_pytorch(names):
    n, problem = head_problem(4)
    options = {name: OPTIONS[name] for name in names}
    leaves = list(problem[:2])
    if "bias" in options:
        options["bias"] = n(31)
        leaves.append(options["bias"])
    if options.pop("temperatures", None):
        options["temperature"] = n(8, grad=False).exp()
    ours = ops.edge_logprobs(*problem, **options, entropy=True)
    plain = plain_distribution(*problem, **options)
    assert torch.equal(ops.edge_logprobs(*problem, **options), ours[0])
    upstream = [n(8, grad=False), n(8, grad=False)]
    results = [(*pair, *torch.autograd.grad(pair, leaves, upstream)) for pair in (ours, plain)]
    for got, expected in zip(*results):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)
    without = plain_distribution(*problem)  # the negative control: the options matter
    assert (ours[0] - without[0]).abs().max() > 1e-3


def test_without_options_edge_logprobs_are_the_plain_operator_bit_for_bit():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        _, (hidden, weight, *edges) = head_problem(5)
        hidden, weight = hidden.detach().to(dtype), weight.detach().to(dtype)
        plain = torch.ops.espalier.edge_logprobs(hidden, weight, *edges)[0]
        assert torch.equal(ops.edge_logprobs(hidden, weight, *edges), plain)


def test_gradients_of_the_operators_by_differences():
    n, (hidden, weight, row, target) = head_problem(6)
    temperature = n(8, grad=False).exp()
    assert torch.autograd.gradcheck(
        lambda *leaves: ops.edge_logprobs(*leaves[:2], row, target, bias=leaves[2], temperature=temperature,
                                          softcap=2.0, logit_scale=0.5, entropy=True),
        (hidden, weight, n(31)))  # fmt: skip
    for sample in samples_of("moe"):
        assert torch.autograd.gradcheck(torch.ops.espalier.moe, sample)
    prev, ends = ints([-2] + PREV[1:], torch.int32), ints([0, 3, 3, 6])
    assert torch.autograd.gradcheck(lambda x, tails: ops.causal_conv1d_tails(x, prev, ends, 3, tails=tails),
                                    (n(T, 5), n(1, 2, 5)))  # fmt: skip


def test_what_does_not_fit_is_refused():
    _, (hidden, weight, row, target) = head_problem(7)
    with pytest.raises(RuntimeError, match="bias"):
        ops.edge_logprobs(hidden, weight, row, target, bias=torch.zeros(30, dtype=torch.float64))
    learned = torch.ones(8, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="needs no gradient"):
        ops.edge_logprobs(hidden, weight, row, target, temperature=learned)
    with pytest.raises(RuntimeError, match="above 0"):
        ops.edge_logprobs(hidden, weight, row, target, temperature=0.0)
    with pytest.raises(RuntimeError, match="softcap"):
        ops.edge_logprobs(hidden, weight, row, target, softcap=-1.0)
    with pytest.raises(RuntimeError, match="ascending"):
        ops.edge_logprobs(hidden, weight, row.flip(0), target, entropy=True)



def test_a_missing_library_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("ESPALIER_OPS", str(tmp_path / "gone.so"))
    with pytest.raises(ImportError, match=r"gone\.so, found none; run pip install"):
        ops._library()
    (tmp_path / "gone.so").touch()
    assert ops._library() == tmp_path / "gone.so"


def test_a_library_for_another_pytorch_is_refused_before_it_is_loaded(monkeypatch, tmp_path):
    monkeypatch.delenv("ESPALIER_OPS", raising=False)
    ops._check_built_against(ops._library(), torch.__version__)
    with pytest.raises(ImportError, match="built against PyTorch 1.13, received"):
        ops._check_built_against(ops._library(), "1.13.0+cpu")
    stranger = tmp_path / "stranger.so"
    header = ops._library().read_bytes()[:64]
    for content in (b"", b"\x7fELF and nothing of ours", header, header + bytes(1000), ops._library().read_bytes()[:-1]):
        stranger.write_bytes(content)
        with pytest.raises(ImportError, match="which is none, or one of an older Espalier"):
            ops._check_built_against(stranger, torch.__version__)
    with pytest.raises(ImportError, match="which is none"):
        ops._check_built_against(Path(torch._C.__file__), torch.__version__)  # a library without such a section


def test_a_library_with_other_schemas_is_refused_before_it_is_loaded(monkeypatch, tmp_path):
    monkeypatch.delenv("ESPALIER_OPS", raising=False)
    other = tmp_path / "other.so"
    data = ops._library().read_bytes()
    assert data.count(SCHEMAS_TEXT) == 1
    other.write_bytes(data.replace(SCHEMAS_TEXT, b"ESPALIER_OPS_SCHEMAS=0;"))
    with pytest.raises(ImportError, match="schemas in version 4, received .*other.so, with version 0; build Espalier again"):
        ops._check_built_against(other, torch.__version__)
    code = "import espalier.ops"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env={**os.environ, "ESPALIER_OPS": str(other), "PYTHONPATH": str(REPOSITORY / "python")})  # fmt: skip
    assert done.returncode == 1 and "with version 0" in done.stderr


def test_few_bytes_of_the_library_are_read(monkeypatch):
    sizes = []

    class Counted(io.FileIO):
        def read(self, size=-1):
            sizes.append(size)
            return super().read(size)

    monkeypatch.setattr(ops, "open", Counted, raising=False)
    ops._check_built_against(ops._library(), torch.__version__)
    assert sizes and min(sizes) >= 0 and sum(sizes) < 100_000 < ops._library().stat().st_size


def test_the_version_of_the_schemas():
    """It is the same on both sides. Where the schemas differ from those of this digest, both have to grow by one, and the
    digest is another one."""
    source = (REPOSITORY / "src/espalier/ops/register.cpp").read_text(encoding="utf-8")
    assert SCHEMAS_TEXT.decode() in source and ops._SCHEMAS == 4
    texts = lambda code: "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', code))
    schemas = sorted(map(texts, re.findall(r"m\.def\((.*?)\);", source, re.DOTALL)))
    assert len(schemas) == 26 and hashlib.sha256("\n".join(schemas).encode()).hexdigest()[:16] == "69f749b07574c0fb"
