# SPDX-License-Identifier: Apache-2.0
"""`espalier rerun`: the folder of a run is enough to repeat it to the bit, and what has changed since is named."""

import json
import os
import shutil
import subprocess

import pytest
from safetensors.torch import load_file, save_file

from conftest import REPOSITORY
from small_models import write_rows
from test_faults import checkpoint, rows_of, same_checkpoint, saved_steps


@pytest.fixture
def mine(model, tmp_path):
    """A folder with a model, rows and held-out rows that a test may change, and a run in it by relative paths."""
    shutil.copytree(model, tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", rows_of(6))
    write_rows(tmp_path / "held.jsonl", rows_of(3, seed=3))
    command = ["train", "--model", "model", "--data", "rows.jsonl", "--eval-data", "held.jsonl", "--batch-size", 2, "--shuffle", "rows",
               "--learning-rate", 1e-3, "--save-every", 2, "--no-calibration", "--steps", 4, "--out", "run", "--rescue-dir", "rescue"]
    run_in(tmp_path, *command)
    return tmp_path


def run_in(folder, *arguments, check=True):
    done = subprocess.run([REPOSITORY / "bin/espalier", *map(str, arguments)], cwd=folder, capture_output=True, text=True)
    assert not check or done.returncode == 0, done.stderr
    return done


def test_a_run_is_repeated_to_the_bit(mine, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    run_in(elsewhere, "rerun", mine / "run", "--out", "again")
    again = elsewhere / "again"
    assert saved_steps(again) == [2, 4]
    for step in (2, 4):
        same_checkpoint(checkpoint(mine / "run", step), checkpoint(again, step))
    assert len(losses_only(again)) == 4 and losses_only(again) == losses_only(mine / "run")
    for name in ("cost_model.json", "run.json"):
        assert (again / name).read_bytes() == (mine / "run" / name).read_bytes(), name
    assert "rescue" not in (again / "config.toml").read_text()
    run_in(elsewhere, "rerun", again, "--out", "third")  # a repetition can be repeated, too
    same_checkpoint(checkpoint(again, 4), checkpoint(elsewhere / "third", 4))
    failed = run_in(elsewhere, "rerun", mine / "run", "--out", "again", check=False)
    assert failed.returncode == 1 and "holds a run already" in failed.stderr


def losses_only(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def changed_rows(folder):
    write_rows(folder / "rows.jsonl", rows_of(6, seed=2))


def fewer_rows(folder):
    write_rows(folder / "rows.jsonl", rows_of(5))


def changed_held_out_rows(folder):
    write_rows(folder / "held.jsonl", rows_of(3, seed=4))


def changed_weights(folder):
    tensors = load_file(folder / "model/model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, folder / "model/model.safetensors", {"format": "pt"})


def changed_config(folder):
    config = json.loads((folder / "model/config.json").read_text())
    (folder / "model/config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))


def changed_program(folder):
    record = json.loads((folder / "run/run.json").read_text())
    assert record["program"][1].startswith("commit: ")
    record["program"][1] = "commit: 0123456789ab"
    (folder / "run/run.json").write_text(json.dumps(record))


@pytest.mark.parametrize("change, words", [
    (changed_rows, "rerun: the data's input_ids are not those that the run was trained on"),
    (fewer_rows, "rerun: the run was on 6 trajectories with 54 tokens, the data has 5 with 45"),
    (changed_held_out_rows, "rerun: the rows of --eval-data have changed"),
    (changed_weights, "rerun: the run began with other files in --model"),
    (changed_config, "rerun: the run has another model: rms_norm_eps is "),
    (changed_program, 'espalier: error: the run was made by a program with "commit: 0123456789ab", this one has "commit: '),
])  # fmt: skip
def test_what_has_changed_is_named_before_anything_is_trained(mine, change, words):
    change(mine)
    failed = run_in(mine, "rerun", "run", "--out", "again", check=False)
    assert failed.returncode == 1 and words in failed.stderr, failed.stderr
    assert not (mine / "again/metrics.jsonl").exists() and not (mine / "again/checkpoints").exists()


def test_another_program_may_be_allowed(mine):
    changed_program(mine)
    said = run_in(mine, "rerun", "run", "--out", "again", "--other-program").stderr
    assert 'note: the run was made by a program with "commit: 0123456789ab"' in said
    same_checkpoint(checkpoint(mine / "run", 4), checkpoint(mine / "again", 4))


def test_a_run_of_a_mix_is_repeated_from_its_own_copy(mine):
    (mine / "mix.toml").write_text('[[mix]]\nname = "a"\ndata = "rows.jsonl"\nobjective = "sft"\n'
                                   '[[mix]]\nname = "b"\ndata = "held.jsonl"\nobjective = "sft"\nweight = 0.5\n')  # fmt: skip
    run_in(mine, "train", "--model", "model", "--mix", "mix.toml", "--out", "mixed", "--steps", 2, "--no-calibration")
    (mine / "mix.toml").unlink()
    os.rename(mine / "mixed", mine / "moved")
    run_in(mine, "rerun", "moved", "--out", "again")
    same_checkpoint(checkpoint(mine / "moved", 2), checkpoint(mine / "again", 2))
    write_rows(mine / "held.jsonl", rows_of(3, seed=4))
    failed = run_in(mine, "rerun", "moved", "--out", "third", check=False)
    assert failed.returncode == 1 and "rerun: the data's input_ids" in failed.stderr, failed.stderr


def test_a_folder_without_a_record_is_refused(mine):
    (mine / "run/run.json").unlink()
    failed = run_in(mine, "rerun", "run", "--out", "again", check=False)
    assert failed.returncode == 1 and "expected a run, whose folder has run.json; found none" in failed.stderr
