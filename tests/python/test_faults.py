# SPDX-License-Identifier: Apache-2.0
"""Runs that are killed, stopped, damaged, started twice or led astray: what they leave and what --resume makes of it.

The kill tests are short here; `--long` (or ESPALIER_LONG_TESTS=1) makes hundreds of kills of them.
"""

import fcntl
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time

import pytest
from safetensors.torch import load_file, save_file

from conftest import PROGRAM, seed_of
from small_models import MODELS, write_rows

STOPPED = 3  # exit status of a run that a signal has stopped


def last_of_each(arguments):
    """The arguments without flags that come again later: the tests change single flags of a common list."""
    parts = [[]]
    for argument in map(str, arguments):
        if argument.startswith("--"):
            parts.append([])
        parts[-1].append(argument)
    last = {part[0]: part for part in parts[1:]}
    return parts[0] + [argument for part in last.values() for argument in part]


@pytest.fixture(scope="module")
def espalier(espalier):
    return lambda *arguments, **options: espalier(*last_of_each(arguments), **options)


def rows_of(number, seed=1, length=9):
    generator = random.Random(seed)
    prompt = [generator.randrange(61) for _ in range(3)]
    return [{"input_ids": prompt + [generator.randrange(61) for _ in range(length - 3)], "trajectory_id": f"t{row}"}
            for row in range(number)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", rows_of(6))


@pytest.fixture
def flags(model, data):
    return ["--model", model, "--data", data, "--batch-size", 2, "--shuffle", "rows", "--learning-rate", 1e-3,
            "--save-every", 1, "--no-calibration"]  # fmt: skip


@pytest.fixture
def start(tmp_path):
    """Starts bin/espalier in the background; what it says on standard error goes to a separate file."""
    started = []

    def run(*arguments, preload="", **options):
        error = (tmp_path / f"stderr-{len(started)}").open("w+b")
        options.setdefault("stderr", error)
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "LD_PRELOAD": str(preload)}
        process = subprocess.Popen([PROGRAM, *last_of_each(arguments)], stdout=subprocess.DEVNULL,
                                   env=environment, **options)  # fmt: skip
        started.append((process, error))
        process.said = lambda: (error.seek(0), error.read().decode())[1]
        return process

    yield run
    for process, error in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        error.close()


def saved_steps(run):
    return sorted(int(folder.name[5:]) for folder in (run / "checkpoints").glob("step_*") if folder.name[5:].isdigit())


def checkpoint(run, step):
    return run / f"checkpoints/step_{step}"


