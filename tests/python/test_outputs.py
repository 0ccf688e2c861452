# SPDX-License-Identifier: Apache-2.0
"""Standard output that is full or closed, of every command."""

import os
import signal
import subprocess

import pytest

from conftest import REPOSITORY
from small_models import write_rows
from test_faults import rows_of


@pytest.fixture
def data(tmp_path):
    return write_rows(tmp_path / "rows.jsonl", rows_of(6))


def outputs(model, data, tmp_path):
    """A command line for everything that writes to standard output."""
    common = ["--model", model, "--data", data]
    config = model.parent / "config.json"
    yield from ([word] for word in ("--version", "--help"))
    yield from ([command, "--help"] for command in ("inspect", "plan", "train", "logprobs", "sample", "verify", "bench", "device", "synth"))
    yield ["inspect", *common]
    yield ["inspect", *common, "--json"]
    yield ["plan", *common, "--no-calibration"]
    yield ["plan", "--data", data, "--json"]
    yield ["train", *common, "--out", tmp_path / "run", "--no-calibration", "--dry-run"]
    yield ["logprobs", *common, "-o", tmp_path / "logprobs.jsonl"]
    yield ["sample", *common, "-o", tmp_path / "samples.jsonl", "--max-new-tokens", 2]
    yield ["verify", *common, "--json"]
    yield ["verify", *common]
    yield ["bench", *common, "--repeats", 1, "--warmup", 0, "--tree-only"]
    yield ["device"]
    yield ["synth", "-o", tmp_path / "synth.jsonl", "--trees", 1]
    yield ["init", "--config", config, "--out", tmp_path / "made"]
    yield ["prepare", "--help"]


def test_results_that_cannot_be_written_are_a_failure(model, data, tmp_path):
    for command in outputs(model, data, tmp_path):
        words = [REPOSITORY / "bin/espalier", *map(str, command)]
        with open("/dev/full", "wb") as full:
            failed = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
        assert failed.returncode not in (0, 3) and failed.returncode > 0, (command, failed.stderr)
        last = failed.stderr.strip().splitlines()[-1]
        assert "No space left on device" in last, (command, failed.stderr)
        if command[0] != "prepare":
            assert last == "espalier: error: cannot write to standard output: No space left on device", last


def test_a_closed_pipe_ends_a_command_without_a_word(data):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([REPOSITORY / "bin/espalier", "inspect", "--data", data, "--json"], stdout=writing,
                          stderr=subprocess.PIPE, text=True)  # fmt: skip
    os.close(writing)
    assert done.returncode == -signal.SIGPIPE
    (read,) = done.stderr.splitlines()  # what every command says of its data
    assert read.startswith(f"{data}: 6 trajectories")
