# SPDX-License-Identifier: Apache-2.0
"""What is checked on several ranks: gradients against those of one process, each row alone, and what is refused."""

import contextlib
import functools
import gc
import random
import time
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import espalier
from conftest import seed_of
from espalier.distributed import RankError, Ranks
from espalier.distributed.ranks import MODES
from espalier.hf import patch
from espalier.hf.families import backbone_of
from espalier.hf.float64 import InFloat64
from hf_models import alone, branching_rows, make_model, packed, worst_error
from rank_example import the_example

EXACT = 1e-12
BUDGET = 24


def rows_of_a_step():
    """Trees of unequal size: one that is too heavy for one rank, small ones, a row of one token."""
    rng = random.Random(seed_of(7))
    tokens = lambda n: [rng.randrange(61) for _ in range(n)]
    small = tokens(6)
    return branching_rows() + [small + tokens(3), small + tokens(5), tokens(11)]


@functools.cache
def expected(kind):
    return alone(make_model(kind), rows_of_a_step())


def sharded(kind, is_patched_first=True, dtype=torch.float64, **options):
    model = make_model(kind, dtype)
    if is_patched_first:
        patch(model)
    for module in (*backbone_of(model).layers, model):
        shard(module, **options)
    return model if is_patched_first else patch(model)


def shard(module, **options):
    fully_shard(module, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)), **options)


def batches_of(rows, budget=BUDGET, strategy="tree-packing"):
    """Batches of the micro-batches of rows, in the order of a plan."""
    plan = espalier.plan(espalier.build(rows), token_budget=budget, strategy=strategy)
    return [packed([rows[number] for number in batch.layout().trajectories]) for batch in plan]