def same_checkpoint(one, other):
    """Bit for bit, what it says of its run included."""
    names = {file.name for file in one.iterdir()} | {file.name for file in other.iterdir()}
    assert {"model.safetensors", "optimizer.safetensors", "manifest.json", "trainer_state.json"} <= names
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def losses(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def wait_until(condition, process, seconds=120):
    """Until `condition` holds or the process has ended."""
    end = time.monotonic() + seconds
    while not condition() and process.poll() is None:
        assert time.monotonic() < end, process.said()
        time.sleep(0.001)


def leftovers(run):
    return [path for path in run.rglob(".*") if path.name.endswith((".tmp", ".partial"))]


# ---- Kills ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more, wanted", [([], 4), (["--save-in-background"], 3)])
def test_killed_at_any_moment_a_run_loses_nothing(espalier, start, flags, tmp_path, more, wanted, long_tests):
    """SIGKILL at random moments, half of them while a checkpoint is being written; then the bits of an undisturbed run."""
    wanted, steps = (300, 600) if long_tests else (wanted, 24)
    generator = random.Random(seed_of(11))
    command = ["train", *flags, "--steps", steps]
    espalier(*command, "--out", tmp_path / "whole")
    run = tmp_path / "killed"
    kills = in_save = 0
    while kills < wanted:
        before = len(saved_steps(run))
        process = start(*command, *more, "--out", run, *(["--resume"] if before else []))
        if generator.random() < 0.5:
            wait_until(lambda: len(saved_steps(run)) > before and any(run.glob("checkpoints/.step_*")), process)
        else:
            wait_until(lambda: len(saved_steps(run)) > before, process)
            time.sleep(generator.random() * 0.05)
        process.kill()
        if process.wait() != -signal.SIGKILL:
            assert process.returncode == 0, process.said()
            break
        kills += 1
        in_save += bool(leftovers(run))
    print(f"{kills} kills, {in_save} with a checkpoint half-written, {len(saved_steps(run))} steps saved by then")
    assert kills >= 2
    espalier(*command, *more, "--out", run, "--resume")
    assert saved_steps(run) == list(range(1, steps + 1))
    for step in range(1, steps + 1):
        same_checkpoint(checkpoint(tmp_path / "whole", step), checkpoint(run, step))
    assert losses(tmp_path / "whole") == losses(run)
    assert not leftovers(run)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_stops_a_run_after_its_step(espalier, start, flags, tmp_path, name):
    command = ["train", *flags, "--save-every", 0, "--out", tmp_path / "run"]
    process = start(*command, "--steps", 100000)
    wait_until(lambda: (tmp_path / "run/metrics.jsonl").exists() and len(losses(tmp_path / "run")) > 1, process)
    process.send_signal(getattr(signal, name))
    assert process.wait() == STOPPED, process.said()
    assert "continue with --resume" in process.said()
    (step,) = saved_steps(tmp_path / "run")
    assert re.search(r"espalier: finishing step \d+, then saving; interrupt again to stop at once", process.said())
    assert step == len(losses(tmp_path / "run"))
    espalier(*command, "--steps", step + 2, "--resume")
    espalier("train", *flags, "--save-every", 0, "--out", tmp_path / "whole", "--steps", step + 2)
    same_checkpoint(checkpoint(tmp_path / "whole", step + 2), checkpoint(tmp_path / "run", step + 2))


def test_a_hangup_that_was_ignored_stays_ignored(start, flags, tmp_path):
    """As under nohup."""
    process = start("train", *flags, "--out", tmp_path / "run", "--steps", 12,
                    preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))  # fmt: skip
    wait_until(lambda: saved_steps(tmp_path / "run"), process)
    process.send_signal(signal.SIGHUP)
    assert process.wait() == 0, process.said()
    assert saved_steps(tmp_path / "run")[-1] == 12


def test_two_runs_started_together_do_not_mix(espalier, start, flags, tmp_path, long_tests):
    """One of each pair has the folder; the other one says who has it, or that there is a run, and changes nothing."""
    espalier("train", *flags, "--out", tmp_path / "whole", "--steps", 3)
    for pair in range(25 if long_tests else 4):
        run = tmp_path / f"run-{pair}"
        both = [start("train", *flags, "--out", run, "--steps", 3) for _ in range(2)]
        assert sorted(process.wait() for process in both) == [0, 1], [process.said() for process in both]
        (loser,) = (process for process in both if process.returncode == 1)
        (winner,) = (process for process in both if process.returncode == 0)
        said = loser.said()
        assert f"process {winner.pid} on " in said or "holds a run already" in said, said
        assert len([line for line in said.splitlines() if "error" in line]) == 1
        for step in (1, 2, 3):
            same_checkpoint(checkpoint(tmp_path / "whole", step), checkpoint(run, step))
        assert len(losses(run)) == 3 and len(list(run.glob("events.*"))) == 1


def test_a_file_system_without_locks_is_a_warning(start, flags, tmp_path):
    """As some network file systems: flock says that there are none."""
    source = tmp_path / "no_locks.cpp"
    source.write_text('#include <cerrno>\nextern "C" int flock(int, int) { errno = ENOLCK; return -1; }\n')
    subprocess.run(["g++", "-shared", "-fPIC", "-o", tmp_path / "no_locks.so", source], check=True)
    process = start("train", *flags, "--out", tmp_path / "run", "--steps", 2, preload=tmp_path / "no_locks.so")
    assert process.wait() == 0, process.said()
    assert "warning" in process.said() and "cannot lock " in process.said() and "(No locks available)" in process.said()
    assert saved_steps(tmp_path / "run") == [1, 2]


