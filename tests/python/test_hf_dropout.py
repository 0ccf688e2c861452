# SPDX-License-Identifier: Apache-2.0
"""patch(model, dropout="shared"): one draw for each distinct token. With masks that are looked up by what drops and by the path
of a token, losses and gradients are those of each row alone with the same masks."""

import copy
import math
import pickle

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.neftune import activate_neftune, deactivate_neftune

import espalier
from conftest import seed_of
from espalier.errors import InputError, Unsupported
from espalier.hf import patch, patching, unpatch, verify
from espalier.hf.float64 import InFloat64
from espalier.step.passes import Pass
from hf_models import HookOfEspalier, FORMS, branching_rows, make_model, padded, sums_of, worst_error

peft = pytest.importorskip("peft")
EXACT = 1e-12
OTHERS = {  # other families with dropout, as layers and as functions
    "gpt_neox": dict(hidden_dropout=0.2, attention_dropout=0.0),
    "starcoder2": dict(residual_dropout=0.2, embedding_dropout=0.3, attention_dropout=0.0),
}
KINDS = ["qwen3", "qwen3_5", "granitemoehybrid", *OTHERS]


def with_adapters(kind="qwen3", rate=0.3, targets=("q_proj", "in_proj_qkv", "down_proj", "in_proj"), dtype=torch.float64):
    config = peft.LoraConfig(r=3, target_modules=list(targets), init_lora_weights=False, lora_dropout=rate)
    model = make_model(kind, dtype)
    torch.manual_seed(seed_of(3))
    return peft.get_peft_model(model, config).to(dtype).train()


def make(kind):
    if kind not in OTHERS:
        return with_adapters(kind)
    sizes = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                 max_position_embeddings=64)  # fmt: skip
    torch.manual_seed(seed_of(4))
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **OTHERS[kind])).double().train()


class Masks:
    """Stands for torch's dropout. A mask is a function of which call of a forward pass it is, and of the tokens up to its own."""

    def __init__(self):
        self.paths, self.calls, self.shapes = [], 0, []

    def begin(self, paths):
        """Before each forward pass: of the tokens that it runs, in order."""
        self.paths, self.calls = paths, 0

    def __call__(self, values, p=0.5, training=True, inplace=False):
        if not training or p == 0:
            return values
        self.shapes.append(values.shape)
        kept = torch.stack([self.kept(path, values.shape[-1], p) for path in self.paths])
        self.calls += 1
        return values * kept.view(values.shape) / (1 - p)

    def kept(self, path, size, p):
        generator = torch.Generator().manual_seed(hash((self.calls, path)) % 2**62)
        return torch.rand(size, generator=generator, dtype=torch.float64) >= p


@pytest.fixture
def masks(monkeypatch):
    masks = Masks()
    monkeypatch.setattr(torch.nn.functional, "dropout", masks)
    return masks


def prefixes(row):
    return [tuple(row[: end + 1]) for end in range(len(row))]


def paths_of_forest(rows, layout):
    paths = [()] * layout.num_tokens
    for number, row in enumerate(rows):
        for token, path in zip(layout.path(number), prefixes(row), strict=True):
            paths[token] = path
    return paths


def alone(model, rows, masks):
    """Sums of each row alone."""

    def call(**batch):
        masks.begin(prefixes(batch["input_ids"][0].tolist()))
        return model(**batch)

    with InFloat64():
        return sums_of(model, [{"input_ids": torch.tensor([row]), "labels": torch.tensor([row])} for row in rows], call)


def of_batch(model, batch, masks):
    """Sums of a batch of a patched model."""

    def call(**inputs):
        found, layout = patching.forest_of(inputs)
        rows = [found.tokens[begin:end].tolist() for begin, end in zip(found.offsets, found.offsets[1:])]
        masks.begin(paths_of_forest(rows, layout))
        return model(**inputs)

    with InFloat64():
        return sums_of(model, [batch], call)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_with_the_masks_of_their_tokens(kind, form, masks):
    rows, model = branching_rows(), make(kind)
    theirs = alone(model, rows, masks)
    ours = of_batch(patch(model, dropout="shared"), FORMS[form](rows), masks)
    assert masks.shapes and worst_error(ours, theirs) <= EXACT
    switched_off = sums_of(model.eval(), [FORMS[form](rows)])
    assert worst_error(ours, switched_off) > 1e-3


def test_masks_of_other_tokens(masks):
    """Negative control."""
    model = make("qwen3")
    theirs = alone(model, branching_rows(), masks)
    masks.kept = lambda _path, size, p: Masks.kept(masks, (1,), size, p)
    assert worst_error(of_batch(patch(model, dropout="shared"), padded(branching_rows()), masks), theirs) > 1e-3


def drawn(model, batch, seed=5):
    torch.manual_seed(seed_of(seed))
    return sums_of(model, [batch])


