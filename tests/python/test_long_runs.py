# SPDX-License-Identifier: Apache-2.0
"""Runs that nobody watches: where rows come from while they go on, where weights go, and what they do without."""

import re
import subprocess

import pytest

from conftest import REPOSITORY
from test_faults import checkpoint, data, flags, last_of_each, same_checkpoint  # noqa: F401


@pytest.fixture(scope="module")
def espalier(espalier):
    return lambda *arguments, **options: espalier(*last_of_each(arguments), **options)


# ---- Rows on standard input ----------------------------------------------------------------------------------------


def test_rows_come_from_standard_input(espalier, flags, data, tmp_path):
    espalier("train", *flags, "--out", tmp_path / "file", "--steps", 4)
    words = last_of_each(["train", *flags, "--out", tmp_path / "pipe", "--steps", 4, "--data", "-"])
    done = subprocess.run([REPOSITORY / "bin/espalier", *words], input=data.read_bytes(), capture_output=True)
    assert done.returncode == 0, done.stderr
    same_checkpoint(checkpoint(tmp_path / "file", 4), checkpoint(tmp_path / "pipe", 4))


def test_a_bad_row_of_standard_input_is_named(flags, tmp_path):
    words = last_of_each(["train", *flags, "--out", tmp_path / "run", "--data", "-"])
    done = subprocess.run([REPOSITORY / "bin/espalier", *words], input=b'{"input_ids": [1, 2]}\n{"input_ids": [1, "a"]}\n',
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
