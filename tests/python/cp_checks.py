# SPDX-License-Identifier: Apache-2.0
"""What is checked on several ranks that have shards of the same micro-batches: losses and gradients against those of one
process, each row alone, and that what is broken on purpose is not exact."""

import contextlib
import functools
import os
import time
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import espalier
from conftest import seed_of
from cp_shapes import SHAPES
from espalier.distributed import RankError, Ranks
from espalier.hf import exchange, mixers, patch
from espalier.hf.families import backbone_of
from espalier.hf.float64 import InFloat64
from espalier.step import division, schedule
from hf_forced_routes import forced_alone, recorded_routes
from hf_models import SINCE, VERSION, alone, make_model, worst_error
from rank_checks import clear, fails_on_rank_1, gradients_of, refused

EXACT = 1e-12
WHOLE = 10**6  # a token budget that cuts nothing
IS_LONG = os.environ.get("ESPALIER_LONG_TESTS", "0") != "0"
FAMILIES = [kind for kind in ("qwen3", "gpt_oss", "qwen3_moe", "qwen3_5", "mamba2", "granitemoehybrid")
            if VERSION >= SINCE.get(kind, (0, 0))]  # fmt: skip


@functools.cache
def expected(kind, shape):
    """By rank 0 for all."""
    found = [alone(make_model(kind), SHAPES[shape]()) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]