def test_nothing_shared():
    """The same draws, and so the same numbers, as the unpatched model on the same packed rows."""
    rows = [[first, *range(10, 10 + 3 * first)] for first in range(1, 6)]
    batch, model = FORMS["packed"](rows) | {"use_cache": False}, make("qwen3")  # with a cache, Transformers joins packed rows
    theirs = drawn(model, batch)
    ours = drawn(patch(model, dropout="shared"), batch)
    assert espalier.hf.sharing(model).ratio == 1 and worst_error(ours, theirs) <= 1e-9
    assert worst_error(drawn(model, batch, seed=6), theirs) > 1e-3


def test_means_over_draws():
    """What is linear in dropped values is unbiased, and so are its gradients, for tokens that rows share as well."""
    model = patch(with_adapters(targets=["q_proj"], rate=0.5), dropout="shared")
    layer, batch = model.get_base_model().model.layers[0].self_attn.q_proj, padded(branching_rows())
    weight, seen = layer.lora_A["default"].weight, []
    layer.register_forward_hook(HookOfEspalier(lambda _module, _args, output: seen.append(output)))

    def values():
        seen.clear()
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        (gradient,) = torch.autograd.grad((seen[-1] * torch.linspace(-1, 1, seen[-1].numel()).view(seen[-1].shape)).sum(), weight)
        return torch.cat([seen[-1].detach().flatten(), gradient.flatten()])  # after that of a test of the adapter

    model.eval()
    expected = values()
    model.train()
    torch.manual_seed(seed_of(8))
    draws = torch.stack([values() for _ in range(300)])
    error = (draws.mean(0) - expected).abs()
    assert (error <= 6 * draws.std(0) / math.sqrt(len(draws)) + 1e-9).all() and draws.std(0).max() > 0.01


def test_rows_that_share_a_token_share_its_draw():
    model = patch(make("qwen3"), dropout="shared")
    batch = padded([[1, 2, 3, 4], [1, 2, 3, 5], [6, 2, 3, 5]])
    hidden = model(**batch, output_hidden_states=True).hidden_states[-1]
    assert torch.equal(hidden[0, :3], hidden[1, :3]) and not torch.equal(hidden[0, :3], hidden[2, :3])
    again = model(**batch, output_hidden_states=True).hidden_states[-1]
    assert not torch.equal(hidden[0, :3], again[0, :3])


def test_checkpointing_draws_the_same_again():
    model, batch = patch(make("qwen3_5"), dropout="shared"), padded(branching_rows())
    theirs = drawn(model, batch)
    model.get_base_model().gradient_checkpointing_enable()
    model.enable_input_require_grads()
    assert worst_error(drawn(model, batch), theirs) <= 1e-9


def test_a_compiled_model():
    model, batch = patch(make("qwen3"), dropout="shared"), padded(branching_rows())
    theirs = drawn(model, batch)
    compiled = torch.compile(model, backend="eager")
    torch.manual_seed(seed_of(5))
    assert worst_error(sums_of(model, [batch], call=compiled), theirs) <= 1e-9


def test_autocast_and_evaluation():
    model, batch = patch(with_adapters(dtype=torch.float32), dropout="shared"), padded(branching_rows())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first, second = (model(**batch).loss for _ in range(2))
    assert torch.isfinite(first) and first != second
    model.eval()
    assert torch.equal(model(**batch).loss, model(**batch).loss)


def test_noise_on_embeddings_has_the_scale_of_the_batch():
    """As unpatched: alpha over the root of padded length times hidden size, whatever is shared."""
    model, alpha = patch(make_model("qwen3"), dropout="shared"), 5.0
    handle = activate_neftune(model, alpha)
    batch = padded([[1, 2, 3, 4, *range(5 + 9 * row, 14 + 9 * row)] for row in range(5)])  # 49 distinct tokens, of a length of 13
    plain = model.model.embed_tokens.weight[batch["input_ids"]]
    noise = model(**batch, output_hidden_states=True).hidden_states[0] - plain
    bound = alpha / math.sqrt(batch["input_ids"].shape[1] * plain.shape[2])
    assert 0.98 * bound < noise.abs().max() <= bound * (1 + 1e-6)
    assert model.model.embed_tokens.neftune_noise_alpha == alpha
    assert torch.equal(noise[0, :4], noise[1, :4]) and not torch.equal(noise[0, 4], noise[1, 4])
    deactivate_neftune(model, handle)
    assert torch.equal(model(**batch, output_hidden_states=True).hidden_states[0][0], plain[0])


@pytest.mark.parametrize("dropout", [None, "shared"])
def test_a_head_with_dropout_runs_for_every_row(dropout, masks):
    model = patch(with_adapters(targets=["lm_head"]), dropout=dropout)
    batch = padded(branching_rows())
    masks.kept = lambda _path, size, _p: torch.ones(size, dtype=torch.bool)
    masks.paths = [()] * batch["input_ids"].numel()
    model(**batch)
    assert masks.shapes == [(*batch["input_ids"].shape, 32)]


def test_verification_is_without_dropout():
    model, batch = patch(make("qwen3"), dropout="shared"), padded(branching_rows())
    assert verify(model, batch).passed
    assert model.get_base_model().model.layers[0].self_attn.q_proj.lora_dropout["default"].p == 0.3
    patch(model, check=True, dropout="shared")
    model(**batch)