def loss_of(model, batch):
    """The sum of -log p over the labels."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)


def train(ranks, model, rows, batches=None):
    """A step on rows; returns its sum of losses over the ranks, gradients by name, and the step."""
    with InFloat64():
        return train_as_is(ranks, model, rows, batches or batches_of)


def train_as_is(ranks, model, rows, batches):
    share = ranks.share(rows)
    total = 0.0
    with ranks.step(share, batches(share.rows)) as step:
        for batch in step:
            loss = loss_of(model, batch)
            loss.backward()
            total += loss.item()
    return ranks.sum(total), gradients_of(model), step


def gradients_of(model):
    whole = lambda gradient: gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return {name.removeprefix("module."): None if parameter.grad is None else whole(parameter.grad)
            for name, parameter in model.named_parameters()}  # fmt: skip


def clear(model):
    for parameter in model.parameters():
        parameter.grad = None


def refused(call, *words):
    """Runs what has to be refused, on all ranks, with all of `words`; returns the error."""
    try:
        call()
    except espalier.InputError as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"{missing} not in: {error}"
        return error
    raise AssertionError(f"expected an error with {words}")


def fails_on_rank_1(rank, call):
    """Runs what raises a KeyError on rank 1, of which the other ranks hear."""
    if rank.rank == 1:
        with pytest.raises(KeyError, match="not there"):
            call()
    else:
        assert isinstance(refused(call, "rank 1: KeyError: 'not there'"), RankError)


def gathered(rank):
    """Ranks run different numbers of micro-batches, and rank 1 in another order."""
    for kind, is_patched_first in ("qwen3", True), ("qwen3_5", False), ("qwen3_moe", True):
        model = sharded(kind, is_patched_first)
        ranks = Ranks(model)
        turned = lambda rows: batches_of(rows)[::-1 if rank.rank == 1 else 1]
        loss, gradients, step = train(ranks, model, rows_of_a_step(), turned)
        assert worst_error((loss, gradients), expected(kind)) <= EXACT
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        report = step.report
        assert report.dummies == (0,) * rank.size and min(report.seconds) > 0 and report.measured_imbalance >= 0
        assert report.predicted_imbalance == ranks.share(rows_of_a_step()).distribution.imbalance
        assert report.flat_tokens == sum(map(len, rows_of_a_step())) > report.encoded_tokens
        assert str(report).startswith(f"{rank.size} ranks, {report.encoded_tokens:,} of {report.flat_tokens:,} tokens")


def zero3(rank):
    """Ranks with fewer micro-batches run dummies; layers shard parameters again after each forward and backward."""
    for kind in "qwen3_moe", "qwen3":
        model = sharded(kind, reshard_after_forward=True)
        ranks = Ranks(model, mode="zero3")
        for is_watched in True, False:
            clear(model)
            loss, gradients, step = train(ranks, model, rows_of_a_step(), uneven(rank))
            assert worst_error((loss, gradients), expected(kind)) <= EXACT
            assert (step.report.seconds is not None) == is_watched
    assert step.report.dummies[0] > 0 == min(step.report.dummies)


def zero3_with_checkpoints(rank):
    """Layers are gathered once more in backward, where InFloat64 does not reach: beside the same without."""
    found = []
    for has_checkpoints in False, True:
        model = sharded("qwen3_5", reshard_after_forward=True)
        if has_checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        ranks = Ranks(model, mode="zero3")
        found.append(train_as_is(ranks, model, rows_of_a_step(), uneven(rank))[:2])
    assert worst_error(*found) <= EXACT


def uneven(rank):
    """One micro-batch on rank 0, one of each row on others."""
    return lambda rows: batches_of(rows, 10**6) if rank.rank == 0 else [packed([row]) for row in rows]


def partition(rank):
    """espalier.Step on trees in pieces: other numbers of forwards and backwards on every rank, in another order."""
    for kind, recompute in ("qwen3", False), ("qwen3_5", True):
        model = sharded(kind)
        ranks = Ranks(model)
        assert worst_error(by_step(ranks, model, rows_of_a_step(), "partition", recompute), expected(kind)) <= EXACT
        clear(model)
    rows = [[5, 6, 7, 8, 9, 10]]  # and nothing on other ranks
    model = sharded("qwen3")
    assert worst_error(by_step(Ranks(model), model, rows, "partition"), alone(make_model("qwen3"), rows)) <= EXACT
    model = sharded("qwen3")
    ranks = Ranks(model, mode="zero3")
    assert worst_error(by_step(ranks, model, rows_of_a_step(), "tree-packing"), expected("qwen3")) <= EXACT
    refused(lambda: by_step(ranks, model, rows_of_a_step(), "partition"), "received partition", 'mode="gathered"')
    inner = patch(make_model("qwen3"))
    ranks = Ranks(DistributedDataParallel(inner))
    assert worst_error(by_step(ranks, inner, rows_of_a_step(), "partition"), expected("qwen3")) <= EXACT


def by_step(ranks, model, rows, strategy, recompute=False):
    """A step on rows by espalier.Step; returns its sum of losses over the ranks, and gradients by name."""
    share = ranks.share(rows)
    plan = espalier.plan(share.forest, token_budget=4 if strategy == "partition" else BUDGET, strategy=strategy)
    run = espalier.Step(model, plan, recompute=recompute, loss_mask=[[1] * len(row) for row in share.rows])
    total = 0.0
    with InFloat64(), ranks.step(share, run) as step:
        for batch in step:
            loss = -run.logprobs(batch).sum()
            run.backward(loss)
            total += loss.item()
    return ranks.sum(total), gradients_of(model)


def a_context_that_is_lost(rank):
    """Negative control."""
    from espalier.hf.context import Frame

    model = sharded("qwen3")
    with mock.patch.object(Frame, "seeds", lambda *_: ([], [])):
        assert worst_error(by_step(Ranks(model), model, rows_of_a_step(), "partition"), expected("qwen3")) > 1e-4


def without_work(rank):
    """A tree on one rank, nothing on the others."""
    rows = [[5, 6, 7, 8, 9, 10]]
    reference = alone(make_model("qwen3"), rows)
    for mode in "gathered", "zero3":
        model = sharded("qwen3")
        ranks = Ranks(model, mode=mode)
        share = ranks.share(rows)
        assert [len(each.trajectories) for each in share.distribution].count(0) == rank.size - 1
        loss, gradients, step = train(ranks, model, rows)
        assert worst_error((loss, gradients), reference) <= EXACT
        assert sum(step.report.dummies) == (rank.size - 1 if mode == "zero3" else 0)
        with ranks.step(share, []) as step:
            assert list(step) == []
        assert step.report.dummies == (0,) * rank.size


def accumulation(rank):
    """Two steps add up; frozen parameters and such that nobody uses have no gradient."""
    model = make_model("qwen3")
    model.extra = torch.nn.Linear(3, 3, dtype=torch.float64)
    model.model.layers[0].mlp.requires_grad_(False)
    patch(model)
    for layer in model.model.layers:
        shard(layer)
    shard(model)
    ranks = Ranks(model)
    train(ranks, model, rows_of_a_step())
    loss, gradients, _ = train(ranks, model, rows_of_a_step())
    theirs = {name: None if "layers.0.mlp" in name else 2 * gradient for name, gradient in expected("qwen3")[1].items()}
    assert gradients.pop("extra.weight") is None is gradients.pop("extra.bias")
    assert worst_error((2 * loss, gradients), (2 * expected("qwen3")[0], theirs)) <= EXACT


def used_by_one_rank(rank):
    """A parameter that only the rows of rank 0 use has its gradient on all."""
    model = make_model("qwen3")
    model.extra = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)
    patch(model)
    shard(model)
    ranks = Ranks(model)
    with ranks.step():
        if rank.rank == 0:
            model.extra.weight.sum().backward()
    gradients = gradients_of(model)
    assert (gradients.pop("extra.weight") == 1).all() and set(gradients.values()) == {None}


def an_optimiser(rank):
    """Steps with clipped gradients lead to the parameters of one process."""
    model, twin = sharded("llama"), make_model("llama")
    ranks = Ranks(model)
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin))
    count = sum(len(row) - 1 for row in rows_of_a_step())
    for _ in range(2):
        share = ranks.share(rows_of_a_step())
        with InFloat64(), ranks.step(share) as step:
            for batch in batches_of(share.rows):
                (loss_of(model, batch) / count).backward()
        assert step.report.micro_batches is None
        for name, gradient in alone(twin, rows_of_a_step())[1].items():
            twin.get_parameter(name).grad = gradient / count
        norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5) for each in (model, twin)]
        assert abs(norms[0].full_tensor() - norms[1]) <= EXACT * norms[1]
        for optimiser in ours, theirs:
            optimiser.step()
            optimiser.zero_grad()
    for (_, a), (_, b) in zip(model.named_parameters(), twin.named_parameters()):
        torch.testing.assert_close(a.full_tensor(), b, rtol=1e-10, atol=1e-10)


def low_precision(rank):
    """bfloat16, reduced in float32: errors beside those of one process in bfloat16, each row alone."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded("qwen3", dtype=torch.float32, mp_policy=policy)
    ranks = Ranks(model)
    share = ranks.share(rows_of_a_step())
    with ranks.step(share):
        for batch in batches_of(share.rows):
            loss_of(model, batch).backward()
    ours = gradients_of(model)
    stock = make_model("qwen3", torch.bfloat16)
    theirs = {}
    for row in rows_of_a_step():
        stock.zero_grad()
        loss_of(stock, packed([row])).backward()
        for name, parameter in stock.named_parameters():
            theirs[name] = theirs.get(name, 0) + parameter.grad.float()
    exact = expected("qwen3")[1]
    size = lambda values: values.double().square().sum()
    error = lambda of: torch.stack([size(of[name] - exact[name]) / size(exact[name]) for name in exact]).mean().sqrt()
    assert error(ours) <= 2 * max(error(theirs), 2**-10)


