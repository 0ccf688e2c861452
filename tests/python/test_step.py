# SPDX-License-Identifier: Apache-2.0
"""espalier.Step: losses and gradients of trees in pieces against the unpatched model, each row alone.

In float64 to 1e-12, as in test_hf_patch.py.
"""

import contextlib
import functools
import random
import weakref

import numpy as np
import pytest
import torch

import espalier
from conftest import seed_of
from espalier.errors import InputError
from espalier.hf import context, verification
from espalier.hf.context import Frame
from espalier.hf.float64 import InFloat64
from espalier.step.plan import StepPlan
from hf_models import alone, branching_rows, make_model, padded, sums_of, worst_error

EXACT = 1e-12
FAMILIES = ["llama", "mistral", "olmo3", "qwen2-window", "qwen3", "qwen3_moe", "glm4_moe", "gpt_oss", "qwen3_next",
            "qwen3_5", "qwen3_5_moe", "mamba2", "granitemoehybrid"]  # fmt: skip


@functools.cache
def expected(kind):
    return alone(make_model(kind), branching_rows())


def plan_of(rows, token_budget=3, strategy="partition"):
    return espalier.plan(espalier.build(rows), token_budget=token_budget, strategy=strategy)


def step_sums(model, plan, loss_of=lambda batch, logprobs: -logprobs.sum(), mode=InFloat64, **options):
    """The sum of the losses of all micro-batches, and the gradients by name, as sums_of gives them."""
    model.zero_grad()
    total, step = 0, espalier.Step(model, plan, **options)
    with mode():
        for batch in step:
            loss = loss_of(batch, step.logprobs(batch))
            step.backward(loss)
            total += loss.item()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    return total, gradients


@pytest.mark.parametrize("kind", FAMILIES)
def test_exact_in_float64(kind):
    plan = plan_of(branching_rows())
    assert sum(batch.parent >= 0 for batch in plan) > 10
    assert worst_error(step_sums(make_model(kind), plan), expected(kind)) <= EXACT


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_5", "mamba2"])
def test_recomputation(kind):
    assert worst_error(step_sums(make_model(kind), plan_of(branching_rows()), recompute=True), expected(kind)) <= EXACT


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_5", "mamba2"])
def test_gradient_checkpointing(kind):
    """Of layers, in both ways; computing again is outside of InFloat64, so nothing else may be inside."""
    model, plan = make_model(kind), plan_of(branching_rows(), 7)
    theirs = step_sums(model, plan, mode=contextlib.nullcontext)
    model.gradient_checkpointing_enable()
    for recompute in (False, True):
        ours = step_sums(model, plan, mode=contextlib.nullcontext, recompute=recompute)
        assert worst_error(ours, theirs) <= EXACT


@pytest.mark.parametrize("strategy", ["tree-packing", "sequence-packing"])
def test_plans_without_context(strategy):
    plan = plan_of(branching_rows(), 25, strategy)
    assert len(plan) > 2
    assert worst_error(step_sums(make_model("qwen3_5"), plan), expected("qwen3_5")) <= EXACT


def random_rows(seed):
    """Deep, wide, of single tokens, repeated, ending inside of one another."""
    rng = random.Random(seed_of(seed))
    rows = [[rng.randrange(61) for _ in range(rng.randrange(1, 12))] for _ in range(rng.randrange(1, 4))]
    for _ in range(rng.randrange(2, 12)):
        row = rng.choice(rows)
        kept = row[:rng.randrange(1, len(row) + 1)]
        rows.append(kept + [rng.randrange(61) for _ in range(rng.choice([0, 0, 1, 2, 6]))])
    return rows + [[1, 2]]


