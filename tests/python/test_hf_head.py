# SPDX-License-Identifier: Apache-2.0
"""Heads and losses of patched models, once for each distinct token: values and gradients beside the same batch unpatched, and
how many hidden states a head is given."""

import copy
import functools
import pickle

import pytest
import torch
import transformers
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from transformers import (AutoModelForSequenceClassification, AutoModelForTokenClassification, PhiConfig, PhiForCausalLM, Trainer,
                          TrainingArguments)  # fmt: skip
from transformers.loss import loss_utils

from espalier import ops
from espalier.hf import patch, shared_head, unpatch
from espalier.hf.deferred_logits import Deferred
from espalier.hf.float64 import InFloat64
from hf_models import KINDS, branching_rows, make_model, packed, padded, worst_error

EXACT = 1e-12
FLAT = sum(map(len, branching_rows()))
LABELS = sum(len(row) - 1 for row in branching_rows())
FLAT_AND_PADDING = len(branching_rows()) * max(map(len, branching_rows()))
TREE = len({tuple(row[: end + 1]) for row in branching_rows() for end in range(len(row))})


class HeadRows(TorchFunctionMode):
    """Counts the rows that a head with `vocab_size` logits is given."""

    def __init__(self, vocab_size=61):
        super().__init__()
        self.vocab_size, self.rows = vocab_size, 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is linear and args[1].shape[0] == self.vocab_size:
            self.rows += args[0].numel() // args[0].shape[-1]
        return function(*args, **(kwargs or {}))


@pytest.fixture
def edges(monkeypatch):
    """(rows of hidden states, edges) of each call of ops.edge_logprobs."""
    seen, real = [], ops.edge_logprobs

    def counted(hidden, weight, edge_row, edge_target, **more):
        seen.append((len(hidden), len(edge_row)))
        return real(hidden, weight, edge_row, edge_target, **more)

    monkeypatch.setattr(ops, "edge_logprobs", counted)
    return seen


def loss_and_gradients(model, batch, **more):
    with InFloat64():
        loss = model(**batch, **more).loss
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return loss.item(), dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)))


def of_logits(model, batch, probe, **more):
    """The logits, and the gradients of their sum weighted by `probe`, a number for each value of a token's logits."""
    with InFloat64():
        logits = model(**{name: value for name, value in batch.items() if name != "labels"}, **more).logits
        loss = (logits * probe).sum()
    parameters = dict(model.named_parameters())
    return logits, (loss.item(), dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())))))


@pytest.mark.parametrize("kind", KINDS)
def test_loss(kind, edges):
    model, batch = make_model(kind), padded(branching_rows())
    settings = [{}, {"num_items_in_batch": torch.tensor(40)}, {"num_items_in_batch": 40}]
    theirs = [loss_and_gradients(model, batch, **each) for each in settings]
    patch(model)
    for each, expected in zip(settings, theirs):
        assert worst_error(loss_and_gradients(model, batch, **each), expected) <= EXACT
    assert edges and all(rows <= TREE and number < LABELS for rows, number in edges)


@pytest.mark.parametrize("kind", ["qwen3", "granitemoehybrid", "mamba2"])
def test_edges_that_are_not_weighted(kind, monkeypatch):
    """Negative control: each distinct pair counts once."""
    model, batch = make_model(kind), padded(branching_rows())
    theirs = loss_and_gradients(model, batch)
    real = shared_head.Edges.of

    def once(*args):
        found = real(*args)
        return shared_head.Edges(found.row, found.target, torch.ones_like(found.counts))

    monkeypatch.setattr(shared_head.Edges, "of", once)
    assert worst_error(loss_and_gradients(patch(model), batch), theirs) > 1e-3


def labelled_otherwise(rows):
    """Labels that differ where rows share tokens, on padding as well, and many that are ignored."""
    batch = padded(rows)
    generator = torch.Generator().manual_seed(3)
    batch["labels"] = torch.randint(0, 61, batch["labels"].shape, generator=generator)
    batch["labels"][torch.rand(batch["labels"].shape, generator=generator) < 0.3] = -100
    return batch


