# SPDX-License-Identifier: Apache-2.0
"""Which rows a batch is made of, where the backbone is not handed all that says so: models for text and images, whose language
model is patched where it stands, for rows of text alone; packed rows of heads that drop position_ids."""

import contextlib
import copy
import functools
import pickle

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

import espalier
from espalier.errors import Unsupported
from espalier.hf import patch, sharing, text_rows, unpatch, verify
from espalier.hf.families import backbone_of
from espalier.hf.float64 import InFloat64
from espalier.hf.small_copy import draw_weights, small_model
from hf_default_models import default_model
from hf_models import VERSION, alone, branching_rows, make_model, packed, padded, sums_of, worst_error
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
    expected(kind)  # made outside of InFloat64, which other weights would be drawn in
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


RECURRENT = ["mamba2", "falcon_h1", "granitemoehybrid", "bamba", "nemotron_h", "zamba2", "qwen3_next", "qwen3_5_text",
             "qwen3_5_moe_text", "lfm2", "minimax", "olmo_hybrid", "bart"]  # fmt: skip
SETTINGS = {"lfm2": {"layer_types": ["conv", "conv", "full_attention"] * 2, "num_hidden_layers": 6}}


def small(kind):
    """A small model with a head, of the default config of a family."""
    if VERSION < (5, 23):
        pytest.skip("layers of these families follow trees since Transformers 5.23")
    model = default_model(kind, **SETTINGS.get(kind, {}))
    return small_model(type(model), model.config).eval()


def boundaries(rows):
    """Of packed rows, in the forms in which collators give them beside position_ids."""
    ends = torch.tensor([0, *map(len, rows)]).cumsum(0).int()
    numbers = torch.cat([torch.full((1, len(row)), number) for number, row in enumerate(rows)], 1).int()
    cumulated = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": max(map(len, rows)),
                 "max_length_k": max(map(len, rows))}  # fmt: skip
    return {"position_ids": {}, "seq_idx": {"seq_idx": numbers}, "cu_seq_lens": cumulated}


def rows_of_words():
    return [[token % 40 + 5 for token in row] for row in branching_rows()]


@pytest.mark.parametrize("where", ["head", "hook", "forward"])
@pytest.mark.parametrize("kind", RECURRENT)
def test_packed_rows(kind, where):
    """Rows stay apart, whether the head runs for distinct tokens, for all rows because of a hook, or as another library has
    set its forward."""
    model, rows = small(kind), rows_of_words()
    with InFloat64():
        expected = gradients_of(sums_of(model, [packed([row]) | {"use_cache": False} for row in rows]))
    if where == "forward":
        model.forward = functools.partial(type(model).forward, model)
    patch(model)
    hook = backbone_of(model).register_forward_hook(lambda *_: None) if where == "hook" else None
    for more in boundaries(rows).values():
        with InFloat64():
            found = gradients_of(sums_of(model, [packed(rows) | more | {"use_cache": False}]))
        assert worst_error(found, expected) <= 1e-6
    if hook is not None:
        hook.remove()
    assert sharing(model).ratio > 1.5


@pytest.mark.parametrize("form", ["seq_idx", "cu_seq_lens"])
@pytest.mark.parametrize("kind", ["mamba2", "nemotron_h", "qwen3_next"])
def test_boundaries_without_positions(kind, form):
    model, rows = patch(small(kind)), rows_of_words()
    with pytest.raises(Unsupported, match="expected the boundaries of the rows that position_ids tell of"):
        model(input_ids=packed(rows)["input_ids"], **boundaries(rows)[form])


@pytest.mark.parametrize("kind", ["falcon_mamba", "jamba", "mamba"])
def test_recurrences_that_do_not_follow_trees(kind):
    with pytest.raises(Unsupported, match="trees are exact"):
        patch(small(kind))


@pytest.mark.parametrize("kind", ["mamba2", "zamba2", "bart"])
def test_packed_rows_of_a_backbone(kind):
    """Without a head, and by its forward alone."""
    model, rows = small(kind), rows_of_words()
    backbone = backbone_of(model)
    with torch.no_grad(), InFloat64():
        expected = [backbone(input_ids=torch.tensor([row]), use_cache=False).last_hidden_state[0] for row in rows]
        patch(backbone)
        batch = {name: value for name, value in packed(rows).items() if name != "labels"} | {"use_cache": False}
        for call in backbone, backbone.forward:
            found = call(**batch).last_hidden_state[0].split([len(row) for row in rows])
            torch.testing.assert_close(found, tuple(expected), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_packed_rows_of_a_head_that_drops_positions(is_wrapped):
    """Its loss as well, and inside of PEFT, which calls the forward of the model without its hooks."""
    model, rows = make_model("mamba2"), branching_rows()
    if is_wrapped:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=3, init_lora_weights=False, target_modules=["in_proj"]))
        model = model.to(torch.float64)
    expected, batch = gradients_of(alone(model, rows)), packed(rows)
    patch(model)
    with InFloat64():
        assert worst_error(gradients_of(sums_of(model, [batch])), expected) <= 1e-11
        loss = model(**batch, num_items_in_batch=1).loss
    assert loss.item() == pytest.approx(expected[0], rel=1e-11)


def test_packed_rows_of_which_the_head_does_not_tell(monkeypatch):
    """Negative control."""
    model, rows = make_model("mamba2"), branching_rows()
    expected = alone(model, rows)
    monkeypatch.setattr(text_rows, "of_head", lambda *_: contextlib.nullcontext())
    with InFloat64():
        assert worst_error(sums_of(patch(model), [packed(rows)]), expected) > 1e-3


def test_what_a_head_tells_is_forgotten():
    """The next call, of the backbone, is of other rows; and so is one of another shape inside of the head."""
    model, rows = patch(make_model("mamba2")), branching_rows()
    batch = packed(rows)
    model(**batch)
    with torch.no_grad(), InFloat64():
        found = backbone_of(model)(input_ids=batch["input_ids"]).last_hidden_state
        expected = backbone_of(unpatch(model))(input_ids=batch["input_ids"]).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
