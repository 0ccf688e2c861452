# SPDX-License-Identifier: Apache-2.0
"""Kernels that prove themselves: those of libraries by stand-ins on the CPU. test_operator_checks.py has our own."""

import json
import shutil
import threading
import types
import warnings
from concurrent import futures

import pytest
import torch

import cudnn_stand_in
import recurrence_stand_ins
from espalier import ops
from espalier.errors import Unsupported
from espalier.hf import attention
from espalier.kernels import __main__ as told
from espalier.kernels import attention as library_attention
from espalier.kernels import attention_cases, checks, gated_delta, libraries, recurrence_cases, recurrences, verdicts, waves
from espalier.kernels.cases import OUT
from espalier.kernels.verdicts import Finding


def in_sums(*tensors):
    return [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]


class GatedDelta(recurrence_stand_ins.GatedDelta):
    """The stand-in as a kernel that multiplies and adds in float32."""

    def chunk_gated_delta_rule(self, q, k, v, g, beta, *, initial_state=None, **options):
        out, final = super().chunk_gated_delta_rule(*in_sums(q, k, v), g, beta, initial_state=initial_state, **options)
        return out.to(q.dtype), final


class Mamba(recurrence_stand_ins.Mamba):
    def mamba_chunk_scan_combined(self, x, dt, A, B, C, chunk_size, **options):
        found = super().mamba_chunk_scan_combined(*in_sums(x), dt, A, *in_sums(B, C), chunk_size, **options)
        return (found[0].to(x.dtype), found[1]) if options["return_final_states"] else found.to(x.dtype)


class Convolution(recurrence_stand_ins.Convolution):
    def causal_conv1d_fn(self, x, weight, bias, **options):
        return super().causal_conv1d_fn(*in_sums(x, weight, bias), **options).to(x.dtype)


IN_FLOAT32 = {"gated_delta_rule": GatedDelta, "ssm_scan": Mamba, "causal_conv1d": Convolution}


class AttentionInFloat32(cudnn_stand_in.StandIn):
    def _dense(self, query, key, value, plan, scale):
        out, lse = super()._dense(query.float(), key.float(), value.float(), plan, scale)
        return out.to(query.dtype), lse

    def backward(self, *tensors, **options):
        found = super().backward(*(tensor.float() for tensor in tensors), **options)
        return tuple(gradient.to(tensors[0].dtype) for gradient in found)


SMALL = {"star", "context"}


@pytest.fixture
def small(monkeypatch):
    """Fewer and smaller forests: of 128 rows the plain form takes long on a CPU."""
    every = recurrence_cases.forests()
    monkeypatch.setattr(recurrence_cases, "forests", lambda: {name: every[name][:100] for name in SMALL})
    monkeypatch.setattr(recurrence_cases, "SIZES", dict.fromkeys(recurrence_cases.SIZES, ((16, 0.1), (16, 8.0))))


@pytest.mark.parametrize("operator", IN_FLOAT32)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_operators_that_are_right(operator, dtype, monkeypatch, small):
    with recurrence_stand_ins.installed(monkeypatch, IN_FLOAT32[operator]()) as stand_in:
        finding = checks.judged(recurrence_cases.cases(operator, dtype, "cpu"))
    assert finding.is_right and finding.checks > 15 and stand_in.calls > 10, finding


SPOILED = [("gated_delta_rule", lambda states: states.roll(1, 0)), ("gated_delta_rule", lambda states: states * 1.05),
           ("ssm_scan", lambda states: states.roll(1, 0)), ("ssm_scan", lambda states: states * 1.05),
           ("causal_conv1d", torch.zeros_like)]  # fmt: skip


@pytest.mark.parametrize("operator, change", SPOILED)
def test_operators_that_are_wrong(operator, change, monkeypatch, small):
    wrong = IN_FLOAT32[operator]()
    wrong.change = change
    with recurrence_stand_ins.installed(monkeypatch, wrong):
        finding = checks.judged(recurrence_cases.cases(operator, torch.bfloat16, "cpu"))
    assert not finding.is_right and "times the plain form's" in finding.fault