# ---- Logs ----------------------------------------------------------------------------------------------------------


def test_a_log_that_cannot_be_written_stops_no_run(start, flags, tmp_path):
    with open("/dev/full", "wb") as full:
        process = start("train", *flags, "--out", tmp_path / "full", "--steps", 4, stderr=full)
        assert process.wait() == 0
    assert saved_steps(tmp_path / "full") == [1, 2, 3, 4]

    reading, writing = os.pipe()
    process = start("train", *flags, "--out", tmp_path / "pipe", "--steps", 4, stderr=writing)
    os.close(writing)
    os.read(reading, 10)
    os.close(reading)  # as `2>&1 | head -1` does
    assert process.wait() == 0
    assert saved_steps(tmp_path / "pipe") == [1, 2, 3, 4]


def test_a_terminal_that_is_closed_stops_no_run(start, flags, tmp_path):
    master, slave = os.openpty()
    process = start("train", *flags, "--out", tmp_path / "run", "--steps", 12, stderr=slave,
                    preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))  # fmt: skip
    os.close(slave)
    wait_until(lambda: saved_steps(tmp_path / "run"), process)
    os.close(master)  # from here on writing to the terminal is an input/output error
    assert process.wait() == 0
    assert saved_steps(tmp_path / "run")[-1] == 12


def test_a_limit_on_the_size_of_files_is_named(espalier, flags, tmp_path):
    """`ulimit -f`: checkpoints are too large, which is an error; metrics of a few lines are not."""
    command = " ".join(map(str, [PROGRAM, "train", *flags, "--out", tmp_path / "run", "--steps", 4]))
    failed = subprocess.run(["bash", "-c", f"ulimit -f 8; exec {command}"], capture_output=True, text=True)
    assert failed.returncode == 1, failed.stderr
    last = failed.stderr.strip().splitlines()[-1]
    assert "File too large" in last and "ulimit -f" in last and "8192 bytes" in last, failed.stderr
    assert saved_steps(tmp_path / "run") == [] and not leftovers(tmp_path / "run")
    assert len(losses(tmp_path / "run")) == 2  # the second checkpoint that is due is one too many


# ---- Damage --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, espalier, model, data):
    run = tmp_path_factory.mktemp("whole") / "run"
    espalier("train", "--model", model, "--data", data, "--batch-size", 2, "--shuffle", "rows", "--learning-rate", 1e-3,
             "--save-every", 1, "--no-calibration", "--out", run, "--steps", 4)  # fmt: skip
    return run


def test_a_flipped_bit_is_noticed_wherever_it_is(espalier, flags, whole_run, tmp_path, long_tests):
    """In any file of the newest checkpoint; the run goes on from the one before it, to bitwise identical weights."""
    generator = random.Random(seed_of(12))
    names = sorted(file.name for file in checkpoint(whole_run, 3).iterdir())
    for turn in range(100 if long_tests else len(names)):
        run = tmp_path / f"run-{turn}"
        shutil.copytree(whole_run, run)
        shutil.rmtree(checkpoint(run, 4))
        file = checkpoint(run, 3) / names[turn % len(names)]
        content = bytearray(file.read_bytes())
        bit = generator.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)
        said = espalier("train", *flags, "--out", run, "--steps", 4, "--resume").stderr
        assert "step_3 cannot be used" in said and f"falling back to {checkpoint(run, 2)}" in said, (file, bit, said)
        assert file.name in said, said
        for step in (3, 4):
            same_checkpoint(checkpoint(whole_run, step), checkpoint(run, step))
        shutil.rmtree(run)


