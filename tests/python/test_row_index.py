# SPDX-License-Identifier: Apache-2.0
"""Rows that are larger than memory: commands run within a limit of memory in which they do not fit, with the same bits."""

import filecmp
import json
import os
import resource
import subprocess

import pytest

from conftest import REPOSITORY

ROWS, TOKENS = 4000, 2000  # about 29 bytes of memory and 9 of text for each token: more than 200 MB
LIMIT = 400 << 20  # of private memory; the command alone takes much less than the half


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Rows that begin alike in pairs, and differ in the end."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    same = {name: json.dumps([0] + [value] * (TOKENS - 1)) for name, value in (("logprobs", -1), ("ref_logprobs", -2), ("advantages", 1))}
    with path.open("w") as file:
        for row in range(ROWS):
            ids = [row // 2 % 50 + 1] * (TOKENS - 3) + [row // 2 % 47, row % 47, row % 2]
            fields = ", ".join(f'"{name}": {text}' for name, text in same.items())
            file.write(f'{{"group_id": "{row // 2}", "input_ids": {json.dumps(ids)}, {fields}}}\n')
    return path


def limited(*arguments, limit=LIMIT, check=True, stdin=None):
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run([REPOSITORY / "bin/espalier", *map(str, arguments)], capture_output=True, text=True, env=variables, stdin=stdin,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)))  # fmt: skip
    assert not check or done.returncode == 0, done.stderr
    return done


def train(model, data, out, *flags, steps=3, **options):
    return limited("train", "--model", model, "--data", data, "--out", out, "--objective", "grpo", "--kl-coef", 0.1, "--steps", steps,
                   "--batch-size", 2, "--shuffle", "groups", "--no-calibration", "--dtype", "float32", *flags, **options)  # fmt: skip


def records(run):
    kept = ("step", "loss", "grad_norm", "flat_tokens", "tree_tokens")
    return [{key: line.get(key) for key in kept} for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())]


def test_training_on_rows_that_do_not_fit(model, data, tmp_path):
    unlimited = resource.RLIM_INFINITY
    train(model, data, tmp_path / "memory", "--row-cache", "off", limit=unlimited)
    failed = train(model, data, tmp_path / "failed", "--row-cache", "off", check=False)
    assert failed.returncode == 1 and "out of memory" in failed.stderr, failed.stderr
    index = data.with_name(".rows.jsonl.espalier-index.safetensors")
    assert not index.exists()
    first = train(model, data, tmp_path / "first")
    assert f"were written to {index} (" in first.stderr
    assert sorted(path.name for path in data.parent.iterdir()) == [index.name, data.name]
    written = index.stat()
    second = train(model, data, tmp_path / "second")
    assert "were written" not in second.stderr
    assert (index.stat().st_ino, index.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)
    told = [line for line in first.stderr.splitlines() if "trajectories" in line]
    assert told and told == [line for line in second.stderr.splitlines() if "trajectories" in line]
    for run in ("first", "second"):
        assert records(tmp_path / run) == records(tmp_path / "memory")
        checkpoints = [tmp_path / name / "checkpoints/step_3/model.safetensors" for name in ("memory", run)]
        assert filecmp.cmp(*checkpoints, shallow=False)
    limited("rerun", tmp_path / "memory", "--out", tmp_path / "again", limit=unlimited)  # with hashes of the rows
    resumed = train(model, data, tmp_path / "memory", "--resume", "--row-cache", tmp_path / "cache", steps=4)
    assert "resuming after step 3" in resumed.stderr and f"were written to {tmp_path / 'cache'}" in resumed.stderr


def test_several_files_and_mixes_that_do_not_fit(model, data, tmp_path):
    with data.open() as file:
        lines = file.readlines()
    names = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    names[0].write_text("".join(lines[: ROWS // 2]))
    names[1].write_text("".join(lines[ROWS // 2 :]))
    done = train(model, names[0], tmp_path / "run", "--data", names[1])
    assert f"were written to {tmp_path}/.a.jsonl+1.espalier-index.safetensors (" in done.stderr
    mix = tmp_path / "mix.toml"
    mix.write_text("".join(f'[[mix]]\nname = "{name.stem}"\nobjective = "grpo"\ndata = "{name}"\n' for name in names))
    mixed = ["train", "--model", model, "--mix", mix, "--steps", 1, "--batch-size", 2, "--no-calibration"]
    assert limited(*mixed, "--out", tmp_path / "off", "--row-cache", "off", check=False).returncode == 1
    limited(*mixed, "--out", tmp_path / "mixed")
    left = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert left == {"a.jsonl", "b.jsonl", "mix.toml", ".a.jsonl+1.espalier-index.safetensors",
                    ".a.jsonl.espalier-index.safetensors", ".b.jsonl.espalier-index.safetensors"}  # fmt: skip


def test_a_folder_that_cannot_be_written_is_named(data, tmp_path):
    (tmp_path / "file").write_text("")
    told = limited("inspect", "--data", data, "--limit", 3000, "--row-cache", tmp_path / "file" / "cache", limit=1 << 30).stderr
    assert f"warning: {data}: rows that take more than" in told and "stay in memory" in told and "--row-cache DIR" in told


def test_standard_input_stays_in_memory(data, tmp_path):
    before = sorted(os.listdir("/dev"))
    with data.open() as file:
        told = limited("inspect", "--data", "-", "--limit", 3000, limit=1 << 30, stdin=file).stderr
    assert "3,000 trajectories" in told and "note:" not in told and sorted(os.listdir("/dev")) == before
