# SPDX-License-Identifier: Apache-2.0
"""What test_train_ranks.py runs on several ranks: espalier.Engine with a process group."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

import espalier
from engines import EXACT, engine_of, worst_error
from small_models import random_rows

MODEL = os.environ["ESPALIER_TEST_MODEL"]  # a folder, with room for others beside it


def engine(**options):
    return engine_of(MODEL, threads=1, **options)


def calls_are_those_of_one_process(rank):
    one, many = engine(), engine(process_group=dist.group.WORLD)
    rows = random_rows(7, "grpo")
    for _ in range(2):
        for options in ({"objective": "sft"}, {"objective": "grpo", "normalize": "sequence"},
                        {"objective": "gspo", "shared_targets": "once"}):  # fmt: skip
            expected, found = (each.forward_backward(rows, indices=range(8), **options) for each in (one, many))
            for name in ("loss", "grad_norm", "flat_tokens", "tree_tokens", "loss_terms"):
                assert found[name] == pytest.approx(expected[name], rel=EXACT, abs=EXACT), name
        assert worst_error(many.gradients(), one.gradients()) < 10 * EXACT
        one.optim_step(1e-2)
        many.optim_step(1e-2)
    folder = Path(MODEL).parent / f"saved by {rank.size}"
    many.save(folder)
    one.load(folder)
    assert all(np.array_equal(a, b) for a, b in zip(one.logprobs(rows), many.logprobs(rows)))
    for prompts in ([[5, 6, 7], [5, 6, 8], [9], [5, 6, 7, 8]], [[3]]):  # of one prompt, too: other ranks have none
        expected, found = (each.sample(prompts, samples=3, max_new_tokens=9, seed=4, prompt_logprobs=True) for each in (one, many))
        assert len(found) == len(expected)
        for mine, its in zip(found, expected):
            assert np.array_equal(mine["input_ids"], its["input_ids"]) and mine["trajectory_id"] == its["trajectory_id"]
            assert np.abs(mine["logprobs"] - its["logprobs"]).max() < 1e-11
        logprobs = b"".join(row["logprobs"].tobytes() for row in found)
        everyone = [b""] * rank.size
        dist.all_gather_object(everyone, logprobs)
        assert set(everyone) == {logprobs}


def an_error_of_one_is_one_of_all(rank):
    many = engine(process_group=dist.group.WORLD)
    rows = [[1, 2, 3], [1, 2, 4], [5, 6]]
    with pytest.raises(espalier.InputError, match="received 1000"):
        many.forward_backward([*rows, [1, 1000]] if rank.rank == 1 else rows)
    with pytest.raises(espalier.InputError, match="expected the same on all ranks"):
        many.forward_backward([*rows, [7, 8]] if rank.rank == 1 else rows)
    with pytest.raises(espalier.InputError, match="expected a name with a process group"):
        many.forward_backward(rows, lambda logprobs, positions: sum(each.sum() for each in logprobs))
    file = Path(MODEL).parent / "bad.jsonl"
    for call in (many.forward_backward, many.logprobs, many.sample):
        if rank.rank == 1:
            file.write_text('{"input_ids": [1, "two"]}\n')
        with pytest.raises(espalier.InputError, match=r"bad.jsonl:1: .*input_ids") as raised:
            call(file if rank.rank == 1 else rows)
        assert rank.rank == 1 or str(raised.value).startswith("rank 1: ")
    for call in (many.logprobs, many.sample):
        with pytest.raises(espalier.InputError, match="received 1000"):
            call([*rows, [1, 1000]] if rank.rank == 1 else rows)
        with pytest.raises(espalier.InputError, match="expected the same on all ranks"):
            call([*rows, [7, 8]] if rank.rank == 1 else rows)
    with pytest.raises(espalier.InputError, match="prompts and seed"):
        many.sample(rows, seed=rank.rank)
    assert many.gradients() == {}
    assert many.forward_backward(rows)["loss"] == pytest.approx(engine().forward_backward(rows)["loss"], rel=EXACT)


def a_failed_pass_of_one_is_one_of_all(rank):
    many = engine(process_group=dist.group.WORLD)
    rows = random_rows(7, "grpo")[:8]

    def fail(done, total):
        raise OSError("planned")

    for coefficient in (0, 0.1):  # without and with what routers have counted
        with pytest.raises(OSError if rank.rank == 1 else espalier.InputError, match="planned") as raised:
            many.forward_backward(rows, router_aux_loss_coef=coefficient, progress=fail if rank.rank == 1 else None)
        assert rank.rank == 1 or str(raised.value).startswith("rank 1: ")
        assert many.gradients() == {}
    learning_rate = -1.0 if rank.rank == 1 else 0.1
    many.forward_backward(rows)
    with pytest.raises(espalier.InputError, match="received -1"):
        many.optim_step(learning_rate)
    assert many.forward_backward(rows)["loss"] > 0


CHECKS = {2: [calls_are_those_of_one_process, an_error_of_one_is_one_of_all, a_failed_pass_of_one_is_one_of_all],
          3: [calls_are_those_of_one_process]}  # fmt: skip