def test_products_in_less_than_float32_are_noticed(monkeypatch, small):
    class Tf32(GatedDelta):
        def chunk_gated_delta_rule(self, q, k, v, *others, **options):
            q, k, v = (each + each.detach() * 2**-11 for each in (q, k, v))
            return super().chunk_gated_delta_rule(q, k, v, *others, **options)

    class MambaInTf32(Mamba):
        def mamba_chunk_scan_combined(self, x, dt, A, B, *others, **options):
            return super().mamba_chunk_scan_combined(x + x.detach() * 2**-11, dt, A, B, *others, **options)

    for operator, wrong in (("gated_delta_rule", Tf32), ("ssm_scan", MambaInTf32)):
        with recurrence_stand_ins.installed(monkeypatch, wrong()):
            assert not checks.judged(recurrence_cases.cases(operator, torch.float32, "cpu")).is_right


def test_what_recurrences_take_is_timed(monkeypatch):
    """By counts of what both forms go through, from seconds that follow known rates."""
    rates = recurrences.Rates(3e-4, 2e-7, 1e-4, 5e-7)
    none = torch.empty(0, dtype=torch.int64)
    for operator, (kind, _) in recurrence_cases.TIMED.items():

        def seconds(form, _operator, inputs, prev, _device, kind=kind):
            counts = kind(**inputs, prev=prev, states=None, ends=none).counts(recurrence_cases.Waves(prev, none, none.device))
            return (counts.calls * rates.wave + counts.call_tokens * rates.wave_token if form == "library"
                    else counts.levels * rates.level + counts.level_tokens * rates.level_token)  # fmt: skip

        monkeypatch.setattr(recurrence_cases, "_seconds", seconds)
        assert recurrence_cases.measured(operator, torch.float32, "cpu") == pytest.approx(rates)


def test_attention_that_is_right_and_wrong(monkeypatch):
    every = attention_cases.forests()
    chosen = ("one token", "star", "several trees", "context of a tree")
    monkeypatch.setattr(attention_cases, "forests", lambda: {name: every[name] for name in chosen})
    with cudnn_stand_in.installed(monkeypatch, AttentionInFloat32()) as stand_in:
        finding = checks.judged(attention_cases.cases(64, torch.bfloat16, "cpu"))
        assert finding.is_right and finding.checks == 2 * (4 * len(chosen) + 2), finding
        assert stand_in.calls["backward"] == 4 * len(chosen)
        waves._kept.clear()
        stand_in.change = lambda bounds: torch.cat([torch.zeros_like(bounds[:1]), bounds[1:]])
        assert not checks.judged(attention_cases.cases(64, torch.bfloat16, "cpu")).is_right


def test_forests_that_a_library_leaves_to_others(monkeypatch):
    """On a GPU the name of a library refuses what it does not serve; other forests are judged, and one of them has to be."""
    every, tree_attention = attention_cases.forests(), ops.tree_attention
    monkeypatch.setattr(attention_cases, "forests", lambda: {name: every[name] for name in ("star", "deep", "context of a tree")})

    def refusing(q, *others, **options):
        if len(q) == len(every["deep"].subtree_end):
            raise RuntimeError("ESPALIER_ATTENTION: library attention does not serve BFloat16 with a head dimension of 64, and this forest")
        return tree_attention(q, *others, **options)

    monkeypatch.setattr(ops, "tree_attention", refusing)
    with cudnn_stand_in.installed(monkeypatch, AttentionInFloat32()):
        names = [case.name for case in attention_cases.cases(64, torch.bfloat16, "cpu")]
    assert names[::2] == ["star", "context of a tree"] and names[1] == "star with deterministic algorithms"


def test_each_size_of_heads_is_judged_by_itself(monkeypatch):
    """One that is wrong is named, with its dtype and result, and is not outweighed by others."""
    every = attention_cases.forests()
    monkeypatch.setattr(attention_cases, "forests", lambda: {"star": every["star"]})
    monkeypatch.setitem(attention_cases.SERVED, "library", ((torch.bfloat16, torch.float16), (64, 96)))

    class Wrong(AttentionInFloat32):
        def backward(self, query, *others, **options):
            found = super().backward(query, *others, **options)
            return found if query.shape[-1] == 64 else (found[0] * 1.02, *found[1:])

    with cudnn_stand_in.installed(monkeypatch, Wrong()):
        finding = checks.check("library", "cpu")
    assert finding.checks == 16 and finding.fault.startswith("bfloat16, head dimension 96: gradient of q: expected an error"), finding