def test_a_run_of_another_model_or_on_other_data_is_not_resumed(espalier, model, flags, whole_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)

    def refused(*words, **changes):
        changed = {"--model": model, "--data": flags[3], **changes}
        failed = espalier("train", "--model", changed["--model"], "--data", changed["--data"], *flags[4:], "--out", run,
                          "--steps", 5, "--resume", check=False)  # fmt: skip
        assert failed.returncode == 1 and all(word in failed.stderr for word in words), failed.stderr
        assert saved_steps(run) == [1, 2, 3, 4]

    for key, value in {"num_hidden_layers": 1, "rope_theta": 500000.0}.items():
        (tmp_path / key).mkdir()
        (tmp_path / key / "config.json").write_text(json.dumps({**MODELS["qwen3"], key: value}))
        espalier("init", "--config", tmp_path / key / "config.json", "--out", tmp_path / key / "model", "--seed", 5)
        refused("another model", key, **{"--model": tmp_path / key / "model"})
    refused("the data's input_ids", **{"--data": write_rows(tmp_path / "other.jsonl", rows_of(6, seed=2))})
    weighted = [{**row, "loss_weights": [0.5] * 9} for row in rows_of(6)]
    refused("the data's loss_weights", **{"--data": write_rows(tmp_path / "weighted.jsonl", weighted)})
    espalier("train", *flags, "--out", run, "--steps", 5, "--resume")


# ---- Numbers that are not finite -----------------------------------------------------------------------------------


@pytest.mark.parametrize("flag, values", {
    "--learning-rate": ["nan", "inf", "1e38", "-1"],
    "--beta1": ["nan", "1", "-0.1"],
    "--beta2": ["nan", "1"],
    "--weight-decay": ["nan", "inf", "-1"],
    "--max-grad-norm": ["nan", "inf", "-1"],
    "--eps": ["nan", "inf", "0"],
    "--clip-low": ["nan", "2"],
    "--clip-high": ["nan", "inf"],
    "--turn-discount": ["nan", "2"],
    "--importance-cap": ["nan", "0.5"],
    "--kl-coef": ["nan", "-1"],
}.items())  # fmt: skip
def test_options_out_of_range_are_wrong_usage(espalier, flags, tmp_path, flag, values):
    for value in values:
        failed = espalier("train", *flags, "--out", tmp_path / "run", "--steps", 1, f"{flag}={value}", check=False)
        assert failed.returncode == 2 and flag in failed.stderr, (value, failed.stderr)
    assert not (tmp_path / "run").exists()


def finite(folder):
    return all(tensor.isfinite().all() for name in ("model", "optimizer")
               for tensor in load_file(folder / f"{name}.safetensors").values())  # fmt: skip


def test_a_diverging_run_ends_with_its_last_good_step(espalier, flags, tmp_path):
    """Gradients of 1e30 times a rate of 1e6: weights that float32 still holds, and with which nothing can be computed."""
    run = tmp_path / "run"
    diverging = ["--optimizer", "sgd", "--max-grad-norm", 0, "--normalize", 1e-30, "--learning-rate", 1e6]
    failed = espalier("train", *flags, *diverging, "--out", run, "--steps", 9, check=False)
    last = failed.stderr.strip().splitlines()[-1]
    assert failed.returncode == 1 and last.startswith("espalier: error: step 2: loss "), failed.stderr
    assert "the gradient of `" in last and "lower" not in last
    assert last.endswith(f"saved {checkpoint(run, 1)}, continue with --resume")
    assert saved_steps(run) == [1] and finite(checkpoint(run, 1)) and len(losses(run)) == 1


