# SPDX-License-Identifier: Apache-2.0
"""bench/gpu_*: what they compute without a GPU, and their scripts on the CPU. Their trees: test_gpu_trees.py."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time

import pytest

from conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "bench"))
import attention_sides
import gpu_attention
import gpu_bundle
import gpu_checks
import gpu_head
import gpu_isolated
import gpu_measure
import gpu_step
import gpu_summary
import gpu_trees as trees

BUILD = REPOSITORY / "build/release"


# ---- Measuring and reporting -------------------------------------------------------------------------------


def test_sides_run_in_turns():
    timer, calls = gpu_measure.Timer("cpu"), []
    samples = timer.in_turns({name: lambda name=name: calls.append(name) for name in "abc"}, 0, min_rounds=3)
    assert calls == ["a", "b", "c", *"abc", *"bca", *"cab"] and all(len(times) == 3 for times in samples.values())
    assert timer.in_turns({}, 1) == {}
    assert len(timer.in_turns({"slow": lambda: time.sleep(0.02)}, 10, max_rounds=4)["slow"]) == 4


def test_markdown():
    text = gpu_measure.markdown(["name ", "value"], [["a", "1"]])
    assert text == "| name | value |\n|---|---:|\n| a | 1 |\n"


def test_budget_names_what_is_left_out():
    budget = gpu_measure.Budget(0.5)
    assert list(budget.each([0.1, 5, 0.2], 0.1, str)) == [0.1, 5, 0.2]
    assert not budget.has(9, "late") and "Left out for want of time: late." in budget.note()


def test_lists():
    assert gpu_measure.list_of(int)("1,2") == [1, 2] and gpu_measure.list_of(str)("none") == []
    with pytest.raises(argparse.ArgumentTypeError, match="1,x"):
        gpu_measure.list_of(int)("1,x")


def script(name, *arguments, **environment):
    command = [sys.executable, REPOSITORY / "bench" / name, *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, env={**os.environ, **environment})


@pytest.mark.parametrize("name", ["gpu_attention.py", "gpu_head.py", "gpu_waves.py", "gpu_patched.py", "gpu_step.py",
                                  "gpu_checks.py", "gpu_qualify.py", "gpu_summary.py", "gpu_bundle.py"])  # fmt: skip
def test_help_teaches(name):
    done = script(name, "--help")
    assert done.returncode == 0 and "python3 bench/" + name in done.stdout and "options:" in done.stdout


@pytest.mark.parametrize("name", ["gpu_attention.py", "gpu_head.py"])
def test_kernel_benchmarks_on_the_cpu(name, tmp_path):
    more = ["--no-flex"] if name == "gpu_attention.py" else []
    done = script(name, "--quick", "--device", "cpu", "--dtype", "float32", "--case-seconds", 0.05, "-o", tmp_path / "t.md",
                  "--json", tmp_path / "t.json", *more, OMP_NUM_THREADS="1")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "t.md").read_text() == done.stdout and "FAILED" not in done.stdout
    records = json.loads((tmp_path / "t.json").read_text())["records"]
    assert len(records) == (6 if more else 2) and all(record["difference"] < 1e-4 for record in records)
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) == len(records) + 1 and len({row.count("|") for row in rows}) == 1


def test_libraries_on_the_cpu(tmp_path):
    """All sides that a CPU has, on small trees of the same shapes."""
    done = script("gpu_attention.py", "--libraries", "--quick", "--device", "cpu", "--dtype", "float64", "--no-flex", "--kinds", "masked",
                  "--case-seconds", 0.01, "--json", tmp_path / "t.json", OMP_NUM_THREADS="1")  # fmt: skip
    assert done.returncode == 0, done.stderr
    records = json.loads((tmp_path / "t.json").read_text())["records"]
    assert len(records) == 6 and len(gpu_summary.attention_lines({"records": records, "not_measured": []})) == 3
    for record in records:
        assert record["errors"].keys() == {"masked", "gather"} and record["difference"] < 1e-12
        assert max(record["errors"].values()) < 1e-12 and "flash" in record["tflops"]
    names = {line.split("|")[4].strip() for line in done.stdout.splitlines() if line.startswith("| ")}
    assert names == {"side", "masked", "gather", "flash"}


def test_errors_are_those_of_sampled_rows():
    """Negative control: one query that is off is seen; float64 is exact."""
    import torch

    case = gpu_attention.library_cases(quick=True)[1]
    inputs = attention_sides.Inputs(case, case.tree.tokens, "cpu", torch.float64, 0)
    ends = torch.tensor(trees.subtree_end(case.tree), dtype=torch.int32)
    side = attention_sides.gather_side(inputs, case.tree)
    assert max(attention_sides.errors_of({"a": side}, inputs, ends)["a"].values()) < 1e-12
    others = attention_sides.Inputs(case, case.tree.tokens, "cpu", torch.float64, 0)
    others.q[7] += 1e-3
    assert min(attention_sides.errors_of({"a": side}, others, ends)["a"].values()) > 1e-6


@pytest.mark.nightly
def test_waves_on_the_cpu(tmp_path, monkeypatch):
    """Both forms, by stand-ins for the libraries; a wrong one fails."""
    import gpu_waves
    from recurrence_stand_ins import GatedDelta, Mamba, installed

    flags = ["--quick", "--device", "cpu", "--dtype", "float64", "--json", str(tmp_path / "t.json")]
    with installed(monkeypatch, GatedDelta()) as stand_in, installed(monkeypatch, Mamba()):
        assert gpu_waves.main(flags, stand_ins=gpu_waves.FLOPS) == 0
        records = json.loads((tmp_path / "t.json").read_text())["records"]
        stand_in.change = lambda states: 1.5 * states
        assert gpu_waves.main([*flags, "--operators", "gated_delta_rule"], stand_ins=gpu_waves.FLOPS) == 1
    assert [record["waves"] for record in records[::4]] == [3, 5, 2, 1, 1, 3]
    assert len(records) == 24 == len(gpu_summary.recurrent_lines({"records": records, "failures": []}))
    for record in records:
        assert record["milliseconds"].keys() == {"composed", "waves", "flat"} and max(record["errors"].values()) < 1e-12


def test_patched_models_on_the_cpu(tmp_path, monkeypatch, capsys):
    """The sides that a CPU has; one with another loss fails."""
    pytest.importorskip("transformers")
    import gpu_patched

    flags = ["--quick", "--device", "cpu", "--dtype", "float32", "--case-seconds", "0.01", "--json", str(tmp_path / "t.json")]
    assert gpu_patched.main(flags) == 0
    said = capsys.readouterr()
    assert "its kernels need a GPU" in said.err and "FAILED" not in said.out
    records = json.loads((tmp_path / "t.json").read_text())["records"]
    assert [list(record["milliseconds"]) for record in records] == [["patched", "Step"]]
    (line,) = gpu_summary.patched_lines({"records": records, "failures": []})
    assert "patched over Step" in line

    steps_of = gpu_patched.steps_of

    def changed(*args):
        steps = steps_of(*args)
        return steps | {"patched": lambda: steps["patched"]() * 1.001}

    monkeypatch.setattr(gpu_patched, "steps_of", changed)
    assert gpu_patched.main(flags) == 1
    assert "expected the loss of espalier.Step" in capsys.readouterr().out


def test_flex_everywhere_has_every_tree_once():
    everywhere = gpu_attention.chosen_cases(gpu_attention.parse(["--flex-everywhere"]))
    here_and_there = gpu_attention.chosen_cases(gpu_attention.parse([]))
    names = [(case.name, case.shape) for case in everywhere]
    assert len(names) == len(set(names)) and set(names) == {(case.name, case.shape) for case in here_and_there}
    assert len(everywhere) < len(here_and_there)
    assert gpu_attention.parse(["--dense", "none"]).dense == []


def test_sides_that_disagree_fail(monkeypatch, capsys):
    """Negative control: a tree in which siblings see each other, on one side alone."""
    import torch

    side = gpu_attention.espalier_side
    monkeypatch.setattr(gpu_attention, "espalier_side", lambda kind, inputs, ends: side(
        kind, inputs, ends if kind == "ampere" else torch.full_like(ends, len(ends))))  # fmt: skip
    flags = ["--quick", "--device", "cpu", "--dtype", "float32", "--case-seconds", "0.01", "--no-flex", "--dense", "none"]
    assert gpu_attention.main([*flags, "--cases", "chain"]) == 0
    assert gpu_attention.main([*flags, "--cases", "star"]) == 1
    assert "FAILED: sides that compute the same tree differ" in capsys.readouterr().out


def test_another_head_fails(monkeypatch, capsys):
    """Negative control: one gradient of the head is off by 3 %."""
    torch_pass = gpu_head.torch_pass

    def wrong(problem, chunk):
        logprobs, hidden, weight = torch_pass(problem, chunk)
        return logprobs, hidden * 1.03, weight

    monkeypatch.setattr(gpu_head, "torch_pass", wrong)
    assert gpu_head.main(["--quick", "--device", "cpu", "--dtype", "float32", "--case-seconds", "0.01"]) == 1
    assert "FAILED: the two sides differ" in capsys.readouterr().out


def test_what_cannot_run_is_named(capsys):
    assert script("gpu_attention.py", "--ops", "nowhere.so").stderr.strip().endswith("or name it by --ops")
    assert "--list shows them" in script("gpu_attention.py", "--cases", "nothing").stderr
    assert "name it by --espalier" in script("gpu_step.py", "--espalier", "nowhere", "--models", "tiny", "--device", "cpu").stderr
    assert script("gpu_step.py", "--models", "7b").returncode == 2


def test_step_on_the_cpu(tmp_path):
    done = script("gpu_step.py", "--device", "cpu", "--dtype", "float32", "--models", "tiny", "--tree-tokens", 256, "--ratios",
                  "1,4", "--grid", "96/8,64/32", "--token-budget", 200, "--repeats", 1, "--json", tmp_path / "t.json",
                  "--checkpoint-activations", "layer", OMP_NUM_THREADS="1")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    records = json.loads((tmp_path / "t.json").read_text())["records"]
    assert [record["name"] for record in records] == ["ratio 1", "ratio 4", "96 / 8", "64 / 32"]
    assert records[3]["tree_tokens"] == 64 + 9 * 32 > 200  # in pieces
    assert records[0]["bound"] == pytest.approx(1) and records[1]["tree_tokens"] == 256
    assert "activations of layers computed again" in done.stdout
    assert done.stdout.count("| tiny |") == 4 and "Long prompts, 9 responses" in done.stdout


def test_what_is_too_large_is_not_tried():
    args = gpu_step.parse(["--models", "0.6b,4b"])
    refused = [task.title for task in gpu_step.tasks(args) if task.refusal()]
    assert all(title.startswith("4b") for title in refused) and "4b ratio 128" in refused
    assert "4b 16,384 / 1,024" in refused and "4b 16,384 / 64" not in refused
    again = gpu_step.parse(["--models", "4b", "--checkpoint-activations", "layer", "--tree-tokens", "4096"])
    assert not [task.title for task in gpu_step.tasks(again) if task.refusal()]
    titles = [task.title for task in gpu_step.tasks(args)]
    important = ["0.6b ratio 1", "0.6b 16,384 / 64", "0.6b ratio 128", "4b ratio 8"]
    assert [title for title in titles if title in important] == important


def test_prompts_come_first_where_they_are_named_first():
    titles = [task.title for task in gpu_step.tasks(gpu_step.parse(["--models", "4b", "--sets", "prompts,ratios"]))]
    assert titles[0] == "4b 16,384 / 64" and titles[4] == "4b ratio 8"


def test_models_are_made_ahead(tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/half").write_text("of a run that was stopped")
    done = script("gpu_step.py", "--prepare", "--models", "tiny", "--scratch", tmp_path)
    assert done.returncode == 0 and (tmp_path / "tiny/model.safetensors").is_file(), done.stderr
    assert not (tmp_path / "tiny/half").exists()


def test_the_commit_of_a_measurement(tmp_path):
    """Of the repository itself, of a copy within another one, and where it is given."""
    def commit_of(folder, **given):
        done = subprocess.run([sys.executable, "-c", "from commit import commit; print(commit())"], cwd=folder, text=True,
                              capture_output=True, env={**os.environ, "PYTHONPATH": str(folder), "ESPALIER_COMMIT": "", **given})  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    for name in ("whole", "outer/copy"):
        (tmp_path / name / "bench").mkdir(parents=True)
        shutil.copy(REPOSITORY / "bench/commit.py", tmp_path / name / "bench")
    for repository in ("whole", "outer"):
        git = lambda *words: subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True,
                                            cwd=tmp_path / repository, capture_output=True, text=True).stdout.strip()  # fmt: skip
        git("init")
        git("add", "-A")
        git("commit", "-m", "first")
        git("tag", "-a", "v1", "-m", "v1")
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=tmp_path / "whole", capture_output=True, text=True).stdout.strip()
    assert commit_of(tmp_path / "whole/bench") == head
    assert commit_of(tmp_path / "outer/copy/bench") == "unknown commit"
    assert commit_of(tmp_path / "outer/copy/bench", ESPALIER_COMMIT="abc123") == "abc123"
    (tmp_path / "whole/bench/commit.py").open("a").write("# changed\n")
    assert commit_of(tmp_path / "whole/bench") == f"{head} with changes"


# ---- Workers -----------------------------------------------------------------------------------------------


def worker(tell, fate):
    tell.result("first")
    tell.doing("the rest", 2)
    if fate == "hangs":
        time.sleep(60)
    if fate == "dies":
        os.kill(os.getpid(), 11)
    if fate == "raises":
        raise RuntimeError("an illegal memory access was encountered")
    tell.result("second")


@pytest.mark.parametrize("fate, last", [("ends", "second"), ("hangs", "did not end in 2 s"), ("dies", "status -11"),
                                        ("raises", "status 1")])  # fmt: skip
def test_what_becomes_of_a_worker(fate, last):
    began = time.monotonic()
    first, second, *rest = gpu_isolated.results(worker, fate, seconds=50)
    assert first == "first" and not rest and time.monotonic() - began < 40
    if fate == "ends":
        assert second == last
    else:
        assert second.doing == "the rest" and last in second.why


def test_a_worker_ends_when_no_time_is_left():
    *_, lost = gpu_isolated.results(worker, "hangs", seconds=1)
    assert lost.why == "no time was left"


def test_attention_goes_on_without_what_was_lost(monkeypatch):
    """Two workers are lost over the library, at two head dimensions: then it is left out altogether."""
    record = {"tree": "t", "heads": 1, "key_heads": 1, "head_dim": 64, "tokens": 1, "nodes": 1, "flops": 4e9, "pass": "forward",
              "difference": None, "differences": {}, "tflops": {"ampere": 4.0}, "milliseconds": {"ampere": (1.0, 1.0, 1.0)}}
    calls = []

    def results(work, args, first, left, seconds):
        calls.append((first, set(args.without)))
        if len(calls) <= 2:
            yield first, [record], [], []
            yield gpu_isolated.Lost("library", "did not end in 30 s")
        elif len(calls) == 3:
            yield gpu_isolated.Lost("inputs", "its process ended with status -6")
        else:
            yield 3, [record], ["no cuDNN"], []
            yield 4, None, [], ["late"]

    monkeypatch.setattr(gpu_isolated, "results", results)
    cases = [gpu_attention.Case("t", trees.chain(4), 1, 1, dim) for dim in (64, 128, 64, 256)]
    monkeypatch.setattr(gpu_attention, "chosen_cases", lambda args: cases)
    monkeypatch.setattr(gpu_attention, "hardware", lambda device: "a GPU")
    run = gpu_attention.Run(gpu_attention.parse(["--kinds", "ampere,library"]))
    run.measure()
    every = {("library", dim) for dim in (64, 128, 256)}
    assert [call[0] for call in calls] == [0, 1, 2, 3]
    assert calls[1][1] == {("library", 128)} and calls[2][1] == every and calls[3][1] >= every
    assert len(run.records) == 3 and run.left_out == ["late"] and len(run.problems) == 4
    assert "library, t, d 128: did not end in 30 s" in run.text()


# ---- Verdicts ----------------------------------------------------------------------------------------------


def qualified(tmp_path, cuda, status=0):
    program = tmp_path / "espalier"
    program.write_text(f"#!/bin/sh\n[ \"$*\" = 'device --requalify --json' ] || exit 9\ncat <<'E'\n{json.dumps({'cuda': cuda})}\nE\nexit {status}\n")
    program.chmod(0o755)
    return script("gpu_qualify.py", "--espalier", program, "--out", tmp_path / "q.md", "--json", tmp_path / "q.json",
                  "--failed", tmp_path / "qualify.failed")  # fmt: skip


def test_verdicts_are_kept_and_what_failed_is_named(tmp_path):
    gpu = {"name": "A GPU", "attention": {"library": "FAILED: its check did not end within 120 s", "ampere": "passed",
                                          "masked": "not for this device"}, "operators": {"head": "FAILED: off | by 1"}}
    done = qualified(tmp_path, {"fault": None, "devices": [gpu]})
    assert done.returncode == 1 and "2 of 3 families of kernels failed" in done.stderr, done.stderr
    assert (tmp_path / "qualify.failed").read_text() == "library\nhead\n"
    assert "| attention library | FAILED: its check did not end" in (tmp_path / "q.md").read_text()
    record = json.loads((tmp_path / "q.json").read_text())
    assert record["report"]["cuda"]["devices"] == [gpu] and len(record["outcomes"]) == 3
    assert gpu_summary.LINES["qualify"](record) == ["1 of 3 passed", "attention library: FAILED: its check did not end within 120 s",
                                                    "operators head: FAILED: off | by 1"]  # fmt: skip
    right = {**gpu, "attention": {"ampere": "passed"}, "operators": {}}
    done = qualified(tmp_path, {"fault": None, "devices": [right]})
    assert done.returncode == 0 and (tmp_path / "qualify.failed").read_text() == ""


def test_no_gpu_and_no_report_are_failures(tmp_path):
    done = qualified(tmp_path, {"fault": "no NVIDIA driver", "devices": []})
    assert done.returncode == 1 and "expected a GPU, received none that can be used: no NVIDIA driver" in done.stderr
    assert "ended with status 3" in qualified(tmp_path, {}, status=3).stderr
    assert "No such file" in script("gpu_qualify.py", "--espalier", tmp_path / "absent").stderr


@pytest.mark.parametrize("failed, kinds", [
    ("", ""), ("library", "ampere"), ("ampere", "library"), ("library ampere", "masked"), ("products", "")])  # fmt: skip
def test_what_failed_is_not_measured(tmp_path, failed, kinds):
    """The suite's own functions, on what stage qualify leaves."""
    (tmp_path / "qualify.failed").write_text("".join(f"{name}\n" for name in failed.split()))
    source = (REPOSITORY / "bench/gpu_suite.sh").read_text()
    functions = source[source.index("failed() {") : source.index("results() {")]
    run = f"set -euo pipefail; work=$1 attention=; {functions}\nright_kinds"
    done = subprocess.run(["bash", "-c", run, "bash", str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, kinds), done.stderr


def test_attention_apart_on_the_cpu(tmp_path):
    done = script("gpu_attention.py", "--quick", "--device", "cpu", "--dtype", "float32", "--case-seconds", 0.01, "--no-flex",
                  "--apart", "--cases", "star", "--json", tmp_path / "t.json", OMP_NUM_THREADS="1")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(json.loads((tmp_path / "t.json").read_text())["records"]) == 2


def test_what_runs_too_long_ends_with_its_children(tmp_path):
    began = time.monotonic()
    status, out = gpu_checks.execute(["sh", "-c", "echo begun; sleep 30 & wait"], 1)
    assert status is None and out == "begun\n" and time.monotonic() - began < 15
    assert gpu_checks.execute([tmp_path / "nothing"], 1)[0] == 127


# ---- The suite ---------------------------------------------------------------------------------------------


def suite(*arguments, **options):
    return subprocess.run([str(REPOSITORY / "bench/gpu_suite.sh"), *map(str, arguments)], capture_output=True, text=True, **options)


def test_folders_and_architectures(tmp_path):
    """Folders are those of the caller; the GPU is that of the machine, which a stand-in of nvidia-smi names."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho ${CAPABILITY}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    said = lambda *words, **given: suite("--dry-run", "--stages", "head", *words, cwd=tmp_path, env={
        **os.environ, "OUT": "", "PATH": f"{tmp_path}:{os.environ['PATH']}", **given}).stderr
    assert f"write to {tmp_path}/found\n" in said("found") and f"packages of {tmp_path}/packages," in said("--bundle-folder", "packages")
    assert f"packages of .gpu-bundle, and write to {REPOSITORY}/runs/gpu-suite\n" in said()
    for capability, name in (("9.0", "90-real"), ("8.6", "86-real"), ("12.0", "120-real"), ("", "90-real")):
        assert f"build for {name} with" in said(CAPABILITY=capability)
    assert "build for 80 with" in said("--architectures", "80", CAPABILITY="9.0")
    wrong = suite("--dry-run", "--bundle-folder", tmp_path / "absent")
    assert wrong.returncode == 2 and "--bundle-folder: no folder" in wrong.stderr


def test_dry_run_prints_every_stage():
    done = suite("--dry-run")
    assert done.returncode == 0, done.stderr
    for stage in ("libraries", "waves", "qualify", "tests", "verify", "models", "attention", "step", "step4b", "head", "patched", "sanitizer", "step4b_rest", "attention_flex", "papers"):  # fmt: skip
        assert f"[{stage}, " in done.stdout
    assert "CMAKE_CUDA_ARCHITECTURES" in done.stdout and "@S" not in done.stdout
    assert [line.split(",")[0] for line in suite("--dry-run", "--stages", "head,step").stdout.splitlines()] == ["[step", "[head"]
    beside = suite("--dry-run", "--stages", "sanitizer,attention,tests").stdout.splitlines()
    assert [line.split(",")[0] for line in beside] == ["[tests", "[sanitizer", "[attention"]
    (attention,) = [line for line in done.stdout.splitlines() if line.startswith("[attention,")]
    assert "--kinds" not in attention and "ESPALIER_ATTENTION= " in done.stdout
    assert "ESPALIER_ATTENTION=masked " in suite("--dry-run", "--stages", "step", "--attention", "masked").stdout
    assert "--kinds ampere,masked --seconds" in suite("--dry-run", "--stages", "attention", "--kinds", "ampere,masked").stdout


@pytest.mark.parametrize("flags, words", [
    (["--stages", "everything"], "--stages"), (["--seconds", "soon"], "--seconds"), (["--what"], "--what"),
    (["--jobs"], "--jobs needs a value"),
])  # fmt: skip
def test_suite_names_what_is_wrong(flags, words):
    done = suite(*flags)
    assert done.returncode == 2 and words in done.stderr


def test_suite_help_and_style():
    assert "--bundle" in suite("--help").stdout
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", REPOSITORY / "bench/gpu_suite.sh"], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_summary(tmp_path):
    stages = [("build", "passed"), ("tests", "FAILED"), ("attention", "passed"), ("step", "passed"), ("head", "out of time"),
              ("verify", "left out")]  # fmt: skip
    (tmp_path / "stages.tsv").write_text("".join(f"{stage}\t{result}\t7\n" for stage, result in stages))
    outcome = {"part": "tests", "what": "torch_tests", "passed": False, "detail": "3 passed | 1 failed", "seconds": 1}
    (tmp_path / "tests.json").write_text(json.dumps({"outcomes": [outcome]}))
    (tmp_path / "tests.md").write_text("| a |\n|---|\n")
    record = {"tree": "chain", "heads": 16, "key_heads": 4, "head_dim": 128, "pass": "forward", "tflops": {"ampere": 512.3}}
    both = [record, {**record, "pass": "backward", "tflops": {"ampere": 398.7}}]
    (tmp_path / "attention.json").write_text(json.dumps({"records": both * 15, "not_measured": []}))
    (tmp_path / "step.json").write_text("{ broken")
    (tmp_path / "head.last").write_text("it stood here\n")
    table, passed = gpu_summary.summarize(tmp_path, tmp_path / "out")
    assert not passed and "torch_tests: 3 passed / 1 failed" in table and "TFLOP/s ampere 512; backward ampere 399" in table
    assert "| head | out of time | 7 | it stood here |" in table
    assert "3 more in report.md" in table and "step.json: " in table and "left out" in table
    assert len({line.count("|") for line in table.splitlines()}) == 1
    assert "| a |" in (tmp_path / "out/report.md").read_text()
    assert json.loads((tmp_path / "out/results.json").read_text())["stages"]["tests"]["record"]["outcomes"] == [outcome]
    (tmp_path / "stages.tsv").write_text("head\tpassed\t1\n")
    assert gpu_summary.summarize(tmp_path, tmp_path / "out")[1]


# ---- The bundle --------------------------------------------------------------------------------------------


def test_bundle(tmp_path):
    """Relocatable, small, and all that CMake asks for."""
    out = tmp_path / "bundle"
    assert gpu_bundle.main(["-o", str(out)]) == 0
    assert gpu_bundle.main(["-o", str(out)]) == 0  # again, over the first
    assert sorted(path.name for path in out.iterdir()) == sorted(
        [gpu_bundle.PYTHON, *(package.name.lower() for package in gpu_bundle.PACKAGES)])  # fmt: skip
    assert (out / "python/packages/nanobind/cmake").is_dir() and len(list((out / "python/include").glob("python3.*/Python.h"))) == 1
    files = [path for path in out.rglob("*") if path.is_file()]
    assert not any(path.is_symlink() for path in files) and sum(path.stat().st_size for path in files) < 30e6
    for path in out.rglob("*.cmake"):
        assert str(tmp_path) not in path.read_text() and "/usr/" not in path.read_text()
    asked = (REPOSITORY / "CMakeLists.txt").read_text() + (REPOSITORY / "tests/CMakeLists.txt").read_text()
    found = {line.split("find_package(")[1].split()[0].rstrip(")") for line in asked.splitlines() if "find_package(" in line}
    libraries = (REPOSITORY / "cmake/EspalierLibraries.cmake").read_text()
    found |= set(re.findall(r"^espalier_library\(\w+ (\w+)", libraries, re.MULTILINE))
    assert found - {"LibTorch", "benchmark"} == {package.name for package in gpu_bundle.PACKAGES}
