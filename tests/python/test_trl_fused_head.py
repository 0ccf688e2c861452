# SPDX-License-Identifier: Apache-2.0
"""TRL's fused head on patched models: its fields, loss and gradients beside the same batch unpatched, and how many hidden states
it scores.

TRL computes them in float32 whatever the dtype."""

import types

import pytest
import torch

from espalier.hf import fused_head, patch, unpatch, verification
from espalier.hf.float64 import InFloat64
from hf_models import branching_rows, make_model, packed, padded, worst_error
from test_hf_head import FLAT, TREE, labelled_otherwise

utils = pytest.importorskip("trl.trainer.utils")
if not hasattr(utils, "add_fused_lm_head"):
    pytest.skip("this version of TRL has no fused head", allow_module_level=True)
ROUNDING = 1e-5
ALL = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


@pytest.fixture
def scored(monkeypatch):
    """How many hidden states each call of TRL's kernel is given."""
    seen, real = [], utils._ChunkedLogProbFunction

    def apply(hidden, *more):
        seen.append(len(hidden))
        return real.apply(hidden, *more)

    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", types.SimpleNamespace(apply=apply))
    return seen


def fused_model(kind, **options):
    model = make_model(kind, torch.float32)
    utils.add_fused_lm_head(model, **{"temperature": 0.7, "outputs": ALL, **options})
    return model


def found(model, batch, of=None, **more):
    """The output, and (loss, gradients) of a sum of its fields. of: whose parameters, if not those of `model`."""
    output = model(**batch, **more, fused_lm_head=True)
    fields = [getattr(output, name) for name in ("log_probs", "entropy") if getattr(output, name) is not None]
    total = output.loss + sum((field * torch.linspace(0.5, 2, field.numel()).view(field.shape)).sum() for field in fields)
    parameters = dict((model if of is None else of).named_parameters())
    gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    return output, (total.item(), dict(zip(parameters, gradients)))


def exact(kind, batch, number=None):
    """The same in float64, by logits."""
    model = make_model(kind, torch.float32).double()
    with InFloat64():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1] / 0.7
        labels = batch["labels"][:, 1:]
        mask, logprobs = labels != -100, logits.log_softmax(-1)
        log_probs = logprobs.gather(2, labels.clamp(min=0).unsqueeze(2)).squeeze(2) * mask
        entropy = -(logprobs.exp() * logprobs).sum(-1) * mask
        output = types.SimpleNamespace(log_probs=log_probs, entropy=entropy, label_mask=mask,
                                       loss=-log_probs.sum() / (mask.sum() if number is None else number))  # fmt: skip
        return found(lambda **_: output, batch, of=model)


def judgements(ours, theirs, of_float64):
    """Of the fields at labels, and of the gradients by module: errors against float64."""
    roundoff = torch.finfo(torch.float32).eps / 2
    mask = of_float64[0].label_mask
    results = [verification.Results(torch.cat([getattr(output, name)[mask].detach().double() for name in ("log_probs", "entropy")]),
                                    {name: gradient.double() for name, gradient in gradients.items() if gradient is not None})
               for output, (_, gradients) in (ours, theirs, of_float64)]  # fmt: skip
    fields = verification._judged("fields", *(each.logprobs for each in results), roundoff)
    return [fields, *verification._judged_gradients(*results, roundoff)]


def assert_same(ours, theirs):
    for name in (*ALL, "label_mask"):
        one, other = getattr(ours[0], name), getattr(theirs[0], name)
        assert (one is None) == (other is None)
        if one is not None:
            assert one.shape == other.shape and one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=ROUNDING, atol=ROUNDING)
    assert type(ours[0]) is type(theirs[0])
    torch.testing.assert_close(ours[0].loss, theirs[0].loss, rtol=ROUNDING, atol=ROUNDING)
    assert worst_error(ours[1], theirs[1]) <= ROUNDING


@pytest.mark.parametrize("number", [None, 40], ids=["mean", "num_items_in_batch"])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "granitemoehybrid"])
def test_fields(kind, number, scored):
    model, batch = fused_model(kind), padded(branching_rows())
    more = {} if number is None else {"num_items_in_batch": torch.tensor(number)}
    theirs = found(model, batch, **more)
    patch(model)
    assert_same(found(model, batch, **more), theirs)
    assert scored[0] > FLAT and scored[1] < TREE
    assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, pad_token_id=0).shape == (1, 4)
    unpatch(model)
    assert_same(found(model, batch, **more), theirs)


