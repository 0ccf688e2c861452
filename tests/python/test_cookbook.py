# SPDX-License-Identifier: Apache-2.0
"""The recipes of tinker-cookbook, as they are, against `espalier serve`, in a folder that examples/cookbook/home.py makes."""

import importlib
import json
import math
import os
import subprocess
import sys

import pytest

pytest.importorskip("tinker_cookbook", reason="the cookbook of the Tinker API (requirements-cookbook.txt)")

from conftest import REPOSITORY, seed_of
from servers import server

EXAMPLE = REPOSITORY / "examples/cookbook"
RECIPES = {
    "sl_loop": ["recipes.sl_loop", "batch_size=8", "max_steps=4", "learning_rate=3e-3", "save_every=2"],
    "chat_sl": ["recipes.chat_sl.train", "batch_size=8", "max_steps=3", "learning_rate=3e-3", "save_every=2", "eval_every=2",
                "rolling_save_every=1"],
    "rl_loop": ["recipes.rl_loop", "batch_size=4", "group_size=16", "max_steps=3", "max_tokens=20", "save_every=2"],
    **{loss: ["recipes.math_rl.train", "env=gsm8k", "groups_per_batch=2", "group_size=8", "max_steps=2", "max_tokens=20",
              "eval_every=0", f"loss_fn={loss}"] for loss in ("importance_sampling", "ppo", "stable_reinforce")},
    "async": ["recipes.math_rl.train", "env=arithmetic", "groups_per_batch=2", "group_size=2", "max_steps=2", "max_tokens=5",
              "eval_every=0", "max_steps_off_policy=2"],
    "dpo": ["recipes.preference.dpo.train", "batch_size=16", "max_steps=4", "learning_rate=2e-3"],
}  # fmt: skip
# Each recipe as `python -m` runs it, all in one process, which imports the cookbook once.
DRIVER = """
import json, runpy, sys, traceback
for name, module, *arguments in json.load(sys.stdin):
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__")
        print(name, "ended well", flush=True)
    except BaseException:
        traceback.print_exc()
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a small model that has learned to name digits, but not which."""
    folder = tmp_path_factory.mktemp("home")
    small = ["--rows", "64", "--steps", "120", "--batch", "16", "--hidden-size", "48", "--mistakes", "1"]
    subprocess.run([sys.executable, EXAMPLE / "home.py", folder, *small, "--seed", str(seed_of(5))], check=True)
    return folder


@pytest.fixture(scope="module")
def logs(home, tmp_path_factory):
    """What the recipes wrote."""
    folder = tmp_path_factory.mktemp("logs")
    model = home / "Qwen/Qwen3.5-9B-Base"
    with server(model, folder / "state", "--model", f"Qwen/Qwen3.5-9B-Base={model}", dtype="float32") as (address, _):
        environment = {**os.environ, "TINKER_BASE_URL": address, "TINKER_API_KEY": "tml-local", "HF_HUB_OFFLINE": "1",
                       "HF_HOME": str(folder / "huggingface"), "OMP_NUM_THREADS": "1"}  # fmt: skip
        todo = []
        for name, (module, *arguments) in RECIPES.items():
            arguments.append(f"log_path={folder / name}")
            if not module.endswith("_loop"):
                arguments += ["model_name=Qwen/Qwen3.5-9B-Base", "behavior_if_log_dir_exists=delete"]
            todo.append([name, f"tinker_cookbook.{module}", *arguments])
        done = subprocess.run([sys.executable, "-c", DRIVER], cwd=home, input=json.dumps(todo), env=environment, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    return folder, done.stdout


def metrics(logs, name):
    folder, said = logs
    assert f"{name} ended well" in said, said[-20000:]
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    assert (folder / name / "checkpoints.jsonl").is_file()
    return rows


@pytest.mark.parametrize("name", ["sl_loop", "chat_sl"])
def test_supervised_training_learns(logs, name):
    losses = [row["train_mean_nll"] for row in metrics(logs, name) if "train_mean_nll" in row]
    assert len(losses) >= 3 and losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["rl_loop", "importance_sampling", "ppo", "stable_reinforce", "async"])
def test_reinforcement_learning_runs(logs, name):
    norms = [row["grad_norm"] for row in metrics(logs, name) if "grad_norm" in row]
    assert norms and all(math.isfinite(norm) for norm in norms)
    if name != "async":  # whose sums this model cannot do: all rewards are equal
        assert max(norms) > 0


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "stable_reinforce"])
def test_samples_come_from_the_weights_in_training(logs, name):
    """The cookbook's own measure: the divergence of the sampler from the forward pass of training, in float32."""
    assert all(abs(row["optim/kl_sample_train_v1"]) < 1e-4 for row in metrics(logs, name) if "optim/kl_sample_train_v1" in row)


def test_preferences_are_learned(logs):
    rows = [row for row in metrics(logs, "dpo") if "dpo_loss" in row]
    assert rows[0]["dpo_loss"] == pytest.approx(math.log(2), abs=1e-5)  # the policy is the reference
    assert rows[-1]["dpo_loss"] < rows[0]["dpo_loss"] and rows[-1]["espalier/encoded_tokens:sum"] < rows[-1]["espalier/flat_tokens:sum"]


def test_the_picture(tmp_path):
    sys.path.insert(0, str(EXAMPLE))
    try:
        curve = importlib.import_module("curve")
    finally:
        sys.path.remove(str(EXAMPLE))
        sys.modules.pop("curve", None)
    for name, key in (("sl", "train_mean_nll"), ("rl", "reward/total")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps({"step": n, key: n / 4}) + "\n" for n in range(1, 4)))
    curve.main(["--supervised", str(tmp_path / "sl"), "--reinforcement", str(tmp_path / "rl"), "-o", str(tmp_path / "curve.svg")])
    picture = (tmp_path / "curve.svg").read_text()
    assert picture.startswith("<svg") and picture.count("<polyline") == 2
