# SPDX-License-Identifier: Apache-2.0
"""What patched models refuse, by name, before anything runs."""

import functools
import sys

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from espalier.errors import Unsupported
from espalier.hf import patch, sharing, unpatch, verify, versions
from espalier.hf.float64 import InFloat64
from hf_models import DeepSpeedEngine, branching_rows, make_model, packed, padded


def calling(kind="qwen3", change=lambda model: None, **arguments):
    """Calls a patched model, changed after patching, with a batch and `arguments`."""
    model = patch(make_model(kind, torch.float32))
    change(model)
    return model(**(padded(branching_rows()) | arguments))


ONES = torch.ones(9, 20, dtype=torch.int64)


def holes():
    mask = padded(branching_rows())["attention_mask"]
    mask[0, 3] = 0
    return mask


BATCHES = {
    "attention_mask: expected.*four dimensions": dict(attention_mask=torch.ones(9, 1, 20, 20)),
    "attention_mask: expected ones and zeros": dict(attention_mask=ONES * 2),
    "padding between tokens in row 0": lambda: dict(attention_mask=holes()),
    "received padding alone": lambda: dict(attention_mask=ONES * 0),
    "attention_mask: expected a tensor": dict(attention_mask={"full_attention": None}),
    "position_ids: expected": dict(position_ids=torch.zeros(3, 9, 20, dtype=torch.int64)),
    "position_ids: expected rows that begin at position 0": lambda: dict(
        position_ids=torch.arange(5, 25).expand(9, -1), attention_mask=None),
    "position_ids: expected no row to begin inside another": lambda: packed(branching_rows()) | dict(
        attention_mask=torch.ones_like(packed(branching_rows())["input_ids"])),
    "input_ids: expected ids from 0": lambda: dict(input_ids=-ONES, attention_mask=None, labels=None),
    "token_type_ids: expected none.*Tensor": dict(token_type_ids=ONES),
    "cu_seq_lens_q: expected the boundaries.*received 0, 20": dict(cu_seq_lens_q=torch.tensor([0, 20])),
    "seq_idx: expected the boundaries": lambda: packed(branching_rows()) | dict(
        seq_idx=torch.zeros(packed(branching_rows())["input_ids"].shape), attention_mask=None),
    "seq_idx: expected a tensor, received int": dict(seq_idx=3),
    "expected input_ids.*inputs_embeds": dict(input_ids=None, inputs_embeds=torch.zeros(9, 20, 32)),
    "received use_cache=True": dict(use_cache=True),
    "received (past_key_values|cache);": lambda: dict(past_key_values=DynamicCache()),
    "received cache;": lambda: dict(cache=DynamicCache()),  # as Transformers 5.24 calls it
    "output_attentions: expected False": dict(output_attentions=True),
}  # fmt: skip


@pytest.mark.parametrize("message", BATCHES)
def test_batches(message):
    rows = branching_rows()
    assert padded(rows)["input_ids"].shape == (9, 20)
    arguments = BATCHES[message]
    with pytest.raises(Unsupported, match=message):
        calling(**(arguments() if callable(arguments) else arguments))


def set_dropout(model):
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1


SETTINGS = {
    "dropout: expected none in training, received 0.1 in layers.0.self_attn": set_dropout,
    "gradient checkpointing: expected use_reentrant=False": lambda model: model.gradient_checkpointing_enable(
        {"use_reentrant": True}),
    "neftune_noise_alpha: expected none": lambda model: setattr(model.model.embed_tokens, "neftune_noise_alpha", 5.0),
}  # fmt: skip


@pytest.mark.parametrize("message", SETTINGS)
def test_training(message):
    with pytest.raises(Unsupported, match=message):
        calling(change=SETTINGS[message])
    model = make_model("qwen3", torch.float32)
    SETTINGS[message](model)
    with pytest.raises(Unsupported, match=message):
        patch(model)
    patch(model.eval())(**padded(branching_rows()))  # they change nothing there


def test_dropout_of_lora():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(lora_dropout=0.05, target_modules=["q_proj"])
    model = peft.get_peft_model(patch(make_model("qwen3")), config)
    with pytest.raises(Unsupported, match="dropout: expected none in training, received 0.05 in layers.0.self_attn.q_"):
        model.train()(**padded(branching_rows()))