@pytest.mark.parametrize("number", [None, 40], ids=["mean", "num_items_in_batch"])
@pytest.mark.parametrize("kind", ["qwen3_5", "granitemoehybrid"])
def test_errors_against_float64(kind, number, scored):
    """Recurrences add up in another order than unpatched: their errors are at most twice as large."""
    model, batch = fused_model(kind), padded(sum((branching_rows(seed) for seed in range(10, 13)), []))
    more = {} if number is None else {"num_items_in_batch": torch.tensor(number)}
    theirs = found(model, batch, **more)
    ours = found(patch(model), batch, **more)
    assert scored[1] < 0.7 * scored[0]
    found_errors = judgements(ours, theirs, exact(kind, batch, number))
    assert found_errors[0].num_values > 200 and found_errors[0].unpatched < 1e-5  # the formulas are TRL's
    assert all(each.ratio <= verification.MAX_RATIO for each in found_errors), found_errors
    worse = types.SimpleNamespace(log_probs=ours[0].log_probs * (1 + 1e-5), entropy=ours[0].entropy)  # control
    assert judgements((worse, ours[1]), theirs, exact(kind, batch, number))[0].ratio > verification.MAX_RATIO


@pytest.mark.parametrize("options", [{"outputs": ("log_probs",), "temperature": 1.0}, {"cast_lm_head_to_fp32": True}])
def test_options(options, scored):
    model, batch = fused_model("llama", **options), padded(branching_rows(), "left")
    theirs = found(model, batch)
    assert_same(found(patch(model), batch), theirs)
    assert scored[1] < TREE


def test_shifted_labels_and_packed_rows(scored):
    model, batch = fused_model("qwen3"), packed(branching_rows())
    labels = batch.pop("labels")
    batch["shift_labels"] = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    theirs = found(model, batch, use_cache=False)
    assert_same(found(patch(model), batch, use_cache=False), theirs)
    assert scored[1] < TREE


def test_labels_of_each_row(scored):
    """Tokens that share a hidden state, and have several labels."""
    model, batch = fused_model("qwen3"), labelled_otherwise(branching_rows())
    batch["labels"][:, 1:][batch["attention_mask"][:, :-1] == 0] = -100
    theirs = found(model, batch)
    assert_same(found(patch(model), batch), theirs)
    assert scored[1] < scored[0]


def test_losses_of_routers():
    model, batch = fused_model("qwen3_moe"), padded(branching_rows())
    theirs = found(model, batch, output_router_logits=True)
    ours = found(patch(model), batch, output_router_logits=True)
    assert_same(ours, theirs)
    torch.testing.assert_close(ours[0].aux_loss, theirs[0].aux_loss, rtol=ROUNDING, atol=ROUNDING)


def test_no_labels_at_all():
    """A zero with a graph, as TRL has it."""
    model, batch = patch(fused_model("llama")), padded(branching_rows())
    batch["labels"].fill_(-100)
    loss = model(**batch, fused_lm_head=True).loss
    loss.backward()
    assert loss == 0


def test_a_model_that_was_patched_before(scored):
    """Then TRL's own runs, until the model is patched once more, as espalier.trl.patch does."""
    model, batch = patch(make_model("qwen3", torch.float32)), padded(branching_rows())
    utils.add_fused_lm_head(model, outputs=ALL)
    theirs = found(model, batch)
    patch(model)
    assert_same(found(model, batch), theirs)
    assert scored[0] > FLAT and scored[1] < TREE
    loss = model(**batch).loss
    assert torch.isfinite(loss) and model.lm_head.weight.grad is None


def test_another_interface(scored, monkeypatch):
    """TRL's own runs, on all rows."""
    model, batch = fused_model("qwen3"), padded(branching_rows())
    theirs = found(model, batch)
    monkeypatch.setattr(fused_head, "_FIELDS", {"loss"})
    assert_same(found(patch(model), batch), theirs)
    assert scored[1] > FLAT


def test_fields_of_other_pairs(monkeypatch):
    """Negative control."""
    model, batch = fused_model("qwen3"), padded(branching_rows())
    theirs = found(model, batch)
    real = fused_head._Pairs

    class Turned(real):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.tokens = self.tokens[::-1].copy()

    monkeypatch.setattr(fused_head, "_Pairs", Turned)
    with pytest.raises(AssertionError):
        assert_same(found(patch(model), batch), theirs)


def test_adapters(scored):
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    config = peft.LoraConfig(r=3, init_lora_weights=False, target_modules=["q_proj"])
    model, batch = peft.get_peft_model(fused_model("qwen3"), config), padded(branching_rows())
    theirs = model(**batch, fused_lm_head=True)
    ours = patch(model)(**batch, fused_lm_head=True)
    torch.testing.assert_close(ours.log_probs, theirs.log_probs, rtol=ROUNDING, atol=ROUNDING)
    assert scored[1] < TREE
