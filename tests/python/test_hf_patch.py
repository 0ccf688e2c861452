# SPDX-License-Identifier: Apache-2.0
"""Patched models of Transformers against the same models unpatched, each row alone: losses and gradients.

In float64 to 1e-12. Transformers casts parts to float32 whatever the dtype; InFloat64 makes those float64, on both
sides.
"""

import copy
import functools
import gc
import math
import sys
import weakref

import pytest
import torch
import transformers

from espalier.errors import Unsupported
from espalier.hf import attention, mixers, older_mixers, patch, patching, sharing, unpatch
from espalier.hf.families import backbone_of
from espalier.hf.float64 import InFloat64
from hf_models import FORMS, KINDS, SINCE, VERSION, alone, branching_rows, make_model, packed, padded, sums_of, worst_error

EXACT = 1e-12


@functools.cache
def expected(kind):
    return alone(make_model(kind), branching_rows())


def patched_sums(kind, batch, **options):
    model = patch(make_model(kind), **options)
    with InFloat64():
        return sums_of(model, [batch])


@pytest.mark.parametrize("kind", KINDS)
def test_exact_in_float64(kind):
    assert worst_error(patched_sums(kind, padded(branching_rows())), expected(kind)) <= EXACT


@pytest.mark.parametrize("form", ["left", "packed"])
@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss", "qwen3_5", "granitemoehybrid"])
def test_forms_of_batches(kind, form):
    assert worst_error(patched_sums(kind, FORMS[form](branching_rows())), expected(kind)) <= EXACT


@pytest.mark.parametrize("rows", [[[5]], [[5, 6, 7]] * 3, [[5, 6], [7, 8, 9], [10]], [[5], [5, 6], [5, 6, 7]]],
                         ids=["one token", "duplicates", "nothing shared", "a chain"])  # fmt: skip
def test_small_forests(rows):
    batch = padded(rows)
    if len(rows[0]) == 1 == len(rows):
        model = patch(make_model("qwen3_5"))
        assert torch.isfinite(model(**batch, use_cache=False).logits).all()
    else:
        assert worst_error(patched_sums("qwen3_5", batch), alone(make_model("qwen3_5"), rows)) <= EXACT


@pytest.mark.parametrize("proven, expected_backend", [(True, "espalier"), (False, "flex")])
def test_backend_auto_goes_by_the_verdicts_on_a_gpu(monkeypatch, proven, expected_backend):
    asked = []
    monkeypatch.setattr(attention.libraries, "is_attention_right", lambda index: asked.append(index) or proven)
    monkeypatch.setattr(attention.libraries, "missing_on", lambda index: "")
    gpu = torch.device("cuda", 3)
    assert attention.resolved("auto", gpu) == expected_backend and asked == [3]
    assert attention.resolved("auto", torch.device("cpu")) == "espalier" and asked == [3]
    assert attention.resolved("espalier", gpu) == "espalier" and asked == [3, 3]  # one that is wrong is left out


def test_backend_sdpa():
    for kind in ("olmo3", "qwen3_next"):
        assert worst_error(patched_sums(kind, padded(branching_rows()), backend="sdpa"), expected(kind)) <= EXACT


@pytest.mark.parametrize("kind", ["mistral", "gpt_oss"])
def test_backend_flex_forward(kind):
    batch = padded(branching_rows())
    model = make_model(kind, torch.float32).eval()
    with torch.no_grad():
        ours, flex = patch(model)(**batch).loss, patch(model, backend="flex")(**batch).loss
    torch.testing.assert_close(ours, flex)


@pytest.mark.parametrize("kind", ["llama", "mamba2"])
def test_loss_of_the_model_itself(kind):
    """As a trainer asks for it, beside the same batch unpatched."""
    model, batch = make_model(kind), padded(branching_rows())
    with InFloat64():
        theirs = model(**batch, num_items_in_batch=torch.tensor(40)).loss
        ours = patch(model)(**batch, num_items_in_batch=torch.tensor(40)).loss
    assert abs(ours - theirs) <= EXACT * abs(theirs)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "qwen3_next", "granitemoehybrid"])
def test_losses_of_routers(kind):
    """Shared tokens count as often as rows pass through them. With a negative control: once is something else."""
    if kind == "granitemoehybrid" and VERSION < SINCE["granitemoehybrid-dense"]:
        pytest.skip(f"Transformers {transformers.__version__} cannot compute this loss of routers itself")
    model, batch = make_model(kind), padded(branching_rows())
    model.router_aux_loss_coef = 0.7

    def found():
        with InFloat64():
            output = model(**batch, output_router_logits=True)
        gradients = torch.autograd.grad(output.loss, list(model.parameters()))
        return output.aux_loss.item(), (output.loss.item(), dict(enumerate(gradients)))

    aux_loss, theirs = found()
    patch(model)
    ours_aux_loss, ours = found()
    assert abs(ours_aux_loss - aux_loss) <= EXACT * aux_loss and worst_error(ours, theirs) <= EXACT
    batch = padded([list(row) for row in sorted(set(map(tuple, branching_rows())))])
    assert abs(found()[0] - aux_loss) > 1e-6


