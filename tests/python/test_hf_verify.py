# SPDX-License-Identifier: Apache-2.0
"""espalier.hf.verify: models in low precision pass, and models that are wrong do not."""

import pytest
import torch

from espalier.errors import Unsupported
from espalier.hf import VerificationError, patch, verify
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


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5", "mamba2"])
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


@pytest.fixture
def wrong_positions(monkeypatch):
    """Forests in which one token has the position of the next."""
    from espalier.hf import patching

    class Wrong(patching.TreeRun):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.position[self.num_tokens // 2] += 1

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