def mesh_of(rank, context):
    return dist.init_device_mesh("cpu", (rank.size // context, context), mesh_dim_names=("dp", "cp"))


def sharded(model, mesh, *names):
    """A patched model over all ranks: one dimension, or replicas and shards."""
    mesh = mesh[names] if names else mesh["dp", "cp"]._flatten("dp_cp")
    for module in (*backbone_of(model).layers, model):
        fully_shard(module, mesh=mesh)
    return patch(model)


def by_step(ranks, model, rows, budget=WHOLE, dtype_of_sums=InFloat64, **options):
    """A step on rows; returns its sum of losses over the ranks, gradients by name, and its report."""
    share = ranks.share(rows)
    plan = espalier.plan(share.forest, token_budget=budget, strategy="tree-packing" if budget == WHOLE else "partition")
    return weighted(ranks, model, espalier.Step(model, plan, **options), share, dtype_of_sums)


def weighted(ranks, model, run, share=None, dtype_of_sums=InFloat64):
    """A step of log-probabilities by their weights; returns as by_step."""
    total, report = summed(ranks, run, share, dtype_of_sums)
    return total, gradients_of(model), report


def summed(ranks, run, share=None, dtype_of_sums=InFloat64):
    """A step of log-probabilities by their weights; returns its sum of losses over the ranks, and its report."""
    total = 0.0
    with dtype_of_sums(), ranks.step(share, run) as step:
        for batch in step:
            loss = -(batch.weights * run.logprobs(batch)).sum()
            run.backward(loss)
            total += loss.item()
    return ranks.sum(total), step.report


def cases(every):
    """(family, shape): all in the long form; else each family and each shape in turn."""
    return [(kind, shape) for row, kind in enumerate(FAMILIES) for column, shape in enumerate(SHAPES)
            if IS_LONG or (row + column) % every == 0]  # fmt: skip


def heads_apart():
    """Inside, every key head is exchanged by itself, so that attention runs meanwhile."""
    return mock.patch.object(exchange, "LEAST_BYTES", 0)


def copied(reads):
    """KeyReads that may be changed."""
    names = "picks", "order", "send", "receive", "most_received", "blocks", "positions"
    return SimpleNamespace(**{name: getattr(reads, name) for name in names})


def check_matrix(rank, context):
    mesh = mesh_of(rank, context)
    for kind in FAMILIES:
        model = sharded(make_model(kind), mesh)
        ranks = Ranks(model, mesh)
        for shape in (shape for of, shape in cases(min(rank.size + context + 1, len(SHAPES))) if of == kind):
            for budget, recompute in (WHOLE, False), (7, len(shape) % 2 == 0):
                clear(model)
                with heads_apart() if budget == WHOLE else contextlib.nullcontext():
                    loss, gradients, report = by_step(ranks, model, SHAPES[shape](), budget, recompute=recompute)
                error = worst_error((loss, gradients), expected(kind, shape))
                assert error <= EXACT, (kind, shape, budget, error, f"seed {seed_of(0)}")
                assert report.encoded_tokens >= espalier.build(SHAPES[shape]()).tree_tokens
        ranks.close()


def parts_of_two(rank):
    check_matrix(rank, 2)


def parts_of_four(rank):
    check_matrix(rank, 4)


def checkpoints(rank):
    """Layers are computed again in backward, where InFloat64 does not reach: beside the same without."""
    mesh = mesh_of(rank, rank.size)
    for kind in "gpt_oss", "qwen3_5":
        found = []
        for has_checkpoints in False, True:
            model = sharded(make_model(kind), mesh)
            if has_checkpoints:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            found.append(by_step(Ranks(model, mesh), model, SHAPES["deep"](), 9, torch.enable_grad)[:2])
        assert worst_error(*found) <= EXACT


def lora(rank):
    import peft

    settings = peft.LoraConfig(r=3, target_modules=["q_proj", "in_proj_qkv", "down_proj"], init_lora_weights=False)

    def wrapped():
        model = make_model("qwen3_5")
        torch.manual_seed(3)
        return peft.get_peft_model(model, settings).to(torch.float64)

    mesh, rows = mesh_of(rank, rank.size), SHAPES["star"]()
    model = wrapped()
    ranks = Ranks(DistributedDataParallel(patch(model)), mesh)
    loss, gradients, _ = by_step(ranks, model, rows, 7)
    assert worst_error((loss, gradients), alone(wrapped(), rows)) <= EXACT


def replicas(rank):
    """DistributedDataParallel, log-probabilities without gradients, and gradients that were there before."""
    mesh, model = mesh_of(rank, rank.size), patch(make_model("qwen3"))
    ranks = Ranks(DistributedDataParallel(model), mesh)
    rows = SHAPES["deep"]()
    share = ranks.share(rows)
    assert len(share.rows) == len(rows)
    run = espalier.Step(model, espalier.plan(share.forest, token_budget=WHOLE))
    with InFloat64(), ranks.step(share, run) as step, torch.no_grad():
        loss = ranks_sum(-sum(run.logprobs(batch).sum() for batch in step))
    assert abs(loss - expected("qwen3", "deep")[0]) <= EXACT * loss
    for _ in range(2):
        _, gradients, report = by_step(ranks, model, rows)
    assert worst_error((loss, {name: of / 2 for name, of in gradients.items()}), expected("qwen3", "deep")) <= EXACT
    assert report.parts_imbalance >= 0 and min(report.sent_bytes) > 0 and report.seconds is None
    assert "parts of micro-batches: the slowest is" in str(report)


def low_precision(rank):
    """bfloat16: errors beside those of one process."""
    mesh, rows = mesh_of(rank, rank.size), SHAPES["deep"]()
    for kind in "gpt_oss", "qwen3_5":
        found = []
        for dimensions in mesh, None:
            model = patch(make_model(kind, torch.bfloat16))
            ranks = Ranks(DistributedDataParallel(model), dimensions)
            given = rows if dimensions is not None or rank.rank == 0 else []
            run = espalier.Step(model, espalier.plan(espalier.build(given), token_budget=9, strategy="partition"))
            found.append(weighted(ranks, model, run, dtype_of_sums=torch.enable_grad)[1])
        exact = expected(kind, "deep")[1]
        ours, theirs = (sum((of[name].double() - exact[name]).square().sum() / exact[name].square().sum() for name in exact)
                        for of in found)  # fmt: skip
        assert ours <= 4 * theirs


def ranks_sum(value):
    dist.all_reduce(value)
    return value.item()


def weights_and_routes(rank):
    """Terms with weights and without any, and recorded routes, as one process has them."""
    mesh, rows = mesh_of(rank, rank.size), SHAPES["deep"]()
    model = make_model("qwen3_moe")
    recorded = recorded_routes(model, rows)
    theirs = forced_alone(model, rows, recorded)
    model = sharded(make_model("qwen3_moe"), mesh)
    ranks = Ranks(model, mesh)
    given = [{"input_ids": row, "routed_experts": each.tolist()} for row, each in zip(rows, recorded)]
    assert worst_error(by_step(ranks, model, given, 9, routed_experts=recorded)[:2], theirs) <= EXACT
    mask = [[0.5 * (place > 8) for place in range(len(row))] for row in rows]
    ours = []
    for ranks_of_one in Ranks(model, mesh), Ranks(DistributedDataParallel(patch(make_model("qwen3_moe")))):
        of_one = ranks_of_one.dimensions.context is None
        model = ranks_of_one.held.model.module if of_one else model
        clear(model)
        share_rows = rows if not of_one or rank.rank == 0 else []
        plan = espalier.plan(espalier.build(share_rows), token_budget=9, strategy="partition")
        run = espalier.Step(model, plan, loss_mask=mask[: len(share_rows)])
        ours.append(weighted(ranks_of_one, model, run)[:2])
    assert worst_error(*ours) <= EXACT


def shards_with_replicas(rank):
    """Meshes of two dimensions: replicas of shards, with rows and with parts along them."""
    for names, context in (("dp_replicate", "dp_shard"), None), (("dp", "cp"), 2):
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        model = sharded(make_model("qwen3"), mesh, *names)
        ranks = Ranks(model, mesh)
        assert (ranks.dimensions.context is None) == (context is None)
        for _ in range(2):
            loss, gradients, _ = by_step(ranks, model, SHAPES["deep"](), 9)
        theirs = expected("qwen3", "deep")
        assert worst_error((loss, {name: of / 2 for name, of in gradients.items()}), theirs) <= EXACT


def zero3(rank):
    """Layers gather parameters for themselves; of four ranks two have no row of the chain, and run dummies."""
    mesh = mesh_of(rank, 2)
    for kind, shape in ("gpt_oss", "deep"), ("qwen3_5", "chain"):
        model = sharded(make_model(kind), mesh)
        ranks = Ranks(model, mesh, mode="zero3")
        for _ in range(2):  # watched, and not
            clear(model)
            share, total = ranks.share(SHAPES[shape]()), 0.0
            run = espalier.Step(model, espalier.plan(share.forest, token_budget=45, strategy="tree-packing"))
            with InFloat64(), ranks.step(share, run) as step:
                for batch in step:
                    loss = -run.logprobs(batch).sum()
                    run.backward(loss)
                    total += loss.item()
            assert worst_error((ranks.sum(total), gradients_of(model)), expected(kind, shape)) <= EXACT
    assert sum(step.report.dummies) == (2 if rank.size == 4 else 0)


def heads_that_arrive_in_turn(rank):
    """Windows and sinks, with partition and checkpoints, and negative controls: heads of another group, gradients too."""
    mesh = mesh_of(rank, rank.size)
    for kind in "qwen3", "gpt_oss":
        model = sharded(make_model(kind), mesh)
        ranks, groups = Ranks(model, mesh), set()
        head_groups, receive = exchange.Route.head_groups, exchange.Exchange.receive

        def error(budget, dtype_of_sums=InFloat64):
            clear(model)
            found = by_step(ranks, model, SHAPES["deep"](), budget, dtype_of_sums)[:2]
            return found if dtype_of_sums is not InFloat64 else worst_error(found, expected(kind, "deep"))

        def counted(*given):
            groups.add(found := head_groups(*given))
            return found

        with heads_apart(), mock.patch.object(exchange.Route, "head_groups", counted):
            assert max(error(WHOLE), error(9)) <= EXACT
            assert groups == {model.config.num_key_value_heads}
            before = error(9, torch.enable_grad)
            model.gradient_checkpointing_enable({"use_reentrant": False})
            assert worst_error(error(9, torch.enable_grad), before) <= EXACT
            model.gradient_checkpointing_disable()

        received = {}

        def repeated(of, turn, group, pending):
            turn, received[group] = receive(of, turn, group, pending)
            return turn, received.get(group - 1, received[group]) + 0 * received[group]

        with heads_apart(), mock.patch.object(exchange.Exchange, "receive", repeated):
            assert error(WHOLE) > 1e-4
        with heads_apart(), mock.patch.object(exchange, "reversed", list, create=True):  # gradients of groups in another order
            assert error(WHOLE) > 1e-4
        assert error(WHOLE) <= EXACT


def what_is_broken(rank):
    """Negative controls: each gives other losses or gradients."""
    mesh = mesh_of(rank, rank.size)
    model = sharded(make_model("qwen3_5"), mesh)
    ranks = Ranks(model, mesh)

    def error():
        clear(model)
        return worst_error(by_step(ranks, model, SHAPES["deep"]())[:2], expected("qwen3_5", "deep"))

    assert error() <= EXACT
    with_states, keys, backwards = schedule._with_states, division.Division.keys, exchange.Route.backwards

    def wrong_child(tokens, prev, read):
        found = with_states(tokens, prev, read)
        found[found < -1] = -2 - (-2 - found[found < -1] + 1) % max(len(read), 1)
        return found

    def siblings(self, batch, *limits):
        reads = copied(keys(self, batch, *limits))
        reads.blocks[:, 4] = self.shard(batch).num_tokens
        return reads

    with mock.patch.object(schedule, "_with_states", wrong_child):
        assert error() > 1e-4
    with mock.patch.object(division.Division, "keys", siblings):
        assert error() > 1e-4
    with mock.patch.object(exchange.Route, "backwards", lambda of, rows: backwards(of, 2 * rows)):
        assert error() > 1e-4
    without = mock.PropertyMock(return_value=None)
    with mock.patch.object(espalier.Step, "_divided", without, create=True):  # a gradient reduced twice: every rank has all
        assert error() > 0.5
    assert error() <= EXACT


def a_scan_over_parts(rank):
    """A path over all ranks: each goes on from the states of all before it, in one exchange of a layer. With negative controls on a
    path so short that states are not forgotten."""
    mesh = mesh_of(rank, rank.size)
    for kind in (kind for kind in ("qwen3_5", "mamba2") if kind in FAMILIES):
        model = sharded(make_model(kind), mesh)
        ranks = Ranks(model, mesh)

        def error(shape, budget=WHOLE):
            clear(model)
            return worst_error(by_step(ranks, model, SHAPES[shape](), budget)[:2], expected(kind, shape))

        assert max(error("chain"), error("chain", 13), error("short chain")) <= EXACT
        with mock.patch.object(schedule, "_levels", lambda *_: []):  # from the rank before alone
            found = error("short chain")
            assert found > 1e-6, (kind, found)
        with mock.patch.object(mixers.Recurrence, "moved", lambda _of, _factors, states: states):
            found = error("short chain")
            assert found > 1e-6, (kind, found)


def what_is_refused(rank):
    model = patch(make_model("qwen3"))
    wrapped = DistributedDataParallel(model)
    names = lambda *names: dist.init_device_mesh("cpu", (1, rank.size), mesh_dim_names=names)
    refused(lambda: Ranks(wrapped, "cp"), "mesh: expected a DeviceMesh", "received str")
    refused(lambda: Ranks(wrapped, dist.init_device_mesh("cpu", (rank.size,))), "expected names of its dimensions")
    refused(lambda: Ranks(wrapped, names("dp", "pp")), "received pp", "not served")
    refused(lambda: Ranks(wrapped, names("dp", "cp")["dp"]), f"one of all {rank.size} ranks, received 1")
    mesh = names("dp", "cp")
    ranks = Ranks(wrapped, mesh)
    rows = SHAPES["star"]()
    share = ranks.share(rows)
    plan = espalier.plan(share.forest, token_budget=WHOLE)
    for given in None, plan:
        refused(ranks.step(share, given).__enter__, "expected an espalier.Step", f"received {type(given).__name__}")
    other = espalier.Step(model, plan, recompute=rank.rank == 1)
    refused(ranks.step(share, other).__enter__, "division: expected the same", "recompute=True on rank 1")
    mask = [[1] * (len(row) - (rank.rank > 0)) + [0] * (rank.rank > 0) for row in rows]
    other = espalier.Step(model, plan, loss_mask=mask)
    assert isinstance(refused(ranks.step(share, other).__enter__, "division: expected the same", "cp or tp group"), RankError)
    dropping = espalier.Step(patch(make_model("qwen3"), dropout="shared"), plan)
    refused(ranks.step(share, dropping).__enter__, 'dropout="shared"', "cp")
    assert worst_error(by_step(ranks, model, rows)[:2], expected("qwen3", "star")) <= EXACT


def one_fails(rank):
    """A rank that is not in an exchange hears of it before the next one."""
    from espalier.distributed import alarm

    mesh, model, rows = mesh_of(rank, rank.size), patch(make_model("qwen3")), SHAPES["star"]()
    ranks = Ranks(DistributedDataParallel(model), mesh)
    run = espalier.Step(model, espalier.plan(ranks.share(rows).forest, token_budget=9, strategy="partition"))

    def failing():
        with ranks.step(None, run) as step:
            for batch in step:
                if rank.rank == 1:
                    raise KeyError("not there")
                while step._alarm.failure is None:
                    time.sleep(0.01)
                run.logprobs(batch)

    with mock.patch.object(alarm, "SECONDS_TO_LEAVE", 600):
        fails_on_rank_1(rank, failing)
    assert worst_error(by_step(ranks, model, rows)[:2], expected("qwen3", "star")) <= EXACT


CHECKS = {2: [parts_of_two, checkpoints, lora, replicas, low_precision, zero3, what_is_broken, what_is_refused, one_fails,
              heads_that_arrive_in_turn],
          4: [parts_of_four, parts_of_two, a_scan_over_parts, zero3, weights_and_routes, shards_with_replicas]}  # fmt: skip
