# SPDX-License-Identifier: Apache-2.0
"""espalier.titan: a small decoder that takes (tokens, positions, attention_masks), and where torchtitan is installed (0.3.0 on PyTorch
2.15) its debug models, on trees and on each row alone; on two ranks by FSDP2 as torchtitan applies it (titan_rank_checks.py).

FlexAttention has no backward on CPUs: attention is computed by its definition from the lists of blocks (titan_models.py)."""

import dataclasses
import importlib
import importlib.util
import re

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import espalier
from espalier.errors import InputError
from rank_processes import check_passed, outcomes
from test_megatron import EXACT, HEADS, WIDTH, case_of, each_row_alone, hidden_states, make_weights, plan_of, random_rows, worst_error
from titan_models import by_definition, config_of, listed, make, on_cpu, visible
from titan_rank_checks import CHECKS, DENSE, FLOAT32_INSIDE, error_of, on_rows, on_trees

HAS_TITAN = importlib.util.find_spec("torchtitan") is not None
titan = pytest.mark.skipif(not HAS_TITAN, reason="torchtitan is not installed")

KINDS = ["llama3", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss", "muse_glimmer"]


class Decoder(torch.nn.Module):
    """Of test_megatron's weights, with the signature of torchtitan's models."""

    def __init__(self, weights):
        super().__init__()
        self.weights = weights

    def forward(self, tokens, positions=None, attention_masks=None):
        def attention(query, key, value):
            heads = [part[0].transpose(0, 1)[None] for part in (query, key, value)]
            output, _ = by_definition(*heads, block_mask=attention_masks, scale=1)
            return [output[0].transpose(0, 1)]

        (hidden,) = hidden_states(self.weights, [tokens[0]], [positions[0]], attention)
        return (hidden @ self.weights[-1])[None]


def losses_by_rows(weights, batches, advantages, **mask):
    """As test_megatron's each_row_alone: states are not compared here, so they are the log-probabilities again."""
    model, logprobs, loss = Decoder(weights), {}, 0
    for batch in batches:
        logits = model(batch.tokens, positions=batch.positions, attention_masks=batch.block_mask(**mask))
        grid, carry = batch.to_rows(batch.logprobs(logits)), batch.to_rows(batch.weights.double())
        for number, row in enumerate(batch.rows.tolist()):
            length = int(batch.row_offsets[number + 1] - batch.row_offsets[number]) - 1
            logprobs[row] = torch.where(carry[number, :length] > 0, grid[number, :length], 0).detach()
            loss = loss - advantages[row] * grid[number].sum()
    return logprobs, torch.autograd.grad(loss, weights, retain_graph=True)


# ------------------------------------------------------------------------------------------------------------- a small decoder


def whole_loss(weights, batches, **mask):
    """The sum of PackedTrees.loss and its gradients."""
    model = Decoder(weights)
    loss = sum(batch.loss(model(batch.tokens, positions=batch.positions, attention_masks=batch.block_mask(**mask))) for batch in batches)
    return float(loss.detach()), torch.autograd.grad(loss, weights)


def expected_loss(weights, rows, mask):
    """The same of each row alone."""
    _, logprobs, gradients = each_row_alone(weights, rows, mask, [1.0] * len(rows))
    return -sum(float(torch.tensor(mask[row][1:], dtype=torch.float64) @ each) for row, each in logprobs.items()), gradients


def relative(result, expected):
    errors = [float((left - right).abs().max() / right.abs().max()) for left, right in zip(result[1], expected[1])]
    return max(abs(float(result[0]) - expected[0]) / abs(expected[0]), *errors)


@pytest.mark.parametrize("strategy", ["tree-packing", "append-only", "sequence-packing"])
@pytest.mark.parametrize("multiple, idle, block_size", [(1, 0, 128), (7, 2, 4), (16, 1, (4, 2))])
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradients_are_those_of_the_rows(seed, multiple, idle, block_size, strategy, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", lambda self: self)  # of torchtitan's compute_logprobs
    rows, mask, _, weights = case_of(seed)
    plan = plan_of(rows, strategy=strategy, most_leaves_first=seed == 1)
    batches = espalier.titan.pack(plan, loss_mask=mask, pad_to_multiple_of=multiple, micro_batches=len(plan) + idle)
    assert len(plan) > 1 and len(batches) == len(plan) + idle
    result = whole_loss(weights, batches, block_size=block_size)
    assert relative(result, expected_loss(weights, rows, mask)) <= EXACT


@pytest.mark.parametrize("seed", range(3))
def test_values_by_row(seed, monkeypatch):
    """A loss that differs by row, over to_rows of log-probabilities."""
    monkeypatch.setattr(torch.Tensor, "float", lambda self: self)
    rows, _, advantages, weights = case_of(seed)
    every = [[1.0] * len(row) for row in rows]
    states, logprobs, gradients = each_row_alone(weights, rows, every, advantages)
    result = losses_by_rows(weights, espalier.titan.pack(plan_of(rows)), advantages)
    assert worst_error((states, *result), (states, logprobs, gradients)) <= EXACT


def broken(batch, name):
    value = getattr(batch, name)
    wrong = {"subtree_end": torch.full_like(value, batch.tokens.shape[1]), "positions": torch.arange(value.shape[-1])[None],
             "sources": value.roll(1), "weights": value.sign(), "labels": torch.where(value < 0, value, value.roll(1).abs() % 23),
             "tokens": value.roll(1)}  # fmt: skip
    return dataclasses.replace(batch, **{name: wrong[name]})


@pytest.mark.parametrize("name", ["subtree_end", "positions", "sources", "labels", "weights", "tokens"])
def test_a_wrong_field_is_found(name):
    """Negative controls."""
    rows, mask, _, weights = case_of(0)
    batches = espalier.titan.pack(plan_of(rows, budget=80), loss_mask=mask)
    expected = expected_loss(weights, rows, mask)
    assert relative(whole_loss(weights, batches), expected) <= 1e-6
    assert relative(whole_loss(weights, [broken(batch, name) for batch in batches]), expected) > 1e-3


# ----------------------------------------------------------------------------------------------------------------------- masks


def on_path(batch, window):
    """Bool [T, T] by the rows themselves, and padding that sees itself."""
    length = batch.tokens.shape[1]
    seen = torch.eye(length, dtype=torch.bool)
    for begin, end in zip(batch.row_offsets, batch.row_offsets[1:]):
        path = batch.row_tokens[begin:end]
        distance = torch.arange(len(path))[:, None] - torch.arange(len(path))
        seen[path[:, None], path] |= (distance >= 0) & (distance < (window or length))
    return seen


@pytest.mark.parametrize("block_size", [1, 3, 4, (4, 2), (2, 6), 128])
@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("seed", range(4))
def test_blocks(seed, window, block_size):
    for batch in espalier.titan.pack(plan_of(random_rows(seed), budget=100), pad_to_multiple_of=9, micro_batches=2):
        mask = batch.block_mask(window=window, block_size=block_size)
        together = batch.block_mask(window=window, block_size=block_size, separate_full_blocks=False)
        seen = on_path(batch, window)
        length = len(seen)
        assert torch.equal(visible(mask), seen) and torch.equal(visible(together), seen) and together.full_kv_num_blocks is None
        stock = create_block_mask(mask.mask_mod, 1, None, length, length, device="cpu", BLOCK_SIZE=block_size)
        assert mask.shape == stock.shape and mask.BLOCK_SIZE == stock.BLOCK_SIZE and mask.seq_lengths == stock.seq_lengths
        blocks, stocks = ([listed(each.kv_num_blocks, each.kv_indices), listed(each.full_kv_num_blocks, each.full_kv_indices)]
                          for each in (mask, stock))  # fmt: skip
        assert torch.equal(blocks[1], stocks[1]) and not (stocks[0] & ~blocks[0]).any()
        assert window is not None or torch.equal(blocks[0], stocks[0])
        for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks", "kv_indices", "q_indices"):
            assert getattr(mask, name).shape == getattr(stock, name).shape and getattr(mask, name).dtype == torch.int32


def test_flex_attention_takes_the_mask():
    """torch's own FlexAttention, forward: eager, as CPUs allow."""
    (batch,) = espalier.titan.pack(plan_of(random_rows(1), budget=200), pad_to_multiple_of=8)
    query, key, value = torch.randn(3, 1, 2, batch.tokens.shape[1], 16, generator=torch.Generator().manual_seed(0))
    mask = batch.block_mask(window=4, block_size=16)
    expected, _ = by_definition(query, key, value, block_mask=mask)
    torch.testing.assert_close(flex_attention(query, key, value, block_mask=mask), expected)


# ------------------------------------------------------------------------------------------------------------ maps and refusals


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("multiple", [1, 5])
def test_maps_between_rows_and_tokens(seed, multiple):
    rows, seen = random_rows(seed), []
    for batch in espalier.titan.pack(plan_of(rows), pad_to_multiple_of=multiple):
        flat = [rows[row] for row in batch.rows.tolist()]
        assert batch.tokens.shape[1] % multiple == 0 and batch.row_offsets.tolist() == np.cumsum([0, *map(len, flat)]).tolist()
        assert batch.tokens[0, batch.row_tokens].tolist() == sum(flat, [])
        assert batch.positions[0, batch.row_tokens].tolist() == [place for row in flat for place in range(len(row))]
        is_token = batch.places >= 0
        assert torch.equal(batch.row_tokens[batch.places[is_token]], torch.arange(len(is_token))[is_token])
        assert not batch.tokens[0, ~is_token].any() and not batch.weights[0, ~is_token].any()
        assert batch.weights.sum() == sum(len(row) - 1 for row in flat)
        assert torch.equal(batch.labels >= 0, batch.weights > 0)
        grid = batch.to_rows(batch.tokens)
        assert grid.tolist() == [row[1:] + [0] * (grid.shape[1] - len(row) + 1) for row in flat]
        seen += batch.rows.tolist()
    assert sorted(seen) == list(range(len(rows)))


def test_padding_alone():
    (batch,) = espalier.titan.pack(plan_of([]), pad_to_multiple_of=4, micro_batches=1)
    assert batch.tokens.tolist() == [[0] * 4] and batch.subtree_end.tolist() == [1, 2, 3, 4] and batch.sources.tolist() == [0, 1, 2, 3]
    assert batch.to_rows(batch.tokens).shape == (0, 0) and batch.rows.tolist() == []
    weights = make_weights(0)
    loss, gradients = whole_loss(weights, [batch])
    assert loss == 0 and not any(gradient.any() for gradient in gradients)
    (single,) = espalier.titan.pack(plan_of([[7], [3]]))
    assert single.to_rows(single.tokens).shape == (2, 0) and single.labels.tolist() == [[-100, -100]]


def test_on_another_device():
    (batch,) = espalier.titan.pack(plan_of([[1, 2, 3], [1, 4]]))
    assert {value.device.type for value in vars(batch.to("meta")).values()} == {"meta"}


@pytest.mark.parametrize("call, message", [
    (lambda plan: espalier.titan.pack(plan, loss_mask=[[1, 1]]), "loss_mask: expected 2 rows, received 1"),
    (lambda plan: espalier.titan.pack(plan, pad_to_multiple_of=0), "pad_to_multiple_of: expected a whole number above 0, received 0"),
    (lambda plan: espalier.titan.pack(plan, micro_batches=0), "micro_batches: expected a whole number not below 1, those of the plan, received 0"),
    (lambda plan: espalier.titan.pack(plan, micro_batches=2.0), "micro_batches: expected a whole number not below 1"),
    (lambda plan: espalier.titan.pack(plan)[0].block_mask(window=0), "window: expected a whole number above 0, received 0"),
    (lambda plan: espalier.titan.pack(plan)[0].loss([torch.zeros(1, 3, 9)]), "outputs: expected a tensor [1, 3, *], received list"),
    (lambda plan: espalier.titan.pack(plan)[0].loss(torch.zeros(1, 4, 9)), "outputs: expected a tensor [1, 3, *], received [1, 4, 9]"),
    (lambda plan: espalier.titan.pack(espalier.build([[1]])), "plan: expected a Plan, as espalier.plan makes it, received Forest"),
])  # fmt: skip
def test_refusals(call, message):
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        call(plan_of([[1, 2, 3], [1, 2]]))


def test_a_partition_is_refused():
    plan = plan_of([[1, 2, 3, 4, 5], [1, 2, 3, 6, 7]], budget=4, strategy="partition")
    with pytest.raises(InputError, match='^plan: expected micro-batches of whole rows, as strategy="tree-packing" makes them'):
        espalier.titan.pack(plan)


# ------------------------------------------------------------------------------------------------------------------ torchtitan


@titan
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_models_of_torchtitan(kind, seed):
    rows, mask, _, _ = case_of(seed)
    with on_cpu():
        model = make(config_of(kind), seed)
        plan = plan_of(rows, budget=60)
        batches = espalier.titan.pack(plan, loss_mask=mask, pad_to_multiple_of=4, micro_batches=len(plan) + 1)
        assert error_of(on_trees(model, batches), on_rows(model, rows, mask)) <= (EXACT if kind in DENSE else FLOAT32_INSIDE)


@titan
@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
def test_masks_of_torchtitan_itself_are_wrong(kind):
    """A negative control: those that it makes of positions, for which trees are documents."""
    rows, mask, _, _ = case_of(0)
    with on_cpu():
        model = make(config_of(kind))
        batches = espalier.titan.pack(plan_of(rows, budget=60), loss_mask=mask)
        result = on_trees(model, batches, masks=lambda batch: model.get_attention_masks(batch.positions))
        assert error_of(result, on_rows(model, rows, mask)) > 1e-3
        windows = model.get_attention_masks(torch.arange(8)[None])
        masks = batches[0].attention_masks(model)
        assert masks.keys() == windows.keys() if kind == "gpt_oss" else isinstance(masks, BlockMask)


@titan
def test_the_compiled_kernel_of_torchtitan():
    """Its FlexAttention module with Inductor, forward in float32, as CPUs allow: by the lists of blocks."""
    attention = importlib.import_module("torchtitan.models.common.attention")
    (batch,) = espalier.titan.pack(plan_of([[*range(60), *range(30)], [*range(60), 5, 6], [3, 4, 5]], budget=200), pad_to_multiple_of=32)
    query, key, value = torch.randn(3, 1, batch.tokens.shape[1], HEADS, 4 * WIDTH, generator=torch.Generator().manual_seed(0))
    mask = batch.block_mask(block_size=16)
    assert mask.full_kv_num_blocks.sum() > 0 and mask.sparsity() > 0
    with torch.no_grad():
        result = attention.FlexAttention(attention.FlexAttention.Config(block_size=16))(query, key, value, attention_masks=mask)
    expected, _ = by_definition(*(part.transpose(1, 2) for part in (query, key, value)), block_mask=mask)
    torch.testing.assert_close(result, expected.transpose(1, 2))


@titan
def test_chunked_loss():
    losses = importlib.import_module("torchtitan.components.loss")
    rows, mask, _, _ = case_of(0)
    chunked = losses.ChunkedLossWrapper(losses.ChunkedLossWrapper.Config(num_chunks=4))
    chunked.loss_fn = espalier.titan.cross_entropy
    with on_cpu():
        model = make(config_of("llama3"))
        expected = on_rows(model, rows, mask)
        chunked.set_lm_head(model.lm_head)
        model._skip_lm_head = True
        whole = 0
        for batch in espalier.titan.pack(plan_of(rows), loss_mask=mask, pad_to_multiple_of=4):
            hidden = model(batch.tokens, positions=batch.positions, attention_masks=batch.attention_masks(model))
            loss, _ = chunked(batch.predictions(hidden), batch.labels, None, weights=batch.weights)
            loss.backward()
            whole += float(loss)
    result = whole, {name: parameter.grad for name, parameter in model.named_parameters()}
    assert error_of(result, expected) <= FLOAT32_INSIDE  # it accumulates in float32


def with_other_masks():
    config = config_of("llama3")
    return type("Other", (type(config.build()),), {"get_attention_masks": lambda self, positions: None})(config)


@titan
@pytest.mark.parametrize("make_model, received", [
    (lambda: torch.nn.Linear(1, 1), "Linear$"),
    (lambda: config_of("llama3", "varlen").build(), "Llama3Model with VarlenAttention in a layer$"),
    (lambda: importlib.import_module("torchtitan.models.deepseek_v3").deepseekv3_configs["debugmodel"](
        attn_backend="flex", moe_comm_backend="standard", num_mtp_layers=1).build(), "DeepSeekV3Model with multi-token prediction"),
    (with_other_masks, "Other with masks of test_titan$"),
])  # fmt: skip
def test_models_that_are_refused(make_model, received):
    (batch,) = espalier.titan.pack(plan_of([[1, 2, 3]]))
    with torch.device("meta"):
        model = make_model()
    with pytest.raises(InputError, match=f"^model: expected a decoder of torchtitan with FlexAttention .* received {received}"):
        batch.attention_masks(model)


def test_without_torchtitan():
    (batch,) = espalier.titan.pack(plan_of([[1, 2, 3]]))
    if not HAS_TITAN:
        with pytest.raises(ImportError, match="torchtitan"):
            batch.attention_masks(torch.nn.Linear(1, 1))


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return outcomes("titan_rank_checks", tmp_path_factory.mktemp("ranks"), [2])


@titan
@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS[2]])
def test_on_ranks(result, name):
    check_passed(result, name, 2)
