# SPDX-License-Identifier: Apache-2.0
"""espalier.hf.verify: models in low precision pass, and models that are wrong do not."""

import types

import pytest
import torch
from transformers.models.qwen3_moe import modeling_qwen3_moe

from espalier.errors import Unsupported
from espalier.hf import VerificationError, decisions, patch, patching, verify
from espalier.hf.families import backbone_of
from espalier.hf.patching import patch_of
from hf_models import FORMS, branching_rows, make_model, padded


def long_rows():
    """Enough tokens that errors have settled."""
    return sum((branching_rows(seed) for seed in range(10, 13)), [])


@pytest.mark.parametrize("kind", ["llama", "olmo3", "glm4_moe", "gpt_oss", "qwen3_next", "qwen3_5_moe", "mamba2",
                                  "granitemoehybrid"])  # fmt: skip
def test_float32(kind):
    report = verify(make_model(kind, torch.float32), padded(long_rows()))
    assert report.passed, str(report)
    assert report.flat_tokens > 1.5 * report.tree_tokens


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5", "mamba2", "qwen3_moe", "glm4_moe", "gpt_oss"])
def test_bfloat16(kind):
    verify(make_model(kind, torch.bfloat16), padded(long_rows())).check()


@pytest.mark.parametrize("kind", ["qwen3", "granitemoehybrid-dense"])
def test_autocast(kind):
    with torch.autocast("cpu", torch.bfloat16):
        verify(make_model(kind, torch.float32), FORMS["packed"](long_rows())).check()


def test_the_model_is_left_as_it_was():
    for prepare in (lambda model: model, lambda model: patch(model, backend="sdpa")):
        model = prepare(make_model("qwen3_5", torch.float32))
        was = patch_of(backbone_of(model))
        verify(model, padded(branching_rows()))
        now = patch_of(backbone_of(model))
        assert (now and now.backend) == (was and was.backend)
        assert all(parameter.grad is None for parameter in model.parameters())


def with_close_scores():
    """Routers whose experts score alike in pairs, but for less than bfloat16 can tell."""
    model = make_model("qwen3_moe", torch.bfloat16)
    for module in model.modules():
        if type(module).__name__ == "Qwen3MoeTopKRouter":
            with torch.no_grad():
                module.weight[1:6:2] = module.weight[0:6:2]
                module.weight[1:6:2, 0] *= 1 + 2**-7
    return model


def test_routers_take_the_experts_of_float64(monkeypatch):
    """Their flips are counted, and are no errors. With a negative control: routers that take their own."""
    batch = padded(long_rows())
    report = verify(with_close_scores(), batch).check()
    assert report.flips.unpatched > 20 and report.flips.patched > 20
    assert f"of {report.flips.num_choices:,} choices" in str(report)
    stock = decisions.Own.hook

    def ignored(own, number):
        take = stock(own, number)

        def hook(*call):
            take(*call)

        return types.FunctionType(hook.__code__, vars(decisions), closure=hook.__closure__)  # other hooks run batches unshared

    monkeypatch.setattr(decisions.Own, "hook", ignored)
    free = verify(with_close_scores(), batch)
    assert free.logprobs.unpatched > 3 * report.logprobs.unpatched


def test_routers_that_would_choose_others(monkeypatch):
    """Negative control: only the count of flips can tell."""
    stock = modeling_qwen3_moe.Qwen3MoeTopKRouter.forward

    def of_other_tokens(router, hidden):
        logits, weights, chosen = stock(router, hidden)
        return logits, weights, (chosen + (len(hidden) > 20)) % router.num_experts  # rows alone are shorter

    monkeypatch.setattr(modeling_qwen3_moe.Qwen3MoeTopKRouter, "forward", of_other_tokens)
    monkeypatch.setattr(patching, "check_tokenwise", lambda *_: None)
    report = verify(make_model("qwen3_moe", torch.float32), padded(long_rows()))
    assert report.worst is report.flips and "FAILED: choices of experts" in str(report)
    assert max(report.logprobs.ratio, *(judged.ratio for judged in report.gradients)) <= 2


def test_gradients_pass_clamps_in_all_three():
    """Values are the same to the last bit, and gradients are others."""
    model = make_model("gpt_oss", torch.bfloat16)
    batch = padded(branching_rows())

    def run():
        loss = model(**batch).loss
        return loss.item(), torch.autograd.grad(loss, model.model.layers[1].mlp.experts.gate_up_proj_bias)[0]

    plain = run()
    with decisions.gradients_through_clamps(model):
        through = run()
    assert through[0] == plain[0]
    assert not torch.equal(plain[1], through[1])
    again = run()
    assert again[0] == plain[0] and torch.equal(again[1], plain[1])


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_wrong_positions_of_mixtures_are_noticed(kind, wrong_positions):
    """Negative control: the choices of float64 hide no error."""
    assert not verify(make_model(kind, torch.bfloat16), padded(long_rows())).passed


@pytest.fixture
def wrong_positions(monkeypatch):
    """Forests in which every second token has the position of the next."""
    from espalier.hf import patching

    class Wrong(patching.TreeRun):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.position[1::2] += 1

    monkeypatch.setattr(patching, "TreeRun", Wrong)


def test_a_wrong_position_is_noticed(wrong_positions):
    """Negative control."""
    report = verify(make_model("qwen3", torch.float32), padded(branching_rows()))
    assert not report.passed and "FAILED" in str(report)
    with pytest.raises(VerificationError, match="errors of at most 2 times"):
        report.check()


def test_check_on_the_first_batch(wrong_positions):
    model = patch(make_model("qwen3", torch.float32), check=True)
    with torch.no_grad():
        model(**padded(branching_rows()))  # nothing is trained yet
    with pytest.raises(VerificationError):
        model(**padded(branching_rows()))


def test_check_passes():
    model = patch(make_model("qwen3_5", torch.float32), check=True)
    first = model(**padded(branching_rows())).loss
    assert patch_of(backbone_of(model)).unchecked is None
    assert torch.equal(model(**padded(branching_rows())).loss, first)


def test_adapters():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make_model("qwen3", torch.float32), peft.LoraConfig(target_modules=["q_proj"]))
    report = verify(patch(model), padded(branching_rows())).check()
    assert [judged.name for judged in report.gradients] == ["base_model.model.model.layers.*.self_attn"]


def test_models_without_a_head():
    with pytest.raises(Unsupported, match="expected a model with a head"):
        verify(make_model("qwen3", torch.float32).model, padded(branching_rows()))


def test_batches_without_labels():
    batch = padded(branching_rows()) | {"labels": torch.full((9, 20), -100)}
    with pytest.raises(Unsupported, match="labels: expected at least one"):
        verify(make_model("qwen3", torch.float32), batch)
