# SPDX-License-Identifier: Apache-2.0
"""Checks of the LM head, distributions and products pass those of the CPU, and find each way in which kernels can be wrong."""

import re

import pytest
import torch

from espalier import InputError
from espalier.kernels import __main__ as command
from espalier.kernels import checks, operator_cases, report, verdicts
from espalier.kernels.cases import error_of_sum, error_of_tensor_core_sum
from espalier.kernels.verdicts import Finding


def changed(cases, kind, change):
    """The cases of a kind, with other results: `change` of a case's results changes them in place."""

    def ours(case):
        results = case.ours()
        change(results)
        return results

    return [case._replace(ours=lambda case=case: ours(case)) for case in cases if case.kind == kind]


def head(dtype, change, kind="edge_logprobs"):
    return checks.judged(changed(operator_cases.head_cases(dtype, "cpu"), kind, change)).fault


def products(dtype, kind, change):
    """As on a GPU, where products in bfloat16 are not rounded before they are added."""
    return changed(operator_cases.product_cases(dtype, "cpu", is_rounded=False), kind, change)


@pytest.mark.parametrize("family", ["cpu", "head", "distribution", "products"])
def test_the_cpus_own_pass(family, capsys):
    finding = checks.check(family, "cpu")
    assert finding.is_right and finding.checks >= 81, finding
    if family == "products":
        assert command.main(["--check", family, "--device", "cpu"]) == 0
        assert capsys.readouterr().out == f"products: passed {finding.checks} checks\n"


def test_families_by_name(capsys, monkeypatch):
    assert checks.families("cuda:0") == list(verdicts.OWN) and checks.families("cpu") == ["cpu", "head", "distribution", "products"]
    with pytest.raises(InputError, match=r"^expected a family of kernels of cpu: cpu, head, distribution, products; received ampere$"):
        checks.check("ampere", "cpu")
    assert command.main(["--check", "ampere", "--device", "cpu"]) == 1 and "received ampere\n" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"^device: expected cpu or one of \d+ GPUs that can be used, received cuda:100; "):
        report.checked("head", "cuda:100")
    monkeypatch.setattr(checks, "check", lambda *_: Finding(3, "out: off"))
    assert report.checked("head", "cpu") == ("head: FAILED: out: off", 1)
    monkeypatch.setattr(checks, "check", lambda *_: Finding())
    assert report.checked("head", "cpu") == ("head: not for cpu in this build", 0)


@pytest.mark.parametrize("dtype", operator_cases.DTYPES)
def test_a_row_that_is_wrong(dtype):
    def forget_last_row(results):
        if len(results["gradient of hidden"]) == 1023:
            results["gradient of hidden"][1000:] = 0

    fault = head(dtype, forget_last_row)
    assert fault.startswith("edge_logprobs: gradient of hidden: expected an error of at most") and "worst on 1023 rows, 3000 edges" in fault


def test_a_target_that_is_forgotten():
    fault = head(torch.bfloat16, lambda results: results["log-probabilities"][-2:].zero_(), "edge_logprobs by blocks")
    assert fault.startswith("edge_logprobs by blocks: log-probabilities: expected")


def test_a_small_error_in_large_logits():
    fault = head(torch.float32, lambda results: results["log-probabilities"].mul_(1 + 1e-5), "edge_logprobs of large logits")
    assert fault.startswith("edge_logprobs of large logits: log-probabilities: expected")


@pytest.mark.parametrize("title, result", [("bias", "gradient of bias"), ("softcap", "entropies"), ("temperatures of edges", "log-probabilities")])
def test_an_option_that_is_ignored(title, result):
    kind = f"edge_distribution with {title}"
    cases = operator_cases.distribution_cases(torch.float32, "cpu")
    fault = checks.judged(changed(cases, kind, lambda results: results[result].mul_(0.999))).fault
    assert fault.startswith(f"{kind}: {result}: expected")


def test_sums_in_low_precision():
    """As of a library that cuts a sum into four and joins them in bfloat16; as it is without, it passes."""
    inputs, plain = [], operator_cases._plain_products

    def in_bfloat16(results):
        total = torch.zeros_like(results["product"], dtype=torch.bfloat16)
        a, b = inputs[-1]
        for rows in torch.arange(len(a)).chunk(4):
            total = total + (a[rows].float().t() @ b[rows].float()).bfloat16()
        results["product"].copy_(total)

    def kept(a, b, bias, total):
        inputs.append((a, b))
        return operator_cases._products(a, b, bias, total)

    problem = operator_cases._Problem("long products", "all", _product_inputs(), kept, lambda **found: plain(False, **found),
                                      dict.fromkeys(operator_cases._PRODUCT_NAMES, error_of_tensor_core_sum(16384)))  # fmt: skip
    case = problem.case(torch.bfloat16, "cpu")
    fault = checks.judged(changed([case], "long products", in_bfloat16)).fault
    assert fault.startswith("long products: product: expected an error of at most 2 times")
    right = problem._replace(ours=lambda **found: plain(False, **found)).case(torch.bfloat16, "cpu")
    assert checks.judged([right]).is_right