@pytest.mark.parametrize("seed", range(6))
def test_random_forests(seed):
    kind, rng, rows = ["olmo3", "qwen3_next"][seed % 2], random.Random(seed_of(seed + 100)), random_rows(seed)
    plan = plan_of(rows, rng.randrange(1, 8))
    print(f"rows {rows}, budget {plan.token_budget}")
    sums = step_sums(make_model(kind), plan, recompute=rng.random() < 0.5)
    assert worst_error(sums, alone(make_model(kind), rows)) <= EXACT


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("is_flat", [False, True])
def test_terms_of_a_loss_mask(is_flat, recompute):
    """Sparse, with a weight for each row; micro-batches without terms run where others go on from them."""
    rows, rng = branching_rows(), random.Random(seed_of(5))
    mask = [[int(position >= 9 and rng.random() < 0.5) for position in range(len(row))] for row in rows]
    mask[7] = [0] * len(rows[7])  # a separate tree
    weights = torch.tensor([rng.uniform(-1, 1) for _ in rows], dtype=torch.float64)
    seen = []

    def loss_of(batch, logprobs):
        seen.extend(zip(batch.rows.tolist(), batch.positions.tolist()))
        return (weights[batch.rows] * logprobs).sum()

    plan, given = plan_of(rows), np.concatenate(mask) if is_flat else mask
    model = make_model("qwen3_5")
    sums = step_sums(model, plan, loss_of, loss_mask=given, recompute=recompute)
    assert sorted(seen) == [(r, p) for r, row in enumerate(mask) for p in range(1, len(row)) if row[p]]
    step = espalier.Step(model, plan, loss_mask=given)
    assert step.num_terms == len(seen) and len(step) < len(StepPlan(plan, given).running) < len(plan)

    stock = make_model("qwen3_5")

    def of_rows():
        for row, chosen, weight in zip(rows, mask, weights):
            batch = padded([row])
            batch["labels"][~torch.tensor([chosen], dtype=torch.bool)] = -100
            if (batch["labels"][:, 1:] != -100).any():
                loss, gradients = sums_of(stock, [batch])
                yield -weight * loss, {name: -weight * gradient for name, gradient in gradients.items()}

    with InFloat64():
        losses, gradients = zip(*of_rows())
    theirs = {name: sum(each[name] for each in gradients) for name in gradients[0]}
    assert worst_error(sums, (sum(losses), theirs)) <= EXACT


def test_weights_of_terms():
    """loss_weights of rows: those of the loss of each row alone."""
    rows, rng = branching_rows(), random.Random(seed_of(8))
    weights = [[rng.choice([0.0, 0.25, 1.0, 2.5]) for _ in row] for row in rows]
    plan, model = plan_of(rows), make_model("qwen3_5")
    step = espalier.Step(model, plan, loss_mask=weights)
    assert step.total_weight == sum(sum(row[1:]) for row in weights)
    sums = step_sums(model, plan, lambda batch, logprobs: -(batch.weights * logprobs).sum(), loss_mask=weights)

    stock, total = make_model("qwen3_5"), 0
    with InFloat64():
        for row, weight in zip(rows, weights):
            if len(row) > 1:
                logits = stock(input_ids=torch.tensor([row])).logits[0, :-1]
                lost = torch.nn.functional.cross_entropy(logits, torch.tensor(row[1:]), reduction="none")
                total = total + (torch.tensor(weight[1:], dtype=torch.float64) * lost).sum()
    names, parameters = zip(*stock.named_parameters())
    theirs = total.item(), dict(zip(names, torch.autograd.grad(total, parameters)))
    assert worst_error(sums, theirs) <= EXACT
    assert worst_error(step_sums(model, plan, loss_mask=[[int(w > 0) for w in row] for row in weights]), theirs) > 1e-2


def test_entropy_temperature_and_scale_of_logits():
    """Against logits of the rows, with a loss of all of them."""
    rows, model = branching_rows(), make_model("granitemoehybrid")

    def loss(logprobs, entropy):
        return (logprobs.sum() - 0.3 * entropy.sum()) / 40

    step = espalier.Step(model, plan_of(rows))
    found = {}
    with InFloat64():
        for batch in step:
            logprobs, entropy = step.logprobs(batch, temperature=0.7, entropy=True)
            for key in zip(batch.rows.tolist(), batch.positions.tolist(), logprobs.tolist(), entropy.tolist()):
                found[key[:2]] = key[2:]
            step.backward(loss(logprobs, entropy))
        ours = {name: parameter.grad for name, parameter in model.named_parameters()}
        stock, total, most = make_model("granitemoehybrid"), 0, 0
        for number, row in enumerate(rows):
            distribution = torch.log_softmax(stock(torch.tensor([row])).logits[0, :-1] / 0.7, -1)
            logprobs = distribution.gather(1, torch.tensor(row[1:]).unsqueeze(1)).squeeze(1)
            entropy = -(distribution.exp() * distribution).sum(-1)
            total = total + loss(logprobs, entropy)
            for position in range(1, len(row)):
                theirs = logprobs[position - 1].item(), entropy[position - 1].item()
                most = max(most, *(abs(a - b) for a, b in zip(found[number, position], theirs)))
    assert most <= 1e-11 and len(found) == step.num_terms
    gradients = torch.autograd.grad(total, list(stock.parameters()))
    assert worst_error((1, ours), (1, dict(zip(ours, gradients)))) <= EXACT