def test_copies_keep_the_choice():
    model, batch = patch(make("qwen3"), dropout="shared"), padded(branching_rows())
    theirs = drawn(model, batch)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert worst_error(drawn(twin, batch), theirs) <= 1e-9


def test_patching_again_takes_the_choice_back():
    model = patch(make("qwen3"), dropout="shared")
    with pytest.raises(Unsupported, match='patch with dropout="shared"'):
        patch(model)
    patch(model.eval())
    with pytest.raises(Unsupported, match="dropout: expected none in training, received 0.3 in layers.0"):
        model.train()(**padded(branching_rows()))
    unpatch(model)


def set_attention(model):
    model.model.layers[1].self_attn.attention_dropout = 0.1


def set_layers(model):
    model.model.layerdrop = 0.1


def set_channels(model):
    model.model.layers[0].mlp.act_fn = torch.nn.Dropout1d(0.1)


FAULTS = {
    "received 0.1 in layers.1.self_attn, of attention weights": set_attention,
    "received 0.1 in the backbone, of whole layers or channels": set_layers,
    "received 0.1 in layers.0.mlp.act_fn, of whole layers or channels": set_channels,
}


@pytest.mark.parametrize("message", FAULTS)
def test_what_stays_refused(message):
    for dropout, expected in [("shared", message), (None, "dropout: expected none in training, received 0.1")]:
        model = make_model("qwen3", torch.float32)
        FAULTS[message](model)
        with pytest.raises(Unsupported, match=expected):
            patch(model, dropout=dropout)


@pytest.mark.parametrize("kind", OTHERS)
def test_dropout_of_families_is_refused_by_default(kind):
    """As layers, and as functions of a number that a module keeps."""
    with pytest.raises(Unsupported, match='dropout: expected none in training, received 0.[23] in .*or patch with dropout="shared"'):
        patch(make(kind))


def test_noise_is_refused_by_default():
    model = make_model("qwen3", torch.float32)
    activate_neftune(model, 5.0)
    with pytest.raises(Unsupported, match='neftune_noise_alpha: expected none, received 5.0.*or patch with dropout="shared"'):
        patch(model)


def test_other_choices():
    with pytest.raises(Unsupported, match='dropout: expected None or "shared", received True'):
        patch(make_model("qwen3", torch.float32), dropout=True)


def plan_of(rows):
    return espalier.plan(espalier.build(rows), token_budget=3, strategy="partition")


def step_sums(model, plan, **options):
    """(loss, gradients by name) of a step."""
    model.zero_grad()
    step, total = espalier.Step(model, plan, **options), 0.0
    for batch in step:
        loss = -step.logprobs(batch).sum()
        step.backward(loss)
        total += loss.item()
    return total, {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("recompute", [False, True])
def test_steps(recompute, masks, monkeypatch):
    """Each token is drawn for once, in the one micro-batch that encodes it; recomputation draws the same again."""
    rows, model = branching_rows(), make("qwen3_5")
    theirs = alone(model, rows, masks)
    plan = plan_of(rows)
    whole, run = espalier.build(rows).layout(), Pass._forward
    path_of = dict(zip(whole.forest_token.tolist(), paths_of_forest(rows, whole), strict=True))

    def begun(self, opened, result):
        masks.begin([path_of[token] for token in self._plan.layout(opened.index).forest_token.tolist()])
        return run(self, opened, result)

    monkeypatch.setattr(Pass, "_forward", begun)
    with InFloat64():
        ours = step_sums(patch(model, dropout="shared"), plan, recompute=recompute)
    assert worst_error(ours, theirs) <= EXACT


def test_steps_that_run_forward_twice():
    model, plan = patch(make("qwen3"), dropout="shared"), plan_of(branching_rows())
    found = []
    for recompute in (False, True):
        torch.manual_seed(seed_of(9))
        found.append(step_sums(model, plan, recompute=recompute))
    assert worst_error(*found) <= 1e-9


def test_steps_with_noise():
    model = patch(make_model("qwen3"), dropout="shared")
    activate_neftune(model, 5.0)
    with pytest.raises(InputError, match="neftune_noise_alpha: expected none with espalier.Step, received 5.0"):
        next(iter(espalier.Step(model, plan_of(branching_rows()))))


def test_trainers_of_trl(tmp_path):
    """One step of SFT with dropout of LoRA and NEFTune."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"input_ids": row, "labels": row} for row in branching_rows() if len(row) > 1])
    from test_trl import small_words

    args = trl.SFTConfig(output_dir=str(tmp_path), max_steps=1, logging_steps=1, report_to=[], use_cpu=True, bf16=False,
                         gradient_checkpointing=False, save_strategy="no", disable_tqdm=True, neftune_noise_alpha=5.0)  # fmt: skip
    trainer = trl.SFTTrainer(with_adapters(dtype=torch.float32), args, train_dataset=rows, processing_class=small_words())
    espalier.trl.patch(trainer, dropout="shared")
    trainer.train()
    log = next(line for line in trainer.state.log_history if "grad_norm" in line)
    assert math.isfinite(log["loss"]) and log["grad_norm"] > 1e-3 and log["espalier/ratio"] > 1.1