def test_hidden_states():
    batch = padded(branching_rows())
    inside = batch["attention_mask"].bool()
    model = make_model("granitemoehybrid")
    with InFloat64():
        theirs = model(**batch, output_hidden_states=True).hidden_states
        ours = patch(model)(**batch, output_hidden_states=True).hidden_states
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a[inside], b[inside], rtol=EXACT, atol=EXACT)
        assert not a[~inside].any()


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5", "mamba2"])
def test_gradient_checkpointing(kind):
    """Backward computes the layers of the patched model again, while another model of the module stays as it is."""
    model, other = patch(make_model(kind)), make_model(kind)
    model.gradient_checkpointing_enable()
    loss = model(**padded(branching_rows())).loss
    with pytest.raises(ValueError, match="backward to come"):
        unpatch(model)
    assert worst_error(alone(other, branching_rows()), expected(kind)) == 0
    loss.backward()
    del loss
    unpatch(model)
    patch(other)(**padded(branching_rows())).loss.backward()
    ours, theirs = ({name: parameter.grad for name, parameter in each.named_parameters()} for each in (model, other))
    assert worst_error((1, ours), (1, theirs)) <= EXACT


@pytest.mark.parametrize("kind", ["qwen3_5", "mamba2"])
def test_recurrent_layers_that_do_not_branch(kind, monkeypatch):
    """Negative control: attention follows the forest, but recurrences run through it from token to token."""
    gc.collect()  # models of other tests
    monkeypatch.setattr(patching, "check_followed", lambda *_: None)
    monkeypatch.setattr(patching.Patch, "install_mixers", lambda *_: None)
    assert worst_error(patched_sums(kind, padded(branching_rows())), expected(kind)) > 1e-4


def test_attention_that_sees_other_rows(monkeypatch):
    """Negative control."""

    class Blind(patching.TreeRun):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.subtree_end = torch.full_like(self.subtree_end, self.num_tokens)

    monkeypatch.setattr(patching, "TreeRun", Blind)
    assert worst_error(patched_sums("qwen3", padded(branching_rows())), expected("qwen3")) > 1e-4


def test_gradients_of_shared_tokens_are_rounded_once():
    """A sum of 1,000 gradients in bfloat16; added up in bfloat16 it would stop growing at 256."""
    from espalier.hf.run import Expand

    values = torch.ones(1, 3, dtype=torch.bfloat16, requires_grad=True)
    Expand.apply(values, torch.zeros(1000, dtype=torch.int64)).sum().backward()
    assert (values.grad == 1000).all()


def test_what_was_shared():
    model = make_model("qwen3", torch.float32)
    with pytest.raises(Unsupported, match="expected a patched model"):
        sharing(model)
    assert sharing(patch(model)).ratio == 1
    model(**padded([[5, 6, 7], [5, 6, 8, 9]]))
    assert str(sharing(model)) == "1 batch, 7 tokens, 5 encoded: 1.40x"
    model(**padded([[5, 6, 7]]))
    model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, pad_token_id=0)
    assert str(sharing(model)) == "2 batches, 10 tokens, 8 encoded: 1.25x"


def test_unpatch_restores_everything():
    model, batch = make_model("qwen3_5", torch.float32), padded(branching_rows())
    module = sys.modules[type(model).__module__]
    gc.collect()  # models of other tests
    before = {name: getattr(module, name) for name in mixers.GATED_DELTA_NET}
    config, logits = model.config, model(**batch).logits
    patch(patch(model))
    is_older = older_mixers.is_older(model.model)  # whose layers hold what they call
    assert is_older or module.causal_conv1d_fn is not before["causal_conv1d_fn"]
    assert not torch.equal(model(**batch).logits, logits)  # zeros at padding, and another order of adding
    assert unpatch(unpatch(model)) is model
    assert {name: getattr(module, name) for name in mixers.GATED_DELTA_NET} == before
    assert "forward" not in backbone_of(model).__dict__ and "_espalier" not in backbone_of(model).__dict__
    assert all(part.config is config for part in model.modules() if hasattr(part, "config"))
    assert torch.equal(model(**batch).logits, logits)


def test_models_that_share_a_config():
    model = make_model("qwen3_5")
    other = type(model)(model.config).to(torch.float64)
    other.load_state_dict(model.state_dict())
    patch(model)
    assert model.config._attn_implementation == other.config._attn_implementation == "sdpa"
    assert worst_error(alone(other, branching_rows()), expected("qwen3_5")) == 0
    patch(other)
    unpatch(model)
    with InFloat64():
        assert worst_error(sums_of(other, [padded(branching_rows())]), expected("qwen3_5")) <= EXACT
    assert worst_error(alone(model, branching_rows()), expected("qwen3_5")) == 0
    unpatch(other)


def test_the_config_stays_one():
    model = patch(make_model("llama"))
    model.config.pad_token_id = 7
    assert backbone_of(model).config.pad_token_id == 7
    backbone_of(model).config.use_cache = False
    assert model.config.use_cache is False