def test_gradients_have_the_same_bits_where_that_is_promised(monkeypatch):
    """Under deterministic algorithms; the forward pass always."""
    every = attention_cases.forests()
    monkeypatch.setattr(attention_cases, "forests", lambda: {"one token": every["one token"]})
    by_operator, runs = attention_cases._by_operator, []

    def jittering(place, *, always):
        def computed(*inputs):
            found = by_operator(*inputs)
            runs.append(None)
            if always or not torch.are_deterministic_algorithms_enabled():
                found[place].view(-1)[0] += 1e-7 * (len(runs) % 2)
            return found

        return computed

    cases = lambda: attention_cases.cases(8, torch.float32, "cpu")
    monkeypatch.setattr(attention_cases, "_by_operator", jittering(3, always=False))
    assert "other bits" not in checks.judged(cases()).fault
    monkeypatch.setattr(attention_cases, "_by_operator", jittering(3, always=True))
    assert checks.judged(cases()).fault == "gradient of v: other bits in another run, on one token with deterministic algorithms"
    monkeypatch.setattr(attention_cases, "_by_operator", jittering(0, always=False))
    assert checks.judged(cases()).fault == f"{OUT}: other bits in another run, on one token"
    assert not torch.are_deterministic_algorithms_enabled()


def test_forests_are_in_preorder_and_their_context_fits():
    forests = attention_cases.forests()
    assert len(forests) >= 12 and 2000 < sum(len(forest.subtree_end) for forest in forests.values())
    for name, forest in forests.items():
        ends, tokens = forest.subtree_end, len(forest.subtree_end)
        assert tokens <= 2000 and all(token < end <= tokens for token, end in enumerate(ends)), name
        assert all(ends[inner] <= end for token, end in enumerate(ends) for inner in range(token, end)), name
        for segment, begin, end, first, last in forest.blocks:
            assert 0 <= begin < end <= forest.segments[segment] and 0 <= first < last <= tokens, name


