# SPDX-License-Identifier: Apache-2.0
"""Ranks that write a checkpoint together, of which one is killed, or whose calls to the file system fail, in every phase of it: what was
saved stays whole, and a resumed run comes to the bits of one that was never disturbed.

`failing_calls.cpp` does it. A dozen runs here; `--long` (or ESPALIER_LONG_TESTS=1) takes every call of every rank.
"""

import errno
import os
import random
import signal

import pytest

from conftest import seed_of
from engines import init_model
from small_models import write_rows
from test_failing_calls import library, phase  # noqa: F401
from test_faults import checkpoint, last_of_each, leftovers, rows_of, saved_steps
from train_ranks import outcomes

pytest.importorskip("torch.distributed")

STEPS = 2
RANKS = 2


def same(one, other):
    names = {file.name for file in one.iterdir()} | {file.name for file in other.iterdir()}
    assert {f"{kind}-0000{rank}-of-00002.safetensors" for kind in ("model", "optimizer") for rank in (1, 2)} <= names
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("rank-kills")


@pytest.fixture(scope="module")
def job(folder, espalier):
    """A job of two ranks that train into a folder. `variables` of each are those of failing_calls.cpp."""
    model = init_model(espalier, folder / "init")
    rows = write_rows(folder / "rows.jsonl", rows_of(6))

    def make(name, out, *more, variables=({}, {}), lane=0):
        words = ["train", "--model", model, "--data", rows, "--out", folder / out, "--batch-size", 2, "--learning-rate", 1e-3, "--steps", STEPS,
                 "--save-every", 1, "--no-calibration", "--threads", 1, *more]  # fmt: skip
        words = last_of_each(words)
        below = {"FAIL_BELOW": f"{folder / out}/checkpoints/"}
        return {"name": name, "arguments": [[str(word) for word in words]] * RANKS, "variables": [{**below, **each} for each in variables],
                "lane": lane}

    return make


@pytest.fixture(scope="module")
def run(folder, library):
    """Of many jobs a few at a time, which have a limit of time together."""
    def start(jobs):
        return {name: end for i in range(0, len(jobs), 20) for name, end in outcomes(folder, jobs[i : i + 20], LD_PRELOAD=str(library)).items()}
    return start


@pytest.fixture(scope="module")
def calls(folder, job, run):
    """Of each rank, in a run that nothing disturbs."""
    logs = [folder / f"calls.{rank}" for rank in range(RANKS)]
    found = run([job("whole", "whole", variables=[{"FAIL_LOG": str(log)} for log in logs])])
    assert found["whole"][0] == [0, 0], found
    return [log.read_text().splitlines() for log in logs]


def chosen(calls, rank, number, long_tests, step=2):
    """Calls of a checkpoint: all in the long form, else each phase once, up to `number`."""
    suitable = [at for at, call in enumerate(calls[rank], 1) if f"step_{step}" in call]
    if long_tests:
        return suitable
    generator = random.Random(seed_of(31 + rank))
    by_phase = {}
    for at in suitable:
        by_phase.setdefault(phase(calls[rank][at - 1]), []).append(at)
    picked = [generator.choice(each) for each in by_phase.values()]
    return generator.sample(picked, min(number, len(picked)))


def test_each_rank_writes_its_own_files_alone(calls):
    names = [{call.split("/")[-1] for call in each if call.startswith("rename") and ".partial" in call} for each in calls]
    shared = {"config.json", "generation_config.json", "manifest.json", "model.safetensors.index.json", "trainer_state.json"}
    assert names[1] == {"model-00002-of-00002.safetensors", "optimizer-00002-of-00002.safetensors"}
    assert names[0] - shared == {"model-00001-of-00002.safetensors", "optimizer-00001-of-00002.safetensors"}


@pytest.mark.parametrize("more", [[], ["--save-in-background"]])
def test_a_rank_that_is_killed_at_any_call_of_a_checkpoint_loses_nothing(folder, job, run, calls, more, long_tests):
    jobs = []
    step = 1 if more else 2  # the last one is not written in the background
    cases = [(rank, at) for rank in range(RANKS) for at in chosen(calls, rank, 2 if more else 4, long_tests, step)]
    for number, (rank, at) in enumerate(cases):
        out = f"killed-{len(more)}-{number}"
        variables = [{"FAIL_AT": str(at if each == rank else 0)} for each in range(RANKS)]
        lane = number % 4  # the rank that is left waits for seconds
        jobs += [job(out, out, *more, variables=variables, lane=lane), job(f"{out}, resumed", out, "--resume", *more, lane=lane)]
    found = run(jobs)
    for number, (rank, at) in enumerate(cases):
        out, call = f"killed-{len(more)}-{number}", calls[rank][at - 1]
        statuses, outputs = found[out]
        assert statuses[rank] == -signal.SIGKILL, (call, outputs)
        assert found[f"{out}, resumed"][0] == [0, 0], (call, found[f"{out}, resumed"][1])
        assert "cannot be used" not in found[f"{out}, resumed"][1][0], call
        assert saved_steps(folder / out) == [1, 2] and not leftovers(folder / out), call
        for step in (1, 2):
            same(checkpoint(folder / out, step), checkpoint(folder / "whole", step))


def test_a_rank_that_writes_for_long_is_waited_for_by_all(folder, job, run, calls):
    """In the background: the other one has written, and goes on with its steps."""
    more = ["--save-in-background", "--steps", 40, "--save-every", 20]
    late = next(at for at, call in enumerate(calls[1], 1) if call.startswith("write"))
    found = run([job("late", "late", *more, variables=[{}, {"FAIL_AT": str(late), "FAIL_HOW": "-1"}]), job("in time", "in-time", *more)])
    for name in ("late", "in time"):
        assert found[name][0] == [0, 0], found
    said = found["late"][1][0]
    assert "step 21/40" in said and said.index("step 21/40") < said.index("step_20"), said
    for step in (20, 40):
        same(checkpoint(folder / "late", step), checkpoint(folder / "in-time", step))


def test_a_call_of_one_rank_that_fails_is_the_error_of_all(folder, job, run, calls, long_tests):
    """At the last step, which is not tried again: the one before stays, and the message is that of the rank."""
    suitable = [at for at in chosen(calls, 1, 3, long_tests) if phase(calls[1][at - 1])[0] in ("open", "write", "fsync", "rename")]
    jobs = []
    for at in suitable:
        variables = [{}, {"FAIL_AT": str(at), "FAIL_HOW": str(errno.ENOSPC)}]
        jobs += [job(f"full-{at}", f"full-{at}", variables=variables), job(f"full-{at}, resumed", f"full-{at}", "--resume")]
    found = run(jobs)
    for at in suitable:
        statuses, outputs = found[f"full-{at}"]
        out = folder / f"full-{at}"
        assert statuses == [1, 1], outputs
        assert "rank 1: " in outputs[0] and os.strerror(errno.ENOSPC) in outputs[0] and "saved" in outputs[0], outputs
        assert found[f"full-{at}, resumed"][0] == [0, 0], found
        assert saved_steps(out) == [1, 2] and not leftovers(out)
        for step in (1, 2):
            same(checkpoint(out, step), checkpoint(folder / "whole", step))