def test_labels_of_each_row(edges):
    """A shared token with several labels; a label on padding, which unpatched models predict from padding: only those that
    tokens predict are compared."""
    model, batch = make_model("qwen3"), labelled_otherwise(branching_rows())
    batch["labels"][:, 1:][batch["attention_mask"][:, :-1] == 0] = -100
    theirs = loss_and_gradients(model, batch)
    assert worst_error(loss_and_gradients(patch(model), batch), theirs) <= EXACT
    assert edges[0][1] > edges[0][0]


def test_labels_that_padding_predicts(monkeypatch):
    """As they were before heads were shared: by hidden states of zeros."""
    model, batch = patch(make_model("llama3-rope-v4")), labelled_otherwise(branching_rows())
    ours = loss_and_gradients(model, batch)
    monkeypatch.setattr(shared_head, "_may_share", lambda *_: False)
    assert worst_error(ours, loss_and_gradients(model, batch)) <= EXACT


@pytest.mark.parametrize("form", [padded, packed])
def test_shifted_labels(form, edges):
    model, batch = make_model("qwen3"), form(branching_rows()) | {"use_cache": False}
    batch["shift_labels"] = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    batch["labels"] = torch.zeros_like(batch["labels"])
    theirs = loss_and_gradients(model, batch)
    assert worst_error(loss_and_gradients(patch(model), batch), theirs) <= EXACT and edges


def test_another_ignored_index(edges):
    model, batch = make_model("llama"), padded(branching_rows())
    batch["labels"][batch["labels"] == -100] = -7
    theirs = loss_and_gradients(model, batch, ignore_index=-7)
    assert worst_error(loss_and_gradients(patch(model), batch, ignore_index=-7), theirs) <= EXACT and edges


@pytest.mark.parametrize("kind", ["llama", "granitemoehybrid"])
def test_no_labels_at_all(kind):
    model, batch = make_model(kind, torch.float32), padded(branching_rows())
    batch["labels"].fill_(-100)
    patch(model)
    assert torch.isnan(model(**batch).loss) and model(**batch, num_items_in_batch=3).loss == 0


