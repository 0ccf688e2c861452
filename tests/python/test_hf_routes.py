# SPDX-License-Identifier: Apache-2.0
"""Recorded expert routes: patched models against the same models unpatched, each row alone, with the same experts. In
float64 to 1e-12."""

import copy

import pytest
import torch

from espalier import build
from espalier.errors import Unsupported
from espalier.hf import patch, routes, sharing, unpatch, verify
from espalier.hf.decisions import RouterChoices
from espalier.hf.families import backbone_of
from espalier.hf.float64 import InFloat64
from hf_forced_routes import forced_alone, recorded_routes
from hf_models import FORMS, alone, branching_rows, make_model, padded, sums_of, worst_error

EXACT = 1e-12
KINDS = ["qwen3_moe", "qwen3_moe-some-layers", "glm4_moe", "gpt_oss", "qwen3_next", "qwen3_5_moe", "granitemoehybrid"]


def batch_with(rows, recorded, form="right"):
    """A batch of the rows with their routes, [B, S, R, K], and nonsense at padding."""
    batch = FORMS[form](rows)
    table = torch.full((*batch["input_ids"].shape, *recorded[0].shape[1:]), 10**6)
    if form == "packed":
        table[0] = torch.cat(recorded)
    else:
        table[batch["attention_mask"].bool()] = torch.cat(recorded)
    return batch | {"routed_experts": table}


def case(kind):
    model, rows = make_model(kind), branching_rows()
    recorded = recorded_routes(model, rows)
    return model, rows, recorded, forced_alone(model, rows, recorded)


def replayed(model, batch):
    with InFloat64():
        return sums_of(patch(model), [batch])


@pytest.mark.parametrize("kind", KINDS)
def test_exact_in_float64(kind):
    """With a negative control: routes that are not replayed."""
    model, rows, recorded, expected = case(kind)
    batch = batch_with(rows, recorded)
    assert worst_error(replayed(model, batch), expected) <= EXACT
    del batch["routed_experts"]
    assert worst_error(replayed(model, batch), expected) > 1e-4


@pytest.mark.parametrize("form", ["left", "packed"])
def test_forms_of_batches(form):
    model, rows, recorded, expected = case("qwen3_moe")
    assert worst_error(replayed(model, batch_with(rows, recorded, form)), expected) <= EXACT


def test_tokens_of_different_routes_are_not_shared(monkeypatch):
    model, rows, recorded, _ = case("qwen3_moe")
    plain = build(rows).tree_tokens
    replayed(model, batch_with(rows, recorded))
    assert sharing(model).tree_tokens == plain + len(rows[5]) - 4  # from its fifth token on, row 5 is by itself
    monkeypatch.setattr(routes, "merge_keys", lambda recorded: torch.zeros(len(recorded), dtype=torch.int64).numpy())
    with pytest.raises(Unsupported, match="expected the same routes for tokens that rows share"):  # negative control
        replayed(model, batch_with(rows, recorded))


@pytest.mark.parametrize("kind", ["qwen3_moe-some-layers", "granitemoehybrid"])
def test_routes_of_all_layers(kind):
    """Those of layers without a router are not read; the order of a token's experts says nothing."""
    model, rows, recorded, expected = case(kind)
    batch = batch_with(rows, [row.flip(-1) for row in recorded])
    routers, given = routes.routers_of(backbone_of(model)), batch["routed_experts"]
    everywhere = torch.full((*given.shape[:2], len(backbone_of(model).layers), given.shape[3]), -7, dtype=torch.int16)
    everywhere[:, :, list(routers)] = given.to(torch.int16)
    assert worst_error(replayed(model, batch | {"routed_experts": everywhere}), expected) <= EXACT


@pytest.mark.parametrize("kind", ["glm4_moe", "gpt_oss"])
def test_tokens_without_recorded_routes(kind):
    """Their routers choose."""
    model, rows = make_model(kind), branching_rows()
    unknown = [torch.full_like(row, -1) for row in recorded_routes(model, rows)]
    assert worst_error(replayed(model, batch_with(rows, unknown)), alone(make_model(kind), rows)) <= EXACT


