# SPDX-License-Identifier: Apache-2.0
"""Runs that nobody watches: where rows come from while they go on, where weights go, and what they do without."""

import random
import re
import signal
import subprocess

import pytest

from conftest import PROGRAM, seed_of
from small_models import write_rows
from test_faults import (STOPPED, checkpoint, data, flags, last_of_each, rows_of, same_checkpoint, saved_steps,  # noqa: F401
                         start, wait_until)  # fmt: skip


@pytest.fixture(scope="module")
def espalier(espalier):
    return lambda *arguments, **options: espalier(*last_of_each(arguments), **options)


# ---- Rows on standard input ----------------------------------------------------------------------------------------


def test_rows_come_from_standard_input(espalier, flags, data, tmp_path):
    espalier("train", *flags, "--out", tmp_path / "file", "--steps", 4)
    words = last_of_each(["train", *flags, "--out", tmp_path / "pipe", "--steps", 4, "--data", "-"])
    done = subprocess.run([PROGRAM, *words], input=data.read_bytes(), capture_output=True)
    assert done.returncode == 0, done.stderr
    same_checkpoint(checkpoint(tmp_path / "file", 4), checkpoint(tmp_path / "pipe", 4))


def test_a_bad_row_of_standard_input_is_named(flags, tmp_path):
    words = last_of_each(["train", *flags, "--out", tmp_path / "run", "--data", "-"])
    done = subprocess.run([PROGRAM, *words], input=b'{"input_ids": [1, 2]}\n{"input_ids": [1, "a"]}\n',
                          capture_output=True)  # fmt: skip
    assert done.returncode == 1 and b"/dev/stdin:2: field `input_ids`" in done.stderr, done.stderr


# ---- Checkpoints in the background ---------------------------------------------------------------------------------


def test_without_room_for_its_copy_a_checkpoint_is_waited_for(espalier, flags, tmp_path):
    budgeted = lambda out, budget, *more, **options: espalier(
        "train", *flags, "--out", tmp_path / out, "--steps", 3, "--memory-budget", budget, *more, **options)  # fmt: skip
    least = lambda *more: int(re.search(r"\((\d+) bytes\)", budgeted("none", "1KiB", *more, check=False).stderr).group(1)) + 1
    waits, copies = least(), least("--save-in-background")
    assert waits < copies
    said = "--save-in-background is off, because --memory-budget has no room"
    assert said in budgeted("tight", waits, "--save-in-background").stderr
    assert said not in budgeted("roomy", copies, "--save-in-background").stderr
    assert said not in budgeted("plain", waits).stderr
    same_checkpoint(checkpoint(tmp_path / "tight", 3), checkpoint(tmp_path / "plain", 3))
    # Where nothing fits, the error is that of the run that was asked for.
    assert said not in budgeted("nothing", waits - 2, "--save-in-background", check=False).stderr


# ---- Rows that come while the run goes on --------------------------------------------------------------------------


def come(folder, name, seed):
    """A file as a rollout worker writes it: renamed when it is whole."""
    folder.mkdir(exist_ok=True)
    write_rows(folder / f".{name}.partial", rows_of(4, seed=seed)).rename(folder / name)


@pytest.fixture
def following(flags, tmp_path):
    """The flags of a run that follows `tmp_path / "rows"`."""
    (tmp_path / "rows").mkdir()
    at = flags.index("--data")
    return [*flags[:at], *flags[at + 2 :], "--follow", tmp_path / "rows", "--steps", 1000]


def test_rows_are_trained_on_as_they_come(start, following, tmp_path):
    run, rows = tmp_path / "run", tmp_path / "rows"
    come(rows, "0001.jsonl", 1)
    process = start("train", *following, "--out", run)
    wait_until(lambda: "waiting for rows in" in process.said(), process)
    assert saved_steps(run) == [1, 2]  # four rows are two steps of --batch-size 2
    come(rows, "0002.jsonl", 2)
    wait_until(lambda: 4 in saved_steps(run), process)
    (rows / "stop").touch()
    assert process.wait() == 0 and saved_steps(run) == [1, 2, 3, 4], process.said()
    assert "step 4/1000" in process.said() and f"{rows / '0002.jsonl'}: 4 trajectories" in process.said()


def test_a_run_that_was_killed_goes_on_where_it_was(espalier, start, following, tmp_path):
    rows = tmp_path / "rows"
    for number in range(1, 6):
        come(rows, f"{number:04}.jsonl", number)
    (rows / "stop").touch()
    espalier("train", *following, "--out", tmp_path / "whole")
    run = tmp_path / "run"
    generator = random.Random(seed_of(23))
    for at in sorted(generator.sample(range(1, 10), 3)):
        process = start("train", *following, "--out", run, "--resume")
        wait_until(lambda: max(saved_steps(run), default=0) >= at, process)
        process.kill()
        process.wait()
    espalier("train", *following, "--out", run, "--resume")
    for step in range(1, 11):
        same_checkpoint(checkpoint(tmp_path / "whole", step), checkpoint(run, step))


def test_a_signal_ends_the_wait_for_rows(start, following, tmp_path):
    come(tmp_path / "rows", "0001.jsonl", 1)
    process = start("train", *following, "--out", tmp_path / "run", "--save-every", 0)
    wait_until(lambda: "waiting for rows in" in process.said(), process)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == STOPPED and saved_steps(tmp_path / "run") == [2], process.said()


def test_a_bad_file_is_named_and_taken_once_it_is_good(espalier, following, tmp_path):
    rows, run = tmp_path / "rows", tmp_path / "run"
    come(rows, "0001.jsonl", 1)
    (rows / "0002.jsonl").write_text('{"input_ids": [1, 2, "a"]}\n')
    (rows / "stop").touch()
    failed = espalier("train", *following, "--out", run, check=False)
    assert failed.returncode == 1 and f"{rows / '0002.jsonl'}:1: field `input_ids`" in failed.stderr, failed.stderr
    come(rows, "0002.jsonl", 2)
    espalier("train", *following, "--out", run, "--resume")
    assert saved_steps(run) == [1, 2, 3, 4]


def test_what_a_run_cannot_follow_is_refused(espalier, following, data, tmp_path):
    refusal = lambda *more: espalier("train", *following, "--out", tmp_path / "run", *more, check=False).stderr
    assert "--follow: cannot be combined with --data" in refusal("--data", data)
    assert "--follow: requires --steps" in refusal("--steps", 0)
    assert "--follow: expected a folder" in refusal("--follow", tmp_path / "nowhere")
    come(tmp_path / "rows", "1.jsonl", 1)
    (tmp_path / "rows/stop").touch()
    assert refusal() and saved_steps(tmp_path / "run") == [1, 2]
    again = espalier("rerun", tmp_path / "run", "--out", tmp_path / "again", check=False)
    assert again.returncode == 1 and "--follow: cannot be combined with --repeats" in again.stderr, again.stderr