def test_the_token_that_spoils_a_step_is_named(espalier, model, flags, tmp_path):
    rows = rows_of(6)
    for row in rows:
        row.update(advantage=-1.0, logprobs=[0.0] + [-4.0] * 8)
    rows[3]["logprobs"][5] = -700.0
    data = write_rows(tmp_path / "rows.jsonl", rows)
    command = ["train", "--model", model, "--data", data, *flags[4:], "--shuffle", "none", "--objective", "grpo"]
    failed = espalier(*command, "--out", tmp_path / "run", check=False)
    last = failed.stderr.strip().splitlines()[-1]
    assert failed.returncode == 1 and "error: step 2: loss" in last, failed.stderr
    assert "token 5 of trajectory `t3` (row 3)" in last and "`logprobs` of the data say -700" in last, last
    assert saved_steps(tmp_path / "run") == [1] and finite(checkpoint(tmp_path / "run", 1))


def test_a_model_that_is_not_finite_is_refused(espalier, model, flags, tmp_path):
    spoilt = tmp_path / "spoilt"
    shutil.copytree(model, spoilt)
    tensors = load_file(spoilt / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][2, 3] = float("nan")
    save_file(tensors, spoilt / "model.safetensors", {"format": "pt"})
    failed = espalier("train", "--model", spoilt, *flags[2:], "--out", tmp_path / "run", "--steps", 1, check=False)
    assert failed.returncode == 1 and "tensor `model.layers.1.mlp.down_proj.weight`: as float32 it holds 1 value of" in failed.stderr
    assert not saved_steps(tmp_path / "run")


def test_a_run_may_go_on_with_another_learning_rate(espalier, flags, whole_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)
    said = espalier("train", *flags, "--out", run, "--steps", 5, "--resume", "--learning-rate", 1e-4).stderr
    assert "learning-rate was 0.001, and is 0.0001 from here on" in said
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 5 and last["learning_rate"] == 1e-4


def test_another_number_of_steps_changes_a_schedule_and_says_so(espalier, flags, tmp_path):
    command = ["train", *flags, "--scheduler", "cosine", "--out", tmp_path / "run"]
    espalier(*command, "--steps", 2)
    said = espalier(*command, "--steps", 4, "--resume").stderr
    assert "steps was 2, and is 4 from here on: the learning rate continues as in a run of so many steps" in said
    assert "steps was" not in espalier(*command, "--steps", 4, "--resume").stderr
    help_text = " ".join(espalier("train", "--help").stdout.split())
    assert "so another number on --resume changes the rate of all later steps" in help_text


# ---- Errors in mid-run ---------------------------------------------------------------------------------------------


def test_a_vanished_model_folder_is_no_loss(espalier, start, model, flags, tmp_path):
    mine = tmp_path / "mine"
    shutil.copytree(model, mine)
    (mine / "tokenizer.json").write_text('{"made": "up"}')
    command = ["train", "--model", mine, *flags[2:], "--save-every", 0]
    process = start(*command, "--out", tmp_path / "run", "--steps", 30)
    wait_until((tmp_path / "run/metrics.jsonl").exists, process)
    shutil.rmtree(mine)
    assert process.wait() == 0, process.said()
    assert (checkpoint(tmp_path / "run", 30) / "tokenizer.json").read_text() == '{"made": "up"}'


@pytest.fixture
def in_mid_run(start):
    """Starts a run of 200 steps, holds it in one of the first 150, calls a function, and lets it go on: returns the exit status
    and what it said. What it says goes to a small pipe, so that it cannot come to its end before."""
    def run(action, *command):
        reading, writing = os.pipe()
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
        process = start(*command, "--steps", 200, stderr=writing)
        os.close(writing)
        with open(reading) as said:
            before = [next(said)]
            while "step 2/200" not in before[-1]:
                before.append(next(said))
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            action()
            process.send_signal(signal.SIGCONT)
            text = "".join(before) + said.read()
        return process.wait(), text
    return run


