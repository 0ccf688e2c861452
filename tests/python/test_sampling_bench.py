# SPDX-License-Identifier: Apache-2.0
"""bench/sampling.py on a tiny model: the table that it makes, and that both sides must agree."""

import subprocess
import sys

import pytest

from conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "bench"))
import sampling


@pytest.mark.nightly
def test_the_table(espalier, tmp_path):
    espalier("init", "--config", REPOSITORY / "examples/tiny_llama.json", "--out", tmp_path / "tiny")
    command = [sys.executable, REPOSITORY / "bench/sampling.py", "--quick", "--model", tmp_path / "tiny", "--threads", 1,
               "-o", tmp_path / "table.md"]  # fmt: skip
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "greedy: the first 8 of 8 tokens agree" in done.stderr, done.stderr
    assert done.stdout == (tmp_path / "table.md").read_text()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines() if line[:1] == "|"]
    assert table[0] == list(sampling.COLUMNS)
    assert [row[:2] for row in table[2:]] == [[dtype, size] for dtype in ("float32", "bfloat16") for size in ("1", "8")]
    assert all(float(row[-1]) > 0 for row in table[2:])


def test_completions_that_differ_are_an_error(espalier, tmp_path, monkeypatch, capsys):
    espalier("init", "--config", REPOSITORY / "examples/tiny_llama.json", "--out", tmp_path / "tiny")

    def other(task, dtype, batch_size, **_):
        return {"mismatch": {"largest": 0}}, [{"input_ids": task.prompt + [1] * task.tokens}]

    monkeypatch.setattr(sampling, "by_espalier", other)
    assert sampling.main(["--quick", "--model", str(tmp_path / "tiny"), "--threads", "1"]) == 1
    assert "tokens to agree, received 0" in capsys.readouterr().err