def test_layers_that_are_computed_again():
    """Two batches with different routes, whose layers are computed again in the backward pass of both."""
    rows, found = branching_rows(), []
    for is_checkpointed in (False, True):
        model = patch(make_model("qwen3_next"))
        if is_checkpointed:
            model.gradient_checkpointing_enable()
        batches = [batch_with(rows, recorded_routes(model, rows, seed)) for seed in (7, 8)]
        loss = sum(model(**batch).loss for batch in batches)
        loss.backward()
        found.append((loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}))
    assert worst_error(*found) <= EXACT


def test_copies_and_unpatched_models():
    model, rows, recorded, expected = case("qwen3_moe")
    batch = batch_with(rows, recorded)
    replayed(model, batch)
    twin = copy.deepcopy(model)
    unpatch(model)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert worst_error(alone(model, rows), alone(make_model("qwen3_moe"), rows)) == 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert worst_error(replayed(twin, batch), expected) <= EXACT
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in unpatch(twin).modules())


def changed(value):
    """Routes of the third token of the first row."""

    def change(batch):
        given = batch["routed_experts"].clone()
        given[0, 2, 0] = torch.tensor(value)
        return {"routed_experts": given}

    return change


REFUSED = {
    r"\[9, 20, 1, 2\] or \[9, 20, 2, 2\] .*received torch.int64 \[9, 20, 1, 1\]": lambda batch: {
        "routed_experts": batch["routed_experts"][..., :1]},
    "received torch.float32": lambda batch: {"routed_experts": batch["routed_experts"].float()},
    "received list": lambda _: {"routed_experts": [1]},
    r"from 0 to 3, .*received \[0, 4\] for token 2 of the rows \(padding not counted\) in router 0": changed([4, 0]),
    r"received \[1, 1\] for token 2": changed([1, 1]),
    r"received \[-1, 1\] for token 2": changed([1, -1]),
    r"received \[-2, -2\] for token 2": changed([-2, -2]),
    "expected output_router_logits=False, received True": lambda _: {"output_router_logits": True},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(message):
    model, rows = patch(make_model("qwen3_moe-some-layers", torch.float32)), branching_rows()
    batch = batch_with(rows, recorded_routes(model, rows))
    with pytest.raises(Unsupported, match="routed_experts: .*" + message):
        model(**batch | REFUSED[message](batch))


def test_where_routes_cannot_be_replayed():
    batch = padded(branching_rows()) | {"routed_experts": torch.zeros(9, 20, 2, 2, dtype=torch.int64)}
    with pytest.raises(Unsupported, match="routed_experts: expected a model with routers.*'qwen3'"):
        patch(make_model("qwen3", torch.float32))(**batch)
    model = patch(make_model("qwen3_moe", torch.float32))
    with torch.no_grad(), pytest.raises(Unsupported, match="routed_experts: expected none with a cache"):
        model(**batch, use_cache=True)


@pytest.mark.parametrize("kind, dtype", [("qwen3_moe", torch.float32), ("gpt_oss", torch.bfloat16),
                                         ("granitemoehybrid", torch.float32)])  # fmt: skip
def test_verify(kind, dtype, monkeypatch):
    """Of routes that are recorded for some rows. With a negative control: routers that do not replay them."""
    model, rows = make_model(kind, dtype), sum((branching_rows(seed) for seed in range(10, 13)), [])
    recorded = recorded_routes(model, rows)
    recorded[-1] = torch.full_like(recorded[-1], -1)
    recorded[-2] = torch.full_like(recorded[-2], -1)
    batch = batch_with(rows, recorded)
    report = verify(model, batch).check()
    num_routers = recorded[0].shape[1]
    assert report.flips.num_choices == num_routers * (len(rows[-1]) + len(rows[-2]))

    def no_replay(router, _args, output):
        replay = routes._told(router)
        if replay is not None:
            replay[0]().replayed.add(replay[1])

    monkeypatch.setattr(routes, "_replace_choice", no_replay)
    assert not verify(make_model(kind, dtype), batch).passed


def test_check_on_the_first_batch_replays_its_routes(monkeypatch):
    seen = []
    model, rows = patch(make_model("qwen3_moe", torch.float32), check=True), branching_rows()
    batch = batch_with(rows, recorded_routes(model, rows))
    monkeypatch.setattr("espalier.hf.verification.RouterChoices", lambda *args: seen.append(args[2]) or RouterChoices(*args))
    model(**batch).loss.backward()
    (recorded,) = seen
    assert (recorded >= 0).all()