def test_the_plain_forms_are_right():
    """In float64 they are what the operators compute."""
    for operator in recurrence_cases.PROBLEMS:
        for name, prev in recurrence_cases.forests().items():
            case = recurrence_cases.case(operator, name, prev, (8, 0.1), 0, torch.float64, "cpu")
            ours, plain = case.ours(), case.plain()
            assert ours.keys() == plain.keys() and all((ours[key] - plain[key]).norm() <= 1e-12 * plain[key].norm() for key in ours), name
    for name, forest in attention_cases.forests().items():
        case, _ = attention_cases._cases(name, forest, 8, 0, torch.float64, "cpu")
        exact = case.exact()
        largest = max(values.norm() for values in exact.values())  # a single token has gradients of 0, which rounding may miss
        assert all((ours - values).norm() <= 1e-12 * largest for ours, values in zip(case.ours().values(), exact.values())), name


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU of which only the name exists, and checks that end as `ends` says."""
    ends = {"started": 0, "found": Finding(5, "", (1.0, 2.0, 3.0, 4.0)), "by_family": {}, "status": 0}

    def ended(command, _limit):
        ends["started"] += 1
        with open(command[-1], "w") as file:
            json.dump(ends["by_family"].get(command[-3], ends["found"])._asdict(), file)
        return ends["status"], "last line"

    properties = types.SimpleNamespace(name="a GPU", major=9, minor=0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(verdicts, "_ended", ended)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _index: properties.name)
    verdicts.forget()
    caches = library_attention.is_served, libraries.is_attention_right
    for function in caches:
        function.cache_clear()
    yield ends
    verdicts.forget()
    torch.ops.espalier_judge.take_kernels(["library", "ampere"], True)
    for function in caches:
        function.cache_clear()


def test_verdicts_are_kept(gpu, monkeypatch):
    finding = verdicts.verdict_on("gated_delta_rule bfloat16", 0)
    verdicts.forget()
    assert verdicts.verdict_on("gated_delta_rule bfloat16", 0) == finding == Finding(5, "", (1.0, 2.0, 3.0, 4.0))
    assert gpu["started"] == 1 and finding.is_right
    verdicts.forget()
    monkeypatch.setattr(torch, "__version__", "other")
    verdicts.verdict_on("gated_delta_rule bfloat16", 0)
    assert gpu["started"] == 2


def test_processes_wait_for_the_verdict_of_one(gpu, monkeypatch):
    """Two at once, of which the one that checks waits until the other has found nothing that is kept."""
    reads, read, ended = [], verdicts._read, verdicts._ended
    other_has_read = threading.Event()

    def counted(*arguments):
        found = read(*arguments)
        reads.append(found)
        if len(reads) > 2:
            other_has_read.set()
        return found

    def slow(*arguments):
        assert other_has_read.wait(60)
        return ended(*arguments)

    monkeypatch.setattr(verdicts, "_read", counted)
    monkeypatch.setattr(verdicts, "_ended", slow)
    with futures.ThreadPoolExecutor(2) as pool:
        found = list(pool.map(verdicts._kept_or_new, [["library"]] * 2, [0] * 2, [False] * 2))
    assert found[0] == found[1] and gpu["started"] == 1


def test_what_follows_from_verdicts(gpu):
    query = types.SimpleNamespace(device=types.SimpleNamespace(type="cuda", index=0), dtype=torch.bfloat16)
    assert recurrences._rates(gated_delta.LIBRARY, query) == recurrences.Rates(1.0, 2.0, 3.0, 4.0)
    verdicts.forget()
    gpu["found"] = Finding(5, "result 1: wrong")
    (file,) = verdicts.folder().glob("*.json")
    file.write_text("{ broken")
    with pytest.warns(UserWarning, match="kernels of `gated_delta_rule bfloat16` are not used on a GPU: result 1: wrong"):
        assert recurrences._rates(gated_delta.LIBRARY, query) is None


RIGHT, WRONG, UNSERVED = Finding(9), Finding(9, "wrong"), Finding()


@pytest.mark.parametrize("library, own, is_right", [
    (RIGHT, RIGHT, True), (RIGHT, UNSERVED, True), (WRONG, RIGHT, True), (RIGHT, WRONG, True), (UNSERVED, UNSERVED, False),
    (WRONG, UNSERVED, False), (UNSERVED, WRONG, False),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:espalier")
def test_attention_of_patched_models(library, own, is_right, gpu, installed, monkeypatch):
    """It is taken where some of it is right, and operators take nothing that is wrong."""
    monkeypatch.delenv("ESPALIER_ATTENTION", raising=False)
    head = {"head": WRONG} if library == WRONG else {}
    gpu["by_family"] = {"library": library, "ampere": own, **head}
    asked = []
    monkeypatch.setattr(libraries, "torch", types.SimpleNamespace(ops=types.SimpleNamespace(
        espalier_judge=types.SimpleNamespace(take_kernels=lambda *words: asked.append(words)))))  # fmt: skip
    assert libraries.is_attention_right(0) == is_right
    right = [family for family, finding in (("library", library), ("ampere", own)) if finding == RIGHT]
    assert asked == [([*right, "masked"], not head)] and gpu["started"] == len(verdicts.OWN)
    assert attention.resolved("espalier", torch.device("cuda", 0)) == "espalier" and gpu["started"] == len(verdicts.OWN)
    for named, expected in (("masked", False), ("ampere", True)):
        monkeypatch.setenv("ESPALIER_ATTENTION", named)
        libraries.is_attention_right.cache_clear()
        assert libraries.is_attention_right(0) == expected


@pytest.fixture
def installed(gpu, monkeypatch):
    """What is installed, by name, on the GPU of the fixture above."""
    there = {"attention": "cudnn-frontend 1.32.0", "flash-linear-attention": "0.6.0", "mamba-ssm": "2.3.1", "causal-conv1d": "1.7.0"}
    monkeypatch.setattr(library_attention, "installed", lambda: there["attention"])
    monkeypatch.setattr(verdicts, "version_of", lambda package: there.get(package, ""))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _index: (9, 0))
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda *_: True)
    for function in (attention._check_library, attention._tell_what_is_missing):
        function.cache_clear()
    return there


CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("backend, family", [("cudnn", "library"), ("fla", "gated_delta_rule bfloat16"), ("mamba_ssm", "ssm_scan bfloat16")])
def test_backends_of_libraries(backend, family, gpu, installed):
    assert attention.resolved(backend, CUDA) == attention.resolved("auto", CUDA) == "espalier"
    attention._check_library.cache_clear()
    verdicts.forget()
    shutil.rmtree(verdicts.folder())
    gpu["by_family"] = {family: WRONG}
    with pytest.warns(UserWarning, match="are not used on"), pytest.raises(Unsupported, match=f'backend="{backend}": expected'):
        attention.resolved(backend, CUDA)
    attention._check_library.cache_clear()
    installed.update(dict.fromkeys(installed, ""))
    with pytest.raises(Unsupported, match="received cuda:0 without"):
        attention.resolved(backend, CUDA)


def test_a_library_beside_kernels_that_are_wrong(gpu, installed):
    """The library of attention is taken alone; without it, FlexAttention."""
    gpu["by_family"] = {"ampere": WRONG}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert attention.resolved("auto", CUDA) == attention.resolved("cudnn", CUDA) == "espalier"
        installed.update(attention="")
        libraries.is_attention_right.cache_clear()
        assert attention.resolved("auto", CUDA) == attention.resolved("fla", CUDA) == "flex"


def test_what_is_missing_is_told_once(gpu, installed):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention.resolved("auto", CUDA)
        attention._tell_what_is_missing.cache_clear()
        installed.update({"flash-linear-attention": ""})
    with pytest.warns(UserWarning, match=r"install 'espalier-train\[cuda\]' adds flash-linear-attention for gated delta rules, which"):
        attention.resolved("auto", CUDA)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention.resolved("auto", CUDA)


def test_lines_for_people(gpu, installed):
    gpu["by_family"] = {"ampere": UNSERVED, verdicts.TIMES: UNSERVED, "gated_delta_rule bfloat16": Finding(5, "", (1e-4, 2e-7, 3e-5, 9e-7)),
                        "gated_delta_rule float32": Finding(5, "in TF32"), "causal_conv1d bfloat16": Finding(5),
                        "causal_conv1d float32": Finding(5)}  # fmt: skip
    installed.update({"mamba-ssm": "2.2.0"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lines = told.lines_of(0)
    assert lines == [
        "cuda:0  a GPU",
        "  attention    cudnn-frontend 1.32.0 (library: passed; ampere: not for this device)",
        "  gated_delta_rule bfloat16  flash-linear-attention 0.6.0 where it is cheaper: 100 us a call and 0.2 us a token, composed 30 us "
        "a level of chunks and 0.9 us a token",
        "  gated_delta_rule float32   composed (FAILED: in TF32)",
        "  ssm_scan bfloat16          composed (pip install --no-build-isolation mamba-ssm adds mamba-ssm)",
        "  causal_conv1d bfloat16     causal-conv1d 1.7.0 (passed)",
        "  causal_conv1d float32      causal-conv1d 1.7.0 (passed)",
    ]  # fmt: skip
    gpu["by_family"] = {verdicts.TIMES: Finding(2, "", (0.004, 0.003))}
    shutil.rmtree(verdicts.folder())
    verdicts.forget()
    assert told.lines_of(0)[1] == "  attention    ampere (library: passed; ampere: passed; timed: 4 and 3 ms)"
    gpu["by_family"] |= {"ampere": WRONG, "library": WRONG}
    shutil.rmtree(verdicts.folder())
    verdicts.forget()
    libraries.is_attention_right.cache_clear()
    with pytest.warns(UserWarning, match="`ampere` are not used"):
        assert told.lines_of(0)[1] == "  attention    FlexAttention (library: FAILED: wrong; ampere: FAILED: wrong; timed: 4 and 3 ms)"
    installed.update(dict.fromkeys(installed, ""))
    composed = {"gated_delta_rule": ("bfloat16", "float32"), "ssm_scan": ("bfloat16",), "causal_conv1d": ("bfloat16", "float32")}
    expected = [f"  {operator} {dtype}" for operator, dtypes in composed.items() for dtype in dtypes]
    assert told.lines_of(0)[2:7] == [f"{name:28} composed ({library.command} adds {library.package})" for name, library in
                                     zip(expected, [libraries.OPERATORS[number] for number in (0, 0, 1, 2, 2)])]  # fmt: skip
    assert told.lines_of(0)[7:] == [
        "  pip install 'espalier-train[cuda]' adds cudnn.flex_attention for attention and flash-linear-attention for gated delta rules",
    ]  # fmt: skip


@pytest.mark.parametrize("times, fault, is_faster", [([0.3, 0.2], "", True), ([0.3, 0.2], "wrong", False), ([0.2, 0.3], "", False),
                                                     (None, "", False)])  # fmt: skip
@pytest.mark.filterwarnings("ignore:espalier")
def test_ours_is_taken_where_it_is_faster(times, fault, is_faster, gpu, monkeypatch):
    gpu["by_family"] = {verdicts.TIMES: Finding(0 if times is None else 2, "", times), "ampere": Finding(9, fault)}
    assert library_attention._is_left_to_ours(CUDA) == is_faster
    assert not library_attention._is_left_to_ours(torch.device("cpu"))
    monkeypatch.setenv("ESPALIER_ATTENTION", "library")
    assert not library_attention._is_left_to_ours(CUDA)
    monkeypatch.delenv("ESPALIER_ATTENTION")


OTHERS = {"a window": {"sliding_window": 2, "position": torch.arange(3, dtype=torch.int32)}, "sinks": {"sinks": torch.zeros(1).double()},
          "a size of heads": {"dim": 96}}  # fmt: skip


@pytest.mark.parametrize("name", ["nothing", *OTHERS])
def test_what_ours_does_not_serve_stays_with_the_library(name, monkeypatch):
    """However fast ours is elsewhere. A backward pass, which does not know of sinks, may go elsewhere than its forward pass."""
    options = OTHERS.get(name, {}).copy()
    dim = options.pop("dim", 64)
    q = torch.randn(3, 1, dim, dtype=torch.float64, requires_grad=True)
    ends, is_declined = torch.tensor([3, 2, 3], dtype=torch.int32), name == "nothing"

    def results():
        out = ops.tree_attention(q, q, q, ends, **options)
        return out.detach(), torch.autograd.grad(out.sin().sum(), q)[0]

    expected = results()
    with cudnn_stand_in.installed(monkeypatch) as stand_in:
        monkeypatch.setattr(library_attention, "_is_left_to_ours", lambda _device: True)
        found = results()
    assert stand_in.calls == {"forward": int(not is_declined), "backward": int(not is_declined and name != "sinks")}
    for ours, right in zip(found, expected):
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)


def test_what_both_take_is_timed(monkeypatch):
    assert [len(attention_cases._grown(attention_cases._binary(tokens, 5))) for tokens in (1, 64, 16384)] == [1, 64, 16384]
    with cudnn_stand_in.installed(monkeypatch, AttentionInFloat32()):
        found = attention_cases.measured("cpu", 64)  # where every name but library means the CPU's own
        monkeypatch.setattr(attention_cases, "measured", lambda _device: found)
        assert checks.check(verdicts.TIMES, "cpu") == Finding(2, "", found) and min(found) > 0
        monkeypatch.setattr(attention_cases, "measured", lambda _device: None)
        assert checks.check(verdicts.TIMES, "cpu") == Finding()


def test_what_the_environment_names(monkeypatch):
    monkeypatch.setenv(recurrences.VARIABLE, "other")
    with pytest.raises(ValueError, match="expected library or composed, received other"):
        recurrences._rates(gated_delta.LIBRARY, torch.empty(0))