def replicas(rank):
    """DistributedDataParallel: what was in `grad` stays, buffers are not sent in forwards."""
    model = make_model("qwen3")
    wrapped = DistributedDataParallel(patch(model))
    ranks = Ranks(wrapped)
    for _ in range(2):
        loss, gradients, _ = train(ranks, wrapped, rows_of_a_step())
    theirs = {name: 2 * gradient for name, gradient in expected("qwen3")[1].items()}
    assert worst_error((2 * loss, gradients), (2 * expected("qwen3")[0], theirs)) <= EXACT
    assert wrapped.require_backward_grad_sync
    refused(lambda: Ranks(wrapped, mode="zero3"), "expected a model of fully_shard")


def means_are_something_else(rank):
    """Negative controls: gradients that FSDP2 divides by the ranks, and rows that no rank has."""
    model = sharded("qwen3")
    ranks = Ranks(model)
    begin = ranks.held.begin

    def with_means(*args):
        begin(*args)
        for unit in ranks.held.units.values():
            unit.gradient_divide_factor = None

    ranks.held.begin = with_means
    assert worst_error(train(ranks, model, rows_of_a_step())[:2], expected("qwen3")) > 1e-2
    ranks.held.begin = begin
    clear(model)
    assert worst_error(train(ranks, model, rows_of_a_step()[:-1])[:2], expected("qwen3")) > 1e-4
    clear(model)
    assert worst_error(train(ranks, model, rows_of_a_step())[:2], expected("qwen3")) <= EXACT