def test_a_folder_that_is_removed_is_made_again(espalier, in_mid_run, flags, tmp_path):
    """rm -rf RUN in mid-run: a warning, and in the end a run that --resume takes and --config starts again."""
    run, before = tmp_path / "run", {}
    command = ["train", *flags, "--save-every", 0]

    def remove():
        for name in ("config.toml", "cost_model.json", "plan.txt"):
            before[name] = (run / name).read_bytes()
        shutil.rmtree(run)

    status, said = in_mid_run(remove, *command, "--out", run)
    assert status == 0, said
    assert f"warning: {run} or files in it were removed during the run" in said
    assert "metrics.jsonl was removed during the run: it starts again at step" in said
    assert {name: (run / name).read_bytes() for name in before} == before
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(steps[0], 201)) and steps[0] > 1
    espalier(*command, "--out", tmp_path / "whole", "--steps", 201)
    espalier(*command, "--out", run, "--steps", 201, "--resume")
    same_checkpoint(checkpoint(tmp_path / "whole", 201), checkpoint(run, 201))


def test_a_folder_that_cannot_be_made_again_is_a_failure(in_mid_run, flags, tmp_path):
    run = tmp_path / "run"

    def replace():
        shutil.rmtree(run)
        run.write_text("a file in its place")

    status, said = in_mid_run(replace, "train", *flags, "--save-every", 0, "--out", run)
    assert status == 1 and "step 200 is not saved; no checkpoint was written" in said, said
    assert f"warning: {run} or files in it were removed during the run" in said


def test_what_dry_run_finds_train_finds_before_it_begins(espalier, model, flags, tmp_path):
    rows = rows_of(6)
    for row in rows[2:4]:
        row["loss_mask"] = [0] * 9
    data = write_rows(tmp_path / "rows.jsonl", rows)
    command = ["train", "--model", model, "--data", data, *flags[4:], "--shuffle", "none", "--out", tmp_path / "run"]
    dry = espalier(*command, "--dry-run", check=False)
    failed = espalier(*command, check=False)
    assert dry.returncode == failed.returncode == 1 and "no token carries loss" in dry.stderr
    assert "step 2: no token carries loss in its 2 trajectories, rows 2 (`t2`), 3 (`t3`)" in failed.stderr
    assert not (tmp_path / "run/metrics.jsonl").exists()


# ---- The cost model of a run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["", "{", "[]", '{"matrix_products": 3}', "null"])
def test_a_damaged_cost_model_is_named_with_the_cure(espalier, flags, whole_run, tmp_path, content):
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)
    (run / "cost_model.json").write_text(content)
    command = ["train", *flags, "--out", run, "--steps", 5, "--resume"]
    failed = espalier(*command, check=False)
    last = failed.stderr.strip().splitlines()[-1]
    assert failed.returncode == 1 and last.startswith(f"espalier: error: --resume: {run}/cost_model.json"), failed.stderr
    assert "restore the file, or remove it to use those of the flags" in last and saved_steps(run) == [1, 2, 3, 4]
    (run / "cost_model.json").unlink()
    espalier(*command)
    assert json.loads((run / "cost_model.json").read_text()) == json.loads((whole_run / "cost_model.json").read_text())


def test_another_cost_model_is_not_used_and_said_so(espalier, flags, whole_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)
    kept = json.loads((run / "cost_model.json").read_text())
    (tmp_path / "same.json").write_text(json.dumps(kept))
    kept["seconds_per"]["layer"] *= 2
    (tmp_path / "other.json").write_text(json.dumps(kept))
    command = ["train", *flags, "--out", run, "--resume"]
    said = espalier(*command, "--steps", 5, "--cost-model", tmp_path / "same.json").stderr
    assert "--cost-model" not in said
    said = espalier(*command, "--steps", 6, "--cost-model", tmp_path / "other.json").stderr
    assert (f"note: --cost-model {tmp_path}/other.json is not used: the run continues with the rates that it began with, "
            f"those of {run}/cost_model.json") in said  # fmt: skip
    assert (run / "cost_model.json").read_bytes() == (whole_run / "cost_model.json").read_bytes()


# ---- Names of files, and disks -------------------------------------------------------------------------------------


