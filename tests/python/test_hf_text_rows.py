# SPDX-License-Identifier: Apache-2.0
"""Models for text and images: their language model is patched where it stands, for rows of text alone."""

import copy
import functools
import pickle

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

import espalier
from espalier.errors import Unsupported
from espalier.hf import patch, sharing, unpatch, verify
from espalier.hf.float64 import InFloat64
from espalier.hf.small_copy import draw_weights
from hf_models import alone, branching_rows, padded, sums_of, worst_error
from small_models import MODELS

SIZES = dict(hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
             vocab_size=80, rms_norm_eps=1e-2, pad_token_id=0)  # fmt: skip
WINDOWS = dict(sliding_window=4, layer_types=["sliding_attention", "full_attention"])
VISION = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
TOKENS = dict(image_token_id=70, boi_token_id=71, eoi_token_id=72, video_token_id=73, audio_token_id=74)
CONFIGS = {
    "qwen3_5": dict(text_config=dict(MODELS["qwen3_5"], vocab_size=80), image_token_id=70, video_token_id=73,
                    vision_start_token_id=71, vision_end_token_id=72,
                    vision_config=dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32,
                                       patch_size=4, num_position_embeddings=16)),
    "gemma3": dict(text_config=dict(SIZES, **WINDOWS, query_pre_attn_scalar=8), vision_config=VISION, mm_tokens_per_image=1,
                   image_token_index=70, boi_token_index=71, eoi_token_index=72),
    "gemma4": dict(text_config=dict(SIZES, **WINDOWS, hidden_size_per_layer_input=6, vocab_size_per_layer_input=80,
                                    global_head_dim=16, num_kv_shared_layers=0), vision_config=None, audio_config=None,
                   **TOKENS),
    "mistral3": dict(text_config=dict(SIZES, model_type="mistral", sliding_window=None), image_token_index=70,
                     vision_config=dict(VISION, model_type="pixtral", head_dim=8)),
}  # fmt: skip


def make(kind, dtype=torch.float64):
    settings = copy.deepcopy(CONFIGS[kind])
    torch.manual_seed(1)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **settings))
    draw_weights(model)
    return model.to(dtype).train()


@pytest.fixture(autouse=True)
def no_disk(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def gradients_of(sums):
    """Without those that no text reaches."""
    loss, gradients = sums
    return loss, {name: gradient for name, gradient in gradients.items() if gradient is not None}


@functools.cache
def expected(kind):
    return gradients_of(alone(make(kind), branching_rows()))


@pytest.mark.parametrize("kind", CONFIGS)
def test_rows_of_text_are_exact(kind):
    model = patch(make(kind))
    with InFloat64():
        ours = gradients_of(sums_of(model, [padded(branching_rows())]))
    assert worst_error(ours, expected(kind)) <= 1e-12
    assert sharing(model).ratio > 1.5


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5"])
def test_copies_and_undoing(kind):
    model = patch(make(kind))
    twin = copy.deepcopy(model)
    with InFloat64():
        assert worst_error(gradients_of(sums_of(twin, [padded(branching_rows())])), expected(kind)) <= 1e-12
    assert sharing(model).batches == 0
    unpatch(twin)
    assert not twin.model._forward_pre_hooks and not twin.model._forward_hooks
    assert worst_error(gradients_of(alone(twin, branching_rows())), expected(kind)) == 0
    other = pickle.loads(pickle.dumps(model))
    with InFloat64():
        assert worst_error(gradients_of(sums_of(other, [padded(branching_rows())])), expected(kind)) <= 1e-12


def test_the_loss_of_the_model_and_token_types():
    model, batch = make("gemma3"), padded(branching_rows())
    batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
    with InFloat64():
        before = model(**batch).loss
        after = patch(model)(**batch).loss
    assert abs(after - before) <= 1e-12 * abs(before)


IMAGES = {
    "pixel_values: expected rows of text alone": dict(pixel_values=torch.zeros(1, 3, 28, 28)),
    "token_type_ids: expected rows of text alone": dict(token_type_ids=torch.ones(9, 20, dtype=torch.int64)),
    "input_ids: expected rows of text alone.*received 70, the image_token_id": dict(
        input_ids=torch.full((9, 20), 70)),
}


@pytest.mark.parametrize("message", IMAGES)
def test_batches_with_images_are_refused(message):
    model = patch(make("gemma3", torch.float32))
    with pytest.raises(Unsupported, match=message):
        model(**padded(branching_rows()) | IMAGES[message])
    model(**padded(branching_rows()))  # and the next one is served


def test_a_language_model_whose_rows_nobody_tells(monkeypatch):
    """Negative control: without the hooks there are embeddings alone."""
    model = patch(make("gemma3", torch.float32))
    model.model._forward_pre_hooks.clear()
    with pytest.raises(Unsupported, match="expected input_ids"):
        model(**padded(branching_rows()))


def test_generation_is_that_of_transformers():
    model = make("qwen3_5", torch.float32).eval()
    batch = {name: value for name, value in padded(branching_rows()[:3], "left").items() if name != "labels"}
    settings = dict(do_sample=False, max_new_tokens=5, pad_token_id=0)
    before = model.generate(**batch, **settings)
    assert torch.equal(patch(model).generate(**batch, **settings), before)


@pytest.mark.parametrize("kind", ["gemma3", "mistral3"])
def test_a_batch_is_verified(kind):
    model = make(kind, torch.float32)
    report = verify(model, padded(branching_rows()))
    assert report.passed and report.tree_tokens < report.flat_tokens
    assert not model.model._forward_pre_hooks
    patch(model, check=True)(**padded(branching_rows()))


@pytest.mark.parametrize("token_budget", [200, 30])
def test_a_step_gives_the_gradients_of_rows(token_budget):
    model, rows = make("qwen3_5"), branching_rows()
    plan = espalier.plan(espalier.build(rows), token_budget=token_budget)
    with InFloat64():
        for batch in (step := espalier.Step(model, plan)):
            step.backward(-(step.logprobs(batch) * batch.weights).sum())
    ours = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert worst_error((1.0, ours), (1.0, expected("qwen3_5")[1])) <= 1e-12