def dummies_with_weight(rank):
    """Negative control, and a dummy of the user's own."""

    def dummy(model):
        logits = model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False).logits
        if has_weight:
            logits.register_hook(torch.ones_like)
        return logits

    model = sharded("qwen3")
    ranks = Ranks(model, mode="zero3", dummy=dummy)
    for has_weight in False, True:
        clear(model)
        error = worst_error(train(ranks, model, rows_of_a_step(), uneven(rank))[:2], expected("qwen3"))
        assert error > 1e-4 if has_weight else error <= EXACT


def other_plans(rank):
    """Ranks that do not agree are refused by name on all of them, and train on afterwards."""
    for mode in "gathered", "zero3":
        model = sharded("qwen3")
        ranks = Ranks(model, mode=mode)
        rows = rows_of_a_step()
        mine = rows[::-1] if rank.rank == 1 else rows
        refused(lambda: train(ranks, model, mine), "rows: expected the same on all ranks", " on rank 1", "same order")
        plan = espalier.plan(espalier.build(rows), token_budget=40 + rank.rank, strategy="tree-packing")
        refused(ranks.step(None, plan).__enter__, "token_budget: expected the same", "40 on rank 0", "41 on rank 1")
        if rank.rank == 0:
            refused(ranks.step("rows").__enter__, "share: expected what Ranks.share returns, received str")
        else:
            refused(ranks.step(None, []).__enter__, "rank 0: InputError: share: expected what")
        refused(lambda: ranks.sum(1) if rank.rank == 0 else ranks.step(None, []).__enter__(),
                "order: expected the same", "a sum on rank 0", "the beginning of a step on rank")  # fmt: skip
        assert worst_error(train(ranks, model, rows)[:2], expected("qwen3")) <= EXACT


def other_models(rank):
    """Ranks are refused where they are made."""
    model = sharded("qwen3", is_patched_first=rank.rank == 0)
    refused(lambda: Ranks(model, mode="zero3" if rank.rank == 0 else "gathered"), "mode: expected the same",
            "zero3 on rank 0", "gathered on rank")  # fmt: skip
    with mock.patch("espalier.distributed.ranks._versions", return_value={"PyTorch": f"2.{rank.rank}"}):
        refused(lambda: Ranks(model), "PyTorch: expected the same on all ranks, received 2.0 on rank 0; 2.1 on rank 1")
    model = make_model("qwen3")
    model.model.layers[0].mlp.requires_grad_(rank.rank == 0)
    shard(model)
    refused(lambda: Ranks(model), "model: expected the same")
    refused(lambda: Ranks(make_model("llama")), "expected a model of fully_shard or Distr", "received LlamaForCausalLM")
    model = make_model("llama")
    for layer in model.model.layers:
        shard(layer)
    refused(lambda: Ranks(model), "call fully_shard on the model itself")
    refused(lambda: Ranks(model, mode="zero2"), "mode: expected gathered or zero3, received 'zero2'")
    refused(lambda: Ranks(patch(make_model("llama"), check=True)), "check=True", "espalier.hf.verify")
    model = make_model("llama")
    shard(model, ignored_params={model.model.norm.weight})
    refused(lambda: Ranks(model), "model.norm.weight: expected a parameter that fully_shard has sharded")