def test_names_that_are_no_text_are_refused_before_a_folder_is_made(espalier, model, flags, data, tmp_path):
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")

    def refused(flag, *arguments):
        failed = espalier("train", "--steps", 1, *arguments, check=False)
        last = failed.stderr.strip().splitlines()[-1]
        assert failed.returncode == 1 and "json.exception" not in failed.stderr, failed.stderr
        assert last.startswith(f"espalier: error: {flag}: expected UTF-8 text"), failed.stderr

    refused("--out", *flags, "--out", odd)
    assert not os.path.exists(odd)
    shutil.copy(data, odd + ".jsonl")
    for name in (odd + ".jsonl", os.fsdecode(os.fsencode(tmp_path) + b"/*.jsonl")):
        refused("--data", "--model", model, "--data", name, *flags[4:], "--out", tmp_path / "run")
    refused("--eval-data", *flags, "--eval-data", odd + ".jsonl", "--out", tmp_path / "run")
    shutil.copy(data, tmp_path / "rows.jsonl")
    with open(odd + ".toml", "w") as file:
        file.write(f"[[mix]]\ndata = '{data}'\nobjective = 'nothing'\n")
    failed = espalier("train", "--model", model, "--mix", odd + ".toml", "--out", tmp_path / "run", check=False)
    assert failed.returncode == 1 and "\ufffd.toml:1: source nothing: " in failed.stderr, failed.stderr
    shutil.copytree(model, odd + "model")
    (tmp_path / os.path.basename(odd + "model") / "tokenizer.json").write_text("[]")
    failed = espalier("inspect", "--model", odd + "model", "--data", data, check=False)
    assert failed.returncode == 1 and "tokenizer.json: expected a tokenizer" in failed.stderr, failed.stderr
    shutil.copytree(model, odd)
    refused("--model", "--model", odd, *flags[2:], "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("out", ["disk", "disk/outer/model"])
def test_init_on_a_full_disk_leaves_nothing(model, small_disk, tmp_path, out):
    """A folder that was there stays, empty."""
    command = [PROGRAM, "init", "--config", model.parent / "config.json", "--out", tmp_path / out]
    failed = subprocess.run([*small_disk, *map(str, command)], capture_output=True, text=True)
    assert failed.returncode == 1 and "No space left on device" in failed.stderr, failed.stderr
    assert failed.stdout == ""


# ---- Temporary files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_temporary_files_go_with_a_signal(start, tmp_path, name):
    process = start("synth", "-o", tmp_path / "rows.jsonl", "--trees", 2000, "--depth", 4, "--branching", 6,
                    "--vocab-size", 5000)  # fmt: skip
    wait_until(lambda: leftovers(tmp_path), process)
    assert leftovers(tmp_path)
    process.send_signal(getattr(signal, name))
    assert process.wait() == -getattr(signal, name)
    assert not leftovers(tmp_path) and not (tmp_path / "rows.jsonl").exists()


def test_temporary_files_of_killed_commands_are_swept(espalier, start, flags, tmp_path):
    process = start("synth", "-o", tmp_path / "rows.jsonl", "--trees", 2000, "--depth", 4, "--branching", 6,
                    "--vocab-size", 5000)  # fmt: skip
    wait_until(lambda: leftovers(tmp_path), process)
    process.kill()
    process.wait()
    (left,) = leftovers(tmp_path)
    foreign = tmp_path / left.name.replace(".espalier-", ".espalier-elsewhere-")
    foreign.write_text("of another host")
    espalier("synth", "-o", tmp_path / "small.jsonl", "--trees", 1)
    assert leftovers(tmp_path) == [foreign]
    # Unfinished checkpoints, whoever left them: only the holder of the lock writes any.
    partial = tmp_path / "run/checkpoints/.step_7.elsewhere-1-1.partial"
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_text("half")
    espalier("train", *flags, "--out", tmp_path / "run", "--steps", 1)
    assert not partial.exists()