@pytest.mark.parametrize("recompute", [False, True])
def test_hidden_states_for_another_head(recompute):
    rows, model, stock = branching_rows(), make_model("qwen3_5"), make_model("qwen3_5")
    step = espalier.Step(model, plan_of(rows), recompute=recompute)
    direction = torch.linspace(-1, 1, 32, dtype=torch.float64)
    with InFloat64():
        for batch in step:
            step.backward((step.hidden(batch) @ direction).tanh().sum())
        hidden = (stock.model(torch.tensor([row])).last_hidden_state[0, :-1] for row in rows)
        total = sum((of_row @ direction).tanh().sum() for of_row in hidden)
    names, parameters = zip(*((n, p) for n, p in stock.named_parameters() if not n.startswith("lm_head")))
    theirs = dict(zip(names, torch.autograd.grad(total, parameters)))
    assert worst_error((1, {name: model.get_parameter(name).grad for name in names}), (1, theirs)) <= EXACT


def test_lora():
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=3, target_modules=["q_proj", "in_proj_qkv", "down_proj"], init_lora_weights=False)

    def wrapped():
        model = make_model("qwen3_5")
        torch.manual_seed(3)
        return peft.get_peft_model(model, settings).to(torch.float64)

    theirs = alone(wrapped(), branching_rows())
    assert all("lora" in name for name in theirs[1])
    for recompute in (False, True):
        assert worst_error(step_sums(wrapped(), plan_of(branching_rows()), recompute=recompute), theirs) <= EXACT


@pytest.mark.parametrize("kind, dtype", [("qwen2-window", torch.bfloat16), ("qwen3_5", torch.bfloat16),
                                         ("granitemoehybrid-dense", torch.float32)])  # fmt: skip
def test_low_precision(kind, dtype, monkeypatch):
    """Errors against float64 are at most twice those of each row alone; float32 weights are under autocast to bfloat16.
    Gradients of weights are summed in float64 on both sides. No routers: which experts are chosen flips."""
    rows = sum((branching_rows(seed) for seed in range(10, 13)), [])

    def of_step(model, edges, _batch):
        sums = {}

        def collect(name, parameter):
            gradient, parameter.grad = parameter.grad.double(), None
            sums[name] = sums.get(name, 0) + gradient

        hooks = [parameter.register_post_accumulate_grad_hook(functools.partial(collect, name))
                 for name, parameter in model.named_parameters()]  # fmt: skip
        found, step = {}, espalier.Step(model, plan_of(rows, 20))
        assert step.num_terms == edges.count
        for batch in step:
            logprobs = step.logprobs(batch)
            found.update(zip(zip(batch.rows.tolist(), batch.positions.tolist()), logprobs.detach().double()))
            step.backward(-logprobs.sum() / step.num_terms)
        for hook in hooks:
            hook.remove()
        return verification.Results(torch.stack([found[key] for key in sorted(found)]), sums)

    monkeypatch.setattr(verification, "_of_batch", of_step)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        verification.verify(make_model(kind, dtype), padded(rows)).check()


