# SPDX-License-Identifier: Apache-2.0
"""What is checked of losses of patched models on two ranks, each with its own rows: gradients against those of one process,
each row alone."""

import functools
from unittest import mock

import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from espalier import ops
from espalier.errors import Unsupported
from espalier.hf import patch
from espalier.hf.float64 import InFloat64
from hf_models import alone, branching_rows, make_model, padded, worst_error
from rank_checks import shard, sharded

EXACT = 1e-12
ROWS = [row for row in branching_rows() if len(row) > 1]
LABELS = sum(len(row) - 1 for row in ROWS)


@functools.cache
def expected(kind):
    return alone(make_model(kind), ROWS)


def gradients_of(model, rank):
    """(the loss of all ranks, gradients) with the loss of the model, of which ranks take means."""
    batch = padded(ROWS[rank.rank :: rank.size])
    with InFloat64():
        output = model(**batch, num_items_in_batch=torch.tensor(LABELS / rank.size))
        output.loss.backward()
    total = output.loss.detach() / rank.size * LABELS
    torch.distributed.all_reduce(total)
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        found[name.removeprefix("module.")] = gradient * LABELS
    return output, (total.item(), found)


def sharded_models(rank):
    """FSDP2. The head is of the root, which has gathered it."""
    for kind in "qwen3", "granitemoehybrid", "llama":
        model = sharded(kind)
        with mock.patch.object(ops, "edge_logprobs", wraps=ops.edge_logprobs) as called:
            assert worst_error(gradients_of(model, rank)[1], expected(kind)) <= EXACT and called.called


def sharded_heads(rank):
    """A head that is gathered for itself gives logits of distinct tokens."""
    model = patch(make_model("qwen3"))
    for part in model.lm_head, *model.model.layers, model:
        shard(part)
    with mock.patch.object(ops, "edge_logprobs", wraps=ops.edge_logprobs) as called:
        assert worst_error(gradients_of(model, rank)[1], expected("qwen3")) <= EXACT and not called.called


def heads_with_the_norm(rank):
    model = patch(make_model("qwen3"))
    mesh = torch.distributed.init_device_mesh("cpu", (rank.size,))
    for part in [model.model.norm, model.lm_head], *model.model.layers, model:
        fully_shard(part, mesh=mesh)
    assert worst_error(gradients_of(model, rank)[1], expected("qwen3")) <= EXACT


def logits_of_sharded_models(rank):
    """Read before backward, on every rank."""
    batch = padded(ROWS[rank.rank :: rank.size])
    inside = batch["attention_mask"].bool()
    with InFloat64():
        theirs = make_model("qwen3")(**batch).logits
        ours = sharded("qwen3")(**batch).logits
    torch.testing.assert_close(ours[inside], theirs[inside], rtol=EXACT, atol=EXACT)


def logits_read_late_of_sharded_models(rank):
    """After backward where the head is gathered for itself; after a step never, also while the layer is gathered again."""
    batch = padded(ROWS[rank.rank :: rank.size])
    inside = batch["attention_mask"].bool()
    for is_head_apart in True, False:
        model = patch(make_model("qwen3"))
        for part in ([model.lm_head] if is_head_apart else []) + [*model.model.layers, model]:
            shard(part)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with InFloat64():
            expected = model(**batch).logits.detach()
            early, late, later = (model(**batch) for _ in range(3))
            early.loss.backward()
            if is_head_apart:
                torch.testing.assert_close(early.logits[inside], expected[inside], rtol=EXACT, atol=EXACT)
            optimizer.step()
            refuses(lambda: late.logits)
            found = model(**batch)
            refuses(lambda: later.logits)
            assert (found.logits - expected)[inside].abs().max() > 1e-3


def refuses(read):
    try:
        read()
    except Unsupported as refusal:
        assert "has changed since the forward pass" in str(refusal)
    else:
        raise AssertionError("expected a refusal, received logits")


def replicas(rank):
    """DistributedDataParallel, also where it goes through outputs."""
    for unused in False, True:
        model = DistributedDataParallel(patch(make_model("qwen3")), find_unused_parameters=unused)
        output, found = gradients_of(model, rank)
        assert worst_error(found, expected("qwen3")) <= EXACT and output.logits.shape[-1] == 61


def one_rank_counts_otherwise(rank):
    """Negative control."""
    model = sharded("qwen3")
    real = ops.edge_logprobs
    with mock.patch.object(ops, "edge_logprobs", lambda *args, **more: real(*args, **more) * (1 + rank.rank)):
        assert worst_error(gradients_of(model, rank)[1], expected("qwen3")) > 1e-3


CHECKS = {2: [sharded_models, sharded_heads, heads_with_the_norm, logits_of_sharded_models,
              logits_read_late_of_sharded_models, replicas, one_rank_counts_otherwise]}