def another_mesh(rank):
    """Replicas of shards, and what is no mesh of all ranks, or of other shards."""
    mesh = dist.init_device_mesh("cpu", (rank.size // 2, 2), mesh_dim_names=("replicas", "shards"))
    for mode in MODES:
        model = patch(make_model("llama"))
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh)
        found = train(Ranks(model, mode=mode), model, rows_of_a_step(), uneven(rank))
        assert worst_error(found[:2], expected("llama")) <= EXACT
    model = fully_shard(make_model("llama"), mesh=mesh["shards"])
    refused(lambda: Ranks(model), f"has sharded over all {rank.size} ranks", "on a mesh of shape [2]")
    model = make_model("llama")
    parallelize_module(model, mesh["shards"], {"model.layers.*.mlp.up_proj": ColwiseParallel()})
    fully_shard(model, mesh=mesh["replicas"])
    refused(lambda: Ranks(model), "on a mesh of shape [2]", "meshes of some ranks")


def what_zero3_refuses(rank):
    model = sharded("qwen3")
    ranks = Ranks(model, mode="zero3")
    rows = rows_of_a_step()
    refused(lambda: ranks.step(ranks.share(rows)).__enter__(), "micro_batches: expected those of this rank")
    plan = espalier.plan(espalier.build(rows), token_budget=10, strategy="partition")
    refused(lambda: ranks.step(None, plan).__enter__(), "received partition", 'mode="gathered"')
    refused(lambda: ranks.step(None, iter([])).__enter__(), "has no length")


def another_order(rank):
    """Equal numbers of forwards and backwards in another order: found before the collective in steps that are watched,
    and at the end in others. Without either, FSDP2 has wrong gradients."""
    batches = batches_of(rows_of_a_step())[:2]
    assert len(batches) == 2

    def out_of_order(ranks, model):
        with ranks.step(None, batches) as step:
            losses = []
            for batch in step:
                losses.append(loss_of(model, batch))
                if rank.rank == 0:
                    losses.pop().backward()
            while losses:
                losses.pop().backward()

    model = sharded("qwen3", reshard_after_forward=True)
    ranks = Ranks(model, mode="zero3")
    refused(lambda: out_of_order(ranks, model), "order: expected the same", "gathers ", " on rank 0", "same order")
    assert worst_error(train(ranks, model, rows_of_a_step())[:2], expected("qwen3")) <= EXACT
    clear(model)
    always = Ranks(model, mode="zero3", watch="always")
    assert worst_error(train(always, model, rows_of_a_step())[:2], expected("qwen3")) <= EXACT
    refused(lambda: out_of_order(always, model), "order: expected the same")

    def with_one_more():
        with ranks.step(None, []) as step:
            if rank.rank == 1:
                step._trace.add("gathers the root once more")

    refused(with_one_more, "order: expected the same", "0 collectives", "1 collectives")


def one_fails(rank):
    """An error on one rank ends the step on all, whatever they were at; no gradient of the step is left."""
    for mode in "gathered", "zero3":
        model = sharded("qwen3")
        ranks = Ranks(model, mode=mode)
        share = ranks.share(rows_of_a_step())

        def failing():
            with ranks.step(share, batches_of(share.rows)) as step:
                for batch in step:
                    loss = loss_of(model, batch)
                    if rank.rank == 1:
                        raise KeyError("not there")
                    loss.backward()

        fails_on_rank_1(rank, failing)
        assert set(gradients_of(model).values()) == {None}
        train(ranks, model, rows_of_a_step()[:5])
        before = gradients_of(model)
        with contextlib.suppress(KeyError), ranks.step(None, [0]) as step:
            for _ in step:
                loss_of(model, packed(rows_of_a_step())).backward()
                raise KeyError("on all ranks")
        assert worst_error((1, gradients_of(model)), (1, before)) == 0
        clear(model)
        assert worst_error(train(ranks, model, rows_of_a_step())[:2], expected("qwen3")) <= EXACT


def one_fails_in_a_step_that_is_not_watched(rank):
    """A rank that is not in a collective hears of it before the next one."""
    from espalier.distributed import alarm

    model = sharded("qwen3", reshard_after_forward=True)
    ranks = Ranks(model, mode="zero3")
    with ranks.step(None, []):
        pass

    def failing():
        with ranks.step(None, [0]) as step:
            for _ in step:
                if rank.rank == 1:
                    raise KeyError("not there")
                while step._alarm.failure is None:
                    time.sleep(0.01)
                loss_of(model, packed(rows_of_a_step()))

    with mock.patch.object(alarm, "SECONDS_TO_LEAVE", 600):
        fails_on_rank_1(rank, failing)
    assert set(gradients_of(model).values()) == {None}
    assert worst_error(train(ranks, model, rows_of_a_step())[:2], expected("qwen3")) <= EXACT


def groups_are_given_back(rank):
    groups = dist.distributed_c10d._world.pg_map
    model = sharded("llama")
    gc.collect()  # those of other checks
    before = len(groups)
    ranks = Ranks(model)
    assert len(groups) == before + 1 and ranks.sum(1) == rank.size
    ranks.close()
    ranks.close()
    assert len(groups) == before
    refused(lambda: ranks.sum(1), "Ranks: expected a call before close()")  # noqa: F821  deleted below
    ranks = Ranks(model)
    assert len(groups) == before + 1
    del ranks
    gc.collect()
    assert len(groups) == before
    refused(lambda: Ranks(model, mode="zero2"), "mode: expected")
    gc.collect()
    assert len(groups) == before


def loops_that_end_early(rank):
    for mode in "gathered", "zero3":
        model = sharded("qwen3")
        ranks = Ranks(model, mode=mode)

        def early(stops):
            with ranks.step(None, batches_of(rows_of_a_step())) as step:
                for batch in step:
                    loss_of(model, batch).backward()
                    if stops:
                        break

        if rank.rank == 0:
            refused(lambda: early(True), "expected a loop over the step to its end", "of its micro-batches out")
        else:
            refused(lambda: early(False), "rank 0: InputError: step: expected a loop")

        def nested():
            with ranks.step(None, []), ranks.step(None, []):
                pass

        refused(nested, "one at a time")
        assert worst_error(train(ranks, model, rows_of_a_step())[:2], expected("qwen3")) <= EXACT


def steps_without_ranks_that_end_early(rank):
    """espalier.Step under FSDP2 alone, the same rows on all ranks: gradients that were kept whole are in no later step,
    and neither are parameters from before the optimiser ran."""
    rows = rows_of_a_step()
    model = sharded("qwen3", reshard_after_forward=False)
    step = espalier.Step(model, espalier.plan(espalier.build(rows), token_budget=4, strategy="partition"))

    def loop(stops_after):
        with InFloat64():
            for number, batch in enumerate(step):
                step.backward(-step.logprobs(batch).sum())
                if number == stops_after:
                    break

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop(8)
    assert any("the loop over espalier.Step was left after" in str(each.message) for each in caught)
    loop(None)
    assert worst_error((1, gradients_of(model)), (1, expected("qwen3")[1])) <= EXACT
    other = make_model("qwen3")
    with torch.no_grad():
        for parameter in (*model.parameters(), *other.parameters()):
            parameter.mul_(0.9)
    clear(model)
    loop(None)
    assert worst_error((1, gradients_of(model)), (1, alone(other, rows)[1])) <= EXACT


def sums(rank):
    model = sharded("llama")
    ranks = Ranks(model)
    assert ranks.sum(0.1 * (rank.rank + 1)) == ranks.sum(0.1 * (rank.size - rank.rank))
    assert ranks.sum(3) == 3 * rank.size
    long = ranks._meeting.meet("a long message", text="x" * (1000 * rank.rank))
    assert [len(said["text"]) for said in long] == [1000 * each for each in range(rank.size)]


CHECKS = {
    2: [gathered, zero3, zero3_with_checkpoints, partition, a_context_that_is_lost, without_work, accumulation,
        used_by_one_rank, an_optimiser, low_precision, replicas, means_are_something_else, dummies_with_weight,
        other_plans, other_models, what_zero3_refuses, another_order, one_fails, loops_that_end_early,
        one_fails_in_a_step_that_is_not_watched, groups_are_given_back,
        steps_without_ranks_that_end_early, sums, the_example],
    4: [gathered, zero3, partition, without_work, other_plans, another_mesh, one_fails, sums],
}  # fmt: skip