@pytest.mark.parametrize("is_training", [True, False])
def test_adapters_that_look_for_their_invocation(is_training):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(alora_invocation_tokens=[5, 6], target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(make_model("qwen3", torch.float32), config).train(is_training)
    batch = padded(branching_rows())
    expected = model(**batch).loss
    patch(model)
    with pytest.warns(UserWarning, match="batches run unshared.*_alora_offsets_pre_forward_hook"):
        assert torch.equal(model(**batch).loss, expected)
    with model.disable_adapter():
        torch.testing.assert_close(model(**batch).loss, expected)


class Actor(torch.nn.Module):
    """As trainers wrap models that they call in their own way."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, sequences, attention_mask):
        return self.model(sequences, attention_mask=attention_mask, use_cache=False).logits


@pytest.mark.parametrize("around", [DeepSpeedEngine, Actor, lambda model: DeepSpeedEngine(Actor(model))])
def test_what_trainers_put_around_models(around):
    """tests/python/deepspeed_rank_checks.py has DeepSpeed itself."""
    model, batch = make_model("qwen3"), padded(branching_rows())
    with InFloat64():
        theirs = model(**batch).logits
        patch(around(model))
        ours = model(**batch).logits
    mask = batch["attention_mask"].bool()
    torch.testing.assert_close(ours[mask], theirs[mask])
    assert sharing(around(model)).ratio > 1.3 and verify(around(model), batch).passed
    with pytest.raises(Unsupported, match="espalier.hf.patch: expected a model of Transformers as the backbone"):
        patch(torch.nn.ModuleList([around(model), torch.nn.Identity()]))


def test_an_adapter_for_each_row():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)

    def make():
        model = peft.get_peft_model(make_model("qwen3", torch.float32), config)
        model.add_adapter("other", config)
        return model.eval()

    model, batch = make(), padded(branching_rows())
    names = (["default", "other"] * 5)[:len(batch["input_ids"])]
    expected = model(**batch, adapter_names=names).loss
    patch(model)
    with pytest.warns(UserWarning, match="batches run unshared.*_adapter_names_pre_forward_hook"):
        assert torch.equal(model(**batch, adapter_names=names).loss, expected)
    for name in ("default", "other"):
        model.set_adapter(name)
        model(**batch)


def small(model_type, **settings):
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                 num_key_value_heads=1, head_dim=8, vocab_size=11)  # fmt: skip
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes | settings))


MODELS = {
    "rope_type: expected.*received 'dynamic'": lambda: small(
        "llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
    "hidden_act: expected silu or swish, received 'gelu'": lambda: small(
        "mamba2", hidden_act="gelu", num_heads=4, head_dim=8, state_size=4, n_groups=1),
    "is_causal: expected causal attention": lambda: small("llama", is_causal=False),
    "received Linear": lambda: torch.nn.Linear(2, 2),
}  # fmt: skip


@pytest.mark.parametrize("message", MODELS)
def test_models(message):
    with pytest.raises(Unsupported, match=message):
        patch(MODELS[message]())


def test_code_that_is_not_of_transformers():
    model = make_model("qwen3")

    class Qwen3Model(torch.nn.Module):
        config = model.config

    with pytest.raises(Unsupported, match="expected Qwen3Model of Transformers.*received Qwen3Model from test_hf_ref"):
        patch(Qwen3Model())


def test_another_version_of_transformers(monkeypatch):
    """Without one of the functions that mixers call. The model stays as it was."""
    if not versions.is_tested():
        pytest.skip(f"Transformers {transformers.__version__}: the proof refuses it first (test_hf_versions.py)")
    model = make_model("qwen3_5", torch.float32)
    monkeypatch.delattr(sys.modules[type(model).__module__], "torch_chunk_gated_delta_rule")
    with pytest.raises(Unsupported, match="expected the function torch_chunk_gated_delta_rule"):
        patch(model)
    assert not {"forward", "_espalier"} & model.model.__dict__.keys()
    assert all(part.config is model.config for part in model.modules() if hasattr(part, "config"))


def test_backends():
    with pytest.raises(Unsupported, match="backend: expected auto, espalier, flex, sdpa, cudnn, fla, mamba_ssm, received 'eager'"):
        patch(make_model("qwen3"), backend="eager")
    with pytest.raises(Unsupported, match='backend="sdpa": expected a model without sinks'):
        patch(make_model("gpt_oss"), backend="sdpa")(**padded(branching_rows()))
    with pytest.raises(Unsupported, match='backend="flex": expected a GPU, received gradients on a CPU'):
        patch(make_model("qwen3"), backend="flex")(**padded(branching_rows()))
    for name, wanted in (("cudnn", "cudnn-frontend 1.32"), ("fla", "flash-linear-attention 0.6"), ("mamba_ssm", "mamba-ssm 2.3")):
        with pytest.raises(Unsupported, match=f'backend="{name}": expected {wanted} on a GPU.*received cpu without'):
            patch(make_model("qwen3"), backend=name)(**padded(branching_rows()))


def test_attention_without_a_forest():
    model = make_model("qwen3", torch.float32)
    model.config._attn_implementation = "espalier"
    with pytest.raises(Unsupported, match="expected a model patched by espalier.hf.patch"):
        model(**padded(branching_rows()))


def test_attention_with_dropout():
    from espalier.hf import attention

    class Run:
        num_tokens = 3

    q = torch.zeros(1, 2, 3, 8)
    with pytest.raises(Unsupported, match="dropout"):
        attention.tree_attention(None, q, q, q, espalier_tree=Run(), dropout=0.1)


def test_a_forward_wrapped_by_others():
    model = patch(make_model("qwen3"))
    ours = model.model.forward
    model.model.forward = functools.partial(ours)
    with pytest.raises(Unsupported, match="another library has wrapped"):
        unpatch(model)
    model.model.forward = ours
    unpatch(model)