KEPT = {
    "all": 0,
    "the last": 3,
    "one": 1,
    "columns": torch.tensor([0, 4, 4, 2]),
    "columns of each row": torch.arange(18).view(9, 2) % 5,
    "a mask": torch.arange(9 * 20).view(9, 20) % 3 == 0,
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("kind", ["llama3-rope-v4", "gpt_oss", "granitemoehybrid", "mamba2"])
def test_logits(kind, name):
    if name == "a mask" and not hasattr(transformers.modeling_utils, "slice_logits_to_keep"):
        pytest.skip(f"Transformers {transformers.__version__} takes no mask as logits_to_keep")
    model, batch, keep = make_model(kind), padded(branching_rows()), KEPT[name]
    inside = shared_head.slice_of(batch["attention_mask"].unsqueeze(-1), keep)
    probe = inside * torch.randn(61, dtype=torch.float64)
    logits, theirs = of_logits(model, batch, probe, logits_to_keep=keep)
    patch(model)
    with HeadRows() as head:
        found, ours = of_logits(model, batch, probe, logits_to_keep=keep)
    assert found.shape == logits.shape and worst_error(ours, theirs) <= EXACT
    torch.testing.assert_close(found * inside, logits * inside, rtol=EXACT, atol=EXACT)
    assert head.rows <= TREE + 1 and head.rows < logits.numel() / 61 if name != "one" else head.rows <= 9


def test_logits_of_other_rows(monkeypatch):
    """Negative control."""
    model, batch = make_model("qwen3"), padded(branching_rows())
    logits, _ = of_logits(model, batch, 1.0)
    real = shared_head._of_rows
    monkeypatch.setattr(shared_head, "_of_rows", lambda values, found, shape: real(values, found[::-1].copy(), shape))
    found, _ = of_logits(patch(model), batch, 1.0)
    inside = batch["attention_mask"].bool()
    assert (found - logits)[inside].abs().max() > 1e-3


def test_logits_beside_a_loss():
    """They are computed when somebody reads them, with a graph."""
    model, batch = make_model("granitemoehybrid"), padded(branching_rows()) | {"use_cache": False}
    with InFloat64():
        theirs = model(**batch)
        output = patch(model)(**batch)
        with HeadRows() as head:
            assert isinstance(output, type(theirs)) and list(output) == list(theirs) == ["loss", "logits"]
            assert output[0] is output["loss"] is output.loss and "logits" in output and head.rows == 0
            (held,) = (value for value in output.values() if type(value) is Deferred)
            assert held.shape == theirs.logits.shape and held.dtype == theirs.logits.dtype and held._compute is not None
            logits = output.logits
            assert head.rows == TREE + 1 and output.logits is logits is output["logits"] is output[1] is output.to_tuple()[1]
        inside = batch["attention_mask"].bool()
        torch.testing.assert_close(logits[inside], theirs.logits[inside], rtol=EXACT, atol=EXACT)
        expected, found = (torch.autograd.grad(each.logits[inside].square().sum(), list(model.parameters()))
                           for each in (theirs, output))  # fmt: skip
    assert worst_error((1, dict(enumerate(found))), (1, dict(enumerate(expected)))) <= EXACT


def test_logits_where_nobody_trains():
    """Those who go through an output find tensors, as Trainer does in evaluation."""
    model, batch = patch(make_model("llama", torch.float32)), padded(branching_rows())
    with torch.no_grad():
        assert all(isinstance(value, torch.Tensor) for value in model(**batch).values())
        assert all(isinstance(value, torch.Tensor) for _, value in model(**batch).items())
        loss, logits = model(**batch, return_dict=False)
        assert loss.dim() == 0 and logits.shape == (9, 20, 61)
        output = pickle.loads(pickle.dumps(model(**batch)))
    assert isinstance(output.logits, torch.Tensor)


def test_logits_as_tensors_of_torch():
    """What somebody gets from values() in training is as good as a tensor."""
    model, batch = patch(make_model("llama", torch.float32)), padded(branching_rows())
    logits = list(model(**batch).values())[1]
    assert torch.equal(torch.argmax(logits, -1), logits.argmax(-1)) and len(logits) == 9 and logits[0].shape == (20, 61)


def test_logits_that_are_left_out():
    model, batch = patch(make_model("llama", torch.float32), skip_logits=True), padded(branching_rows())
    assert model(**batch).logits is None and list(model(**batch)) == ["loss"]
    assert model(input_ids=batch["input_ids"]).logits is not None and model.eval()(**batch).logits is not None


def test_as_accelerate_converts_outputs():
    operations = pytest.importorskip("accelerate.utils.operations")
    model, batch = patch(make_model("qwen3", torch.bfloat16)), padded(branching_rows())
    with HeadRows() as head:
        output = operations.convert_to_fp32(model(**batch))
        assert head.rows == 0
    assert output.logits.dtype == torch.float32 and output.logits.shape == (9, 20, 61)


def test_a_loss_of_ones_own():
    """It gets the logits of all rows."""
    model, batch, shapes = make_model("qwen3"), padded(branching_rows()), []

    def loss_function(logits, labels, vocab_size, **_):
        if len(logits) != 2:  # of a test whether it looks at padding
            shapes.append(logits.shape)
        return logits[:, :-1].gather(-1, labels[:, 1:].clamp(min=0).unsqueeze(-1)).mean()

    model.loss_function = loss_function
    batch["attention_mask"].fill_(1)
    theirs = loss_and_gradients(model, batch)
    assert worst_error(loss_and_gradients(patch(model), batch), theirs) <= EXACT and shapes == [(9, 20, 61)] * 2


def test_a_loss_that_another_library_has_replaced(monkeypatch):
    model, batch = patch(make_model("qwen3")), padded(branching_rows())
    monkeypatch.setattr(loss_utils, "fixed_cross_entropy", lambda source, *_, **__: source.sum() * 0 + 7)
    assert model(**batch).loss == 7


@pytest.mark.parametrize("where", ["head", "backbone"])
def test_hooks_see_all_rows(where):
    """Heads whose hidden states or logits a hook may read or change are left alone."""
    model, batch, seen = patch(make_model("qwen3")), padded(branching_rows()), []
    module = model.lm_head if where == "head" else model.model
    hook = module.register_forward_hook(lambda _module, _args, output: seen.append(output[0].shape))
    model(**batch)
    assert seen == [torch.Size([20, 61]) if where == "head" else torch.Size([9, 20, 32])]
    hook.remove()


@pytest.mark.parametrize("kind", ["llama", "granitemoehybrid"])
@pytest.mark.parametrize("options, is_plain", [
    (dict(target_modules=["lm_head", "q_proj"]), False),
    (dict(target_modules=["q_proj"], modules_to_save=["lm_head"]), True),
    (dict(target_modules=["q_proj"]), True),
], ids=["LoRA of the head", "modules_to_save", "LoRA of layers"])  # fmt: skip
def test_adapters_of_heads(kind, options, is_plain, edges):
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    config = peft.LoraConfig(r=3, init_lora_weights=False, **options)
    model, batch = peft.get_peft_model(make_model(kind), config).to(torch.float64), padded(branching_rows())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.mul_(1.5)
    theirs = loss_and_gradients(model, batch)
    patch(model)
    with HeadRows() as head:
        ours = loss_and_gradients(model, batch)
    assert worst_error(ours, theirs) <= EXACT and bool(edges) == is_plain
    assert head.rows <= (0 if is_plain else 2 * TREE)  # LoRA has two matrices with a row for each token of the vocabulary


def test_autocast(edges):
    """As near to float32 as unpatched."""
    model, batch = make_model("qwen3", torch.float32), padded(branching_rows())
    exact = model(**batch).loss
    with torch.autocast("cpu", torch.bfloat16):
        theirs = model(**batch).loss
        ours = patch(model)(**batch)
    assert edges and abs(ours.loss - exact) <= 2 * abs(theirs - exact) + 1e-3
    assert ours.logits.dtype == torch.bfloat16 and ours.logits.shape == (9, 20, 61)


def test_float16_has_logits_of_distinct_tokens(edges):
    model, batch = make_model("llama", torch.float32).half(), padded(branching_rows())
    theirs = model(**batch).loss
    with HeadRows() as head:
        ours = patch(model, backend="sdpa")(**batch).loss
    assert abs(ours - theirs) <= 5e-3 * abs(theirs) and head.rows <= TREE and not edges


@pytest.mark.parametrize("kind", ["qwen3", "mamba2"])
def test_a_compiled_model(kind):
    model, batch = make_model(kind), padded(branching_rows())
    theirs = loss_and_gradients(model, batch)
    compiled = torch.compile(patch(model), backend="aot_eager")
    loss = compiled(**batch).loss
    found = torch.autograd.grad(loss, list(model.parameters()))
    assert worst_error((loss.item(), dict(zip(theirs[1], found))), theirs) <= 1e-6  # torch.compile knows no InFloat64


@pytest.mark.parametrize("where", ["class", "model"])
def test_forwards_of_other_libraries(where, monkeypatch):
    model, batch, seen = make_model("qwen3"), padded(branching_rows()), []
    theirs = loss_and_gradients(model, batch)
    real = type(model).forward

    def forward(self, *args, **kwargs):
        seen.append(kwargs["labels"])
        return real(self, *args, **kwargs)

    if where == "class":
        monkeypatch.setattr(type(model), "forward", forward)
    else:
        model.forward = functools.partial(forward, model)
    patch(model)
    with HeadRows() as head:
        assert worst_error(loss_and_gradients(model, batch), theirs) <= EXACT
    assert head.rows == batch["input_ids"].numel() and len(seen) == 1


@pytest.mark.parametrize("kind", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
def test_heads_for_classes(kind):
    config = make_model("qwen3").config
    config.num_labels, config.pad_token_id, config.classifier_dropout = 3, 60, 0.0
    model = kind.from_config(config).to(torch.float64).train()
    batch = padded(branching_rows()) | {"labels": torch.arange(9) % 3}
    batch["input_ids"][batch["attention_mask"] == 0] = 60
    if kind is AutoModelForTokenClassification:
        batch["labels"] = torch.where(batch["attention_mask"] == 1, batch["input_ids"] % 3, -100)
    theirs = loss_and_gradients(model, batch)
    assert worst_error(loss_and_gradients(patch(model), batch), theirs) <= EXACT


def test_copies_and_what_unpatch_leaves():
    model, batch = make_model("llama", torch.float32), padded(branching_rows())
    patch(model)
    twin = copy.deepcopy(model)
    assert type(model.forward) is type(twin.forward) is shared_head.Head and twin.forward._model() is twin
    assert torch.equal(twin(**batch).loss, model(**batch).loss)
    wrapped = functools.partial(model.forward)
    unpatch(model)
    assert "forward" not in model.__dict__ and type(twin.forward) is shared_head.Head
    assert torch.equal(wrapped(**batch).loss, model(**batch).loss)  # what another library has kept does nothing
    unpatch(twin)


def test_the_first_batch_is_verified(edges):
    model, batch = patch(make_model("qwen3", torch.float32), check=True), padded(branching_rows())
    loss = model(**batch).loss
    assert torch.isfinite(loss) and len(edges) == 1 and model.model._espalier.unchecked is None


@pytest.mark.parametrize("checkpoints, low_precision", [(False, False), (True, False), (False, True)])
def test_trainer(checkpoints, low_precision, tmp_path, monkeypatch):
    """Transformers' Trainer, with accumulation: losses, gradient norms, and what it evaluates. Logits [B, S, V] are computed in
    evaluation alone, also where Accelerate converts outputs to float32."""
    computed, real = [], Deferred.tensor
    monkeypatch.setattr(Deferred, "tensor", lambda deferred: computed.append(torch.is_grad_enabled()) or real(deferred))
    rows = branching_rows()[:8]
    batch = padded(rows)
    data = [{name: value[number] for name, value in batch.items()} for number in range(8)]

    def log(change):
        settings = TrainingArguments(output_dir=str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=2,
                                     max_steps=2, logging_steps=1, report_to=[], use_cpu=True, save_strategy="no", seed=5,
                                     disable_tqdm=True, gradient_checkpointing=checkpoints, bf16=low_precision,
                                     gradient_checkpointing_kwargs={"use_reentrant": False})  # fmt: skip
        shapes = []
        trainer = Trainer(change(make_model("qwen3", torch.float32)), settings, train_dataset=data, eval_dataset=data,
                          compute_metrics=lambda found: shapes.append(found.predictions.shape) or {})  # fmt: skip
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
        lines = [line for line in trainer.state.log_history if "grad_norm" in line]
        return shapes, [evaluated, *(line[name] for line in lines for name in ("loss", "grad_norm"))]

    shapes, theirs = log(lambda model: model)
    ours_shapes, ours = log(patch)
    assert shapes == ours_shapes == [(8, 20, 61)] and len(ours) == 5 and computed and not any(computed)
    assert ours == pytest.approx(theirs, rel=3e-2 if low_precision else 1e-4)


def test_heads_of_other_families_run_for_every_row():
    """The proof of a family is of its backbone."""
    config = PhiConfig(vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    for model, most in (PhiForCausalLM(config).eval(), FLAT_AND_PADDING), (make_model("llama"), TREE + 1):
        batch = padded(branching_rows())
        with HeadRows() as head:
            patch(model)(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        assert head.rows == most
