# SPDX-License-Identifier: Apache-2.0
"""Recorded expert routes in espalier.Step: against the unpatched model, each row alone, with the same experts. In float64
to 1e-12."""

import numpy as np
import pytest
import torch

import espalier
from espalier.errors import Unsupported
from espalier.hf import routes
from espalier.hf.families import backbone_of
from espalier.hf.float64 import InFloat64
from hf_forced_routes import forced_alone, recorded_routes
from hf_models import branching_rows, make_model, worst_error

EXACT = 1e-12
KINDS = ["qwen3_moe", "qwen3_moe-some-layers", "glm4_moe", "gpt_oss", "qwen3_next", "qwen3_5_moe", "granitemoehybrid"]


def plan_of(rows, recorded, token_budget=3, strategy="partition"):
    given = [{"input_ids": row, "routed_experts": each.tolist()} for row, each in zip(rows, recorded)]
    return espalier.plan(espalier.build(given), token_budget=token_budget, strategy=strategy)


def case(kind):
    model, rows = make_model(kind), branching_rows()
    recorded = recorded_routes(model, rows)
    return model, rows, recorded, forced_alone(model, rows, recorded)


def step_sums(model, plan, **options):
    model.zero_grad()
    step, total = espalier.Step(model, plan, **options), 0
    for batch in step:
        loss = -step.logprobs(batch).sum()
        step.backward(loss)
        total += loss.item()
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_exact_in_float64(kind):
    """With a negative control: routes that are not replayed."""
    model, rows, recorded, expected = case(kind)
    plan = plan_of(rows, recorded)
    assert sum(batch.parent >= 0 for batch in plan) > 10
    with InFloat64():
        for recompute in (False, True):
            ours = step_sums(model, plan, routed_experts=recorded, recompute=recompute)
            assert worst_error(ours, expected) <= EXACT
        assert worst_error(step_sums(model, plan), expected) > 1e-4


def forms_of(recorded):
    """The same routes as people have them."""
    flat = torch.cat(recorded)
    return {"lists": [each.tolist() for each in recorded], "arrays": [each.short().numpy() for each in recorded],
            "one array": flat.numpy(), "one flat array": flat.flatten(1).numpy().astype(np.int32),
            "one tensor": flat, "rows of ids": [each.flatten(1) for each in recorded]}  # fmt: skip


def test_forms_of_routes():
    model, rows, recorded, expected = case("qwen3_moe")
    plan = plan_of(rows, recorded, 25, "tree-packing")
    for name, form in forms_of(recorded).items():
        with InFloat64():
            assert worst_error(step_sums(model, plan, routed_experts=form), expected) <= EXACT, name


@pytest.mark.parametrize("kind", ["qwen3_moe-some-layers", "granitemoehybrid"])
def test_routes_of_all_layers_and_files(kind, tmp_path):
    """Layers without a router are not read. Rows come from a file, routes with them."""
    model, rows, recorded, expected = case(kind)
    backbone = backbone_of(model)
    everywhere = []
    for each in recorded:
        table = torch.zeros(len(each), len(backbone.layers), each.shape[2], dtype=torch.int64)
        table[:, list(routes.routers_of(backbone))] = each
        everywhere.append(table)
    espalier.write(tmp_path / "rows.jsonl", [{"input_ids": row, "routed_experts": each.tolist()}
                                             for row, each in zip(rows, everywhere)])  # fmt: skip
    read = espalier.read(tmp_path / "rows.jsonl")
    plan = espalier.plan(espalier.build(read), token_budget=5, strategy="partition")
    with InFloat64():
        assert worst_error(step_sums(model, plan, routed_experts=read.routed_experts), expected) <= EXACT


def test_gradient_checkpointing():
    model, rows, recorded, _ = case("qwen3_next")
    plan = plan_of(rows, recorded, 7)
    theirs = step_sums(model, plan, routed_experts=recorded)
    model.gradient_checkpointing_enable()
    for recompute in (False, True):
        ours = step_sums(model, plan, routed_experts=recorded, recompute=recompute)
        assert worst_error(ours, theirs) <= EXACT


def test_a_step_without_routes_after_one_with_them():
    """Its routers choose; and so they do where nothing is recorded."""
    model, rows, recorded, _ = case("gpt_oss")
    plan = plan_of(rows, recorded)
    step_sums(model, plan, routed_experts=recorded)
    free = step_sums(model, plan)
    assert worst_error(free, step_sums(make_model("gpt_oss"), plan)) == 0
    unknown = [torch.full_like(each, -1) for each in recorded]
    assert worst_error(step_sums(model, plan, routed_experts=unknown), free) <= EXACT


def changed(value):
    def change(recorded):
        first = recorded[0].clone()
        first[2, 0] = torch.tensor(value)
        return [first, *recorded[1:]]

    return change


REFUSED = {
    "expected 9 rows, received 8": lambda recorded: recorded[:8],
    r"integers \[14, 1, 2\] or \[14, 2, 2\] in row 1 .*received int64 \[13, 1, 2\]": lambda recorded: [
        recorded[0], recorded[1][1:], *recorded[2:]],
    r"received int64 \[\d+, 1, 1\]": lambda recorded: [each[..., :1] for each in recorded],
    "received float32": lambda recorded: [each.float() for each in recorded],
    r"from 0 to \d, .*received \[0, 99\] for token 2 of the rows .* in router 0": changed([99, 0]),
    r"received \[1, 1\] for token 2": changed([1, 1]),
    "expected the same routes for tokens that rows share, received others; build the forest": lambda recorded: [
        (recorded[0] + 1) % 4, *recorded[1:]],
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(message):
    model, rows, recorded, _ = case("qwen3_moe-some-layers")
    with pytest.raises(Unsupported, match="routed_experts: .*" + message):
        espalier.Step(model, plan_of(rows, recorded), routed_experts=REFUSED[message](recorded))


def test_models_without_routers():
    rows = branching_rows()
    recorded = [torch.zeros(len(row), 2, 2, dtype=torch.int64) for row in rows]
    with pytest.raises(Unsupported, match="routed_experts: expected a model with routers.*'qwen3'"):
        espalier.Step(make_model("qwen3"), plan_of(rows, recorded), routed_experts=recorded)