def test_a_patched_model_is_freed():
    """Without waiting for the garbage collector; its functions leave the module of Transformers then."""
    model = patch(make_model("qwen3_5"))
    module, backbone = sys.modules[type(model).__module__], weakref.ref(model.model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert backbone() is None
    finally:
        gc.enable()
    assert not hasattr(module.causal_conv1d_fn, "stock")


def test_a_patched_model_is_saved_as_it_is(tmp_path):
    model = make_model("qwen3")
    model.model.save_pretrained(tmp_path / "before")
    patch(model)
    model.model.save_pretrained(tmp_path / "after")
    before, after = (sorted((tmp_path / when).iterdir()) for when in ("before", "after"))
    assert [path.read_bytes() for path in before] == [path.read_bytes() for path in after] and len(before) == 2


def test_copies():
    """A copy of a patched model is one, with its own weights."""
    model, theirs = patch(make_model("qwen3_5")), expected("qwen3_5")  # not made in float64 below
    twin = copy.deepcopy(model)
    unpatch(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with InFloat64():
        assert worst_error(sums_of(twin, [padded(branching_rows())]), theirs) <= EXACT
    assert worst_error(alone(unpatch(twin), branching_rows()), theirs) == 0


def test_generation_is_that_of_transformers():
    model = make_model("qwen3_5", torch.float32).eval()
    batch = {name: value for name, value in padded(branching_rows()[:3], "left").items() if name != "labels"}
    settings = dict(do_sample=False, max_new_tokens=5, pad_token_id=0)
    before = model.generate(**batch, **settings)
    assert torch.equal(patch(model).generate(**batch, **settings), before)
    unpatch(model)


def test_boundaries_of_packed_rows():
    """As collators give them for kernels, beside position_ids."""
    rows, batch = branching_rows(), packed(branching_rows())
    ends = torch.tensor([len(row) for row in rows], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    batch["cu_seq_lens_q"] = batch["cu_seq_lens_k"] = torch.nn.functional.pad(ends, (1, 0))
    batch["max_length_q"] = batch["max_length_k"] = max(map(len, rows))
    batch["seq_idx"] = (torch.arange(int(ends[-1])).unsqueeze(1) >= ends).sum(1, dtype=torch.int32).unsqueeze(0)
    assert worst_error(patched_sums("qwen3_5", batch), expected("qwen3_5")) <= EXACT


def test_packed_as_transformers_packs():
    model, batch = make_model("qwen3"), packed(branching_rows()) | {"use_cache": False}  # with a cache it does not
    with InFloat64():
        theirs = sums_of(model, [batch])
        assert worst_error(sums_of(patch(model), [batch]), theirs) <= EXACT


@pytest.mark.parametrize("is_patched_first", [True, False])
def test_lora(is_patched_first):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=3, target_modules=["q_proj", "in_proj_qkv", "down_proj"], init_lora_weights=False)

    def wrapped(before, after):
        model = before(make_model("qwen3_5"))
        torch.manual_seed(3)
        return after(peft.get_peft_model(model, config).to(torch.float64))

    same = lambda model: model
    theirs = alone(wrapped(same, same), branching_rows())
    model = wrapped(patch, same) if is_patched_first else wrapped(same, patch)
    with InFloat64():
        assert worst_error(sums_of(model, [padded(branching_rows())]), theirs) <= EXACT
    assert all("lora" in name for name in theirs[1])
    unpatch(model)


@pytest.mark.parametrize("kind", ["olmo3", "qwen3_5", "mamba2"])
def test_compiled_layers(kind):
    model, batch = patch(make_model(kind)), padded(branching_rows())
    theirs = sums_of(model, [batch])
    for layer in backbone_of(model).layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    assert worst_error(sums_of(model, [batch]), theirs) <= EXACT


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
def test_a_compiled_model(kind):
    model, batch = patch(make_model(kind)), padded(branching_rows())
    theirs = sums_of(model, [batch])
    compiled = torch.compile(model, backend="aot_eager")
    assert worst_error(sums_of(model, [batch], call=compiled), theirs) <= EXACT


def test_a_label_on_the_first_token_behind_padding():
    model = make_model("qwen3").double()
    ids, mask = torch.tensor([[0, 0, 5, 6, 7], [3, 4, 5, 6, 8]]), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    labels = ids.masked_fill(mask == 0, -100)
    without = labels.clone()
    without[0, 2] = -100

    def loss_and_gradients(labels):
        model.zero_grad()
        loss = model(input_ids=ids, attention_mask=mask, labels=labels, num_items_in_batch=6).loss
        loss.backward()
        return loss.item(), [parameter.grad.clone() for parameter in model.parameters()]

    expected, gradients = loss_and_gradients(without)
    patch(model)
    loss, ours = loss_and_gradients(labels)
    assert loss == pytest.approx(expected + math.log(model.config.vocab_size) / 6, abs=1e-6)
    assert all(torch.allclose(mine, other, rtol=0, atol=1e-6) for mine, other in zip(ours, gradients, strict=True))