@pytest.mark.parametrize("recompute", [False, True])
def test_memory_is_bounded_by_one_path(recompute, monkeypatch):
    tensors = weakref.WeakSet()
    num_live = lambda: sum(tensor.numel() > 0 for tensor in tensors)

    class Counted(Frame):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            tensors.update(self.leaves.values())

    monkeypatch.setattr("espalier.step.passes.Frame", Counted)
    plan = plan_of(branching_rows())
    depth = [0] * len(plan)
    for batch in plan:
        depth[batch.index] = 0 if batch.parent < 0 else depth[batch.parent] + 1
    model = make_model("qwen3", torch.float32)
    tensors_of_one = 2 * model.config.num_hidden_layers
    step, most = espalier.Step(model, plan, recompute=recompute), 0
    for batch in step:
        loss = -step.logprobs(batch).sum()
        assert num_live() <= tensors_of_one * (depth[batch.index] + 1)
        most = max(most, num_live())
        step.backward(loss)
    assert 2 * tensors_of_one < most <= tensors_of_one * max(depth)
    assert num_live() == 0  # though `loss` and its graph are still there


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_without_gradients(without):
    rows, model = branching_rows(), make_model("qwen3_5")
    step = espalier.Step(model, plan_of(rows), recompute=True)
    found = torch.zeros(len(rows), 20, dtype=torch.float64)
    with without(), InFloat64():
        for batch in step:
            found[batch.rows, batch.positions] = step.logprobs(batch)
            with pytest.raises(InputError, match="a loop with gradients"):
                step.backward(found.sum())
    assert abs(-found.sum() - expected("qwen3_5")[0]) <= EXACT * expected("qwen3_5")[0]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_loss_of_whole_rows():
    """Its gradient in the log-probabilities, from a loop without gradients, gives weights for a loop with them."""
    rows, model, stock = branching_rows(), make_model("qwen3_5"), make_model("qwen3_5")
    loss_of = lambda sums: (0.1 * (sums[:4] - sums[4:8])).sigmoid().log().sum()
    step = espalier.Step(model, plan_of(rows), recompute=True)
    table = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.float64)
    with InFloat64():
        with torch.no_grad():
            for batch in step:
                table[batch.rows, batch.positions] = step.logprobs(batch)
        loss_of(table.requires_grad_().sum(1)).backward()
        for batch in step:
            step.backward((table.grad[batch.rows, batch.positions] * step.logprobs(batch)).sum())
        distributions = (torch.log_softmax(stock(torch.tensor([row])).logits[0, :-1], -1) for row in rows)
        sums = [of_row.gather(1, torch.tensor(row[1:]).unsqueeze(1)).sum() for of_row, row in zip(distributions, rows)
                if len(row) > 1]  # fmt: skip
        gradients = torch.autograd.grad(loss_of(torch.stack(sums)), list(stock.parameters()))
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert worst_error((1, ours), (1, dict(zip(ours, gradients)))) <= EXACT


def test_a_step_again():
    """Gradients add up over loops, as over any backward passes. Inside, the model can be called as always."""
    model, other = make_model("qwen3"), padded(branching_rows(3))
    step = espalier.Step(model, plan_of(branching_rows(), 7))
    with InFloat64():
        with torch.no_grad():
            loss = model(**other).loss
        for _ in range(2):
            for batch in step:
                step.backward(-step.logprobs(batch).sum() / 2)
                with torch.no_grad():
                    assert torch.equal(model(**other).loss, loss)
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert worst_error((1, ours), (1, expected("qwen3")[1])) <= EXACT


# Negative controls: what is broken is seen.


def broken(kind, **options):
    return worst_error(step_sums(make_model(kind), plan_of(branching_rows()), **options), expected(kind)) > 1e-4


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_of_context_that_are_dropped(recompute, monkeypatch):
    monkeypatch.setattr(Frame, "seeds", lambda *_: ([], []))
    assert broken("qwen3", recompute=recompute)


def test_keys_of_other_tokens(monkeypatch):
    """Context in another order than its values."""
    stock = context.ContextRun.attention_contexts

    def turned(run, *given):
        arguments = stock(run, *given)[0]()
        return [lambda: arguments and arguments | {"context_k": [key.flip(0) for key in arguments["context_k"]]}]

    monkeypatch.setattr(context.ContextRun, "attention_contexts", turned)
    assert broken("qwen3")


def test_a_wrong_parent(monkeypatch):
    """The states of the first micro-batch in place of the parent's."""
    stock, first = context.ContextRun.inherited, {}

    def wrong(run, name):
        found = stock(run, name)
        if found is None:
            return None
        return first.setdefault((run._layer, name), found.detach().clone())[:1].expand_as(found)

    monkeypatch.setattr(context.ContextRun, "inherited", wrong)
    assert broken("mamba2")


@pytest.mark.parametrize("name", ["states", "tails"])
def test_states_that_do_not_branch(name, monkeypatch):
    """Every child goes on from the first cut of its parent."""
    stock = context.ContextRun.inherited

    def first(run, which):
        found = stock(run, which)
        return found if found is None or which != name else found[:1].expand_as(found)

    monkeypatch.setattr(context.ContextRun, "inherited", first)
    assert broken("mamba2")