def _product_inputs():
    numbers = operator_cases._Numbers(1, torch.bfloat16)
    return {"a": numbers.elements(16384, 64), "b": numbers.elements(16384, 64), "bias": numbers.elements(64), "total": numbers.sums(64, 64)}


@pytest.mark.parametrize("kind", ["short products", "long products"])
def test_tf32_where_float32_is_promised(kind, monkeypatch):
    ours = operator_cases._products

    def in_tf32(a, b, bias, total):  # ten bits of the fraction
        cut = lambda values: (values.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)
        return {**ours(a, b, bias, total), "product": cut(a).t() @ cut(b)}

    monkeypatch.setattr(operator_cases, "_products", in_tf32)
    fault = checks.judged(products(torch.float32, kind, lambda results: None)).fault
    assert fault.startswith(f"{kind}: product: expected an error")


def test_values_that_are_not_finite():
    def spoil(results):
        if results["gradient of weight"].shape == (2003, 200):
            results["gradient of weight"].view(-1)[7] = torch.nan

    assert head(torch.float32, spoil) == ("edge_logprobs: gradient of weight: not finite, or of another shape or dtype, on 130 rows, 260 "
                                          "edges, hidden size 200, vocabulary 2003")  # fmt: skip


def test_results_of_another_dtype():
    fault = head(torch.bfloat16, lambda results: results.update({"gradient of hidden": results["gradient of hidden"].float()}))
    assert fault.startswith("edge_logprobs: gradient of hidden: not finite, or of another shape or dtype")


def test_other_bits_in_another_run():
    runs = []

    def jitter(results):
        results["log-probabilities"].view(-1)[0] *= 1 + 1e-6 * (len(runs) % 2)
        runs.append(None)

    cases = changed(operator_cases.head_cases(torch.float32, "cpu"), "edge_logprobs", jitter)
    assert checks.judged(cases).fault == ("edge_logprobs: log-probabilities: other bits in another run, on 63 rows, 190 edges, hidden "
                                          "size 8, vocabulary 65")  # fmt: skip
    assert checks.judged([case._replace(same_bits=()) for case in cases]).is_right


def test_writes_beyond_outputs(monkeypatch):
    """tests/ops/judge_test.cpp has the guards themselves."""
    guarded = []

    def guard_outputs(begins):
        guarded.append(begins)
        return int(len(guarded) == 4)

    monkeypatch.setattr(torch.ops.espalier_judge, "guard_outputs", guard_outputs)
    assert head(torch.float32, lambda results: None) == "writes beyond its outputs, on 63 rows, 190 edges, hidden size 24, vocabulary 1023"
    assert guarded == [True, False] * 2


def test_every_result_is_judged_by_many_values():
    """The errors of a handful are a matter of luck."""
    for name, make in operator_cases.CASES.items():
        values: dict[str, int] = {}
        for case in make(torch.bfloat16, "cpu"):
            for result, right in case.plain().items():
                values[f"{case.kind} {result}"] = values.get(f"{case.kind} {result}", 0) + right.numel()
        assert values and min(values.values()) >= 256, (name, values)


def test_floors_of_sums():
    assert error_of_sum(1) == 2**-25 == error_of_tensor_core_sum(1)
    assert error_of_sum(16384) == 2**-18 and error_of_tensor_core_sum(16384) == 2**-14


@pytest.fixture
def settings(monkeypatch):
    """Those of PyTorch's products are as before in the end."""
    module, names = torch.backends.cuda.matmul, ("allow_tf32", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    before, of_cudnn = {name: getattr(module, name) for name in names}, torch.backends.cudnn.allow_tf32
    for variable in ("NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.setenv(variable, "0")
    yield module
    for name, value in before.items():
        setattr(module, name, value)
    torch.backends.cudnn.allow_tf32 = of_cudnn


def test_what_an_operator_of_a_gpu_raises_is_its_fault(monkeypatch, settings):
    """But for want of memory, which says nothing about kernels."""

    def raising(error):
        def check(*_):
            assert not settings.allow_bf16_reduced_precision_reduction
            raise error

        monkeypatch.setattr(checks, "check", check)

    raising(RuntimeError("CUDA error: an illegal memory access was encountered\nmore"))
    assert checks.finding_of("head", "cpu") == Finding(1, "CUDA error: an illegal memory access was encountered")
    for error in (torch.OutOfMemoryError("CUDA out of memory."), InputError("a name")):
        raising(error)
        with pytest.raises(type(error), match=re.escape(str(error))):
            checks.finding_of("head", "cpu")
