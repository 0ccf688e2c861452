#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What has to be right on a GPU before its speed means anything: tests, verify, equal bits of two runs, compute-sanitizer.

    tests          the GoogleTest programs of the build, restricted to --filter; a test that was skipped is not a pass. Every
                   suite, and every value of a suite's parameter, runs in a separate process: a kernel that breaks the
                   device or hangs takes no other with it
    verify         espalier verify on a small random model and random trees, in float64, float32 and bfloat16, by every strategy
    determinism    three optimiser steps by espalier train --deterministic, twice: the checkpoints must be equal byte for byte
    ranks          three steps under torchrun, a process for each GPU (over NCCL; two on a CPU), against those of one process
    sanitizer      the tests of --sanitizer-filter under compute-sanitizer: memcheck (without the caching allocator, which hides
                   accesses beyond a tensor) and racecheck

    python3 bench/gpu_checks.py --build build/gpu                     all of it
    python3 bench/gpu_checks.py --parts verify --device cpu           to try the script where there is no GPU

Exit status 1 when anything fails, is missing, or runs no test. --seconds bounds the whole; what was left out is named. --out,
--json and --log are written as results come. The tests of random forests are cut into several runs beside each other, by
ESPALIER_CUDA_FORESTS, which is their number (--forests; few under the sanitizer), and ESPALIER_CUDA_FIRST_FOREST.
"""

import argparse
import contextlib
import filecmp
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent import futures
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
from commit import commit
from gpu_measure import (REPOSITORY, Budget, Stopped, add_common, finish, list_of, markdown, run_main, say,
                         stop_on_sigterm)  # fmt: skip

PARTS = ("tests", "verify", "determinism", "ranks", "sanitizer")
STRATEGIES = ("partition", "tree-packing", "sequence-packing")
DTYPES = ("float64", "float32", "bfloat16")


def small_model(head_dim):
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "hidden_size": 256,
        "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": head_dim, "vocab_size": 2000, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "tie_word_embeddings": True, "attention_bias": False, "attention_dropout": 0.0,
        "initializer_range": 0.05,
    }  # fmt: skip


RUNNING = set()  # processes


class Group(NamedTuple):
    """Tests that run in one process."""

    program: Path
    name: str
    tests: tuple
    forests: tuple = ()  # the first and the number, where it is one of several runs

    @property
    def filter(self):
        return ":".join(self.tests)


class Outcome(NamedTuple):
    part: str
    what: str
    passed: bool
    detail: str
    seconds: float


def execute(command, timeout, **environment):
    """(exit status, output with errors); a status of None: it ran out of time. Whatever it started ends with it."""
    command = list(map(str, command))
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                                   env={**os.environ, **environment}, start_new_session=True)  # fmt: skip
    except OSError as error:
        return 127, f"{command[0]}: {error.strerror}"
    RUNNING.add(process)
    try:
        out, _ = process.communicate(timeout=max(1, timeout))
        return process.returncode, out
    except subprocess.TimeoutExpired:
        end(process)
        try:
            return None, process.communicate(timeout=15)[0]
        except subprocess.TimeoutExpired as stuck:  # in the driver, out of reach of signals
            return None, (stuck.output or b"").decode(errors="replace")
    except BaseException:
        end(process)
        raise
    finally:
        RUNNING.discard(process)


def end(process):
    """Its whole process group: compute-sanitizer runs the program as a child, which would hold on to the output."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def last_line(text):
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:200].replace("|", "/") if lines else "no output"


class Checks:
    def __init__(self, args, scratch):
        self.args, self.scratch = args, scratch
        self.budget = Budget(args.seconds)
        self.outcomes, self.lock = [], threading.Lock()

    def add(self, part, what, passed, detail, began):
        with self.lock:
            self.outcomes.append(Outcome(part, what, passed, detail, time.monotonic() - began))
            say(f"{part}: {what}: {'passed' if passed else 'FAILED'}: {detail}")
            self.write()

    def passed(self):
        return bool(self.outcomes) and all(outcome.passed for outcome in self.outcomes)

    def write(self, show=False):
        text = f"commit {commit()}, device {self.args.device}\n\n{report(self.outcomes)}{self.budget.note()}"
        text += f"\n{'All passed.' if self.passed() else 'FAILED.'}\n"
        finish(self.args, text, {
            "commit": commit(), "passed": self.passed(), "outcomes": [outcome._asdict() for outcome in self.outcomes],
            "left_out": self.budget.left_out}, show)  # fmt: skip

    def run(self, command, most_seconds=float("inf"), **environment):
        status, out = execute(command, min(most_seconds, self.budget.left), **environment)
        if self.args.log:
            named = "".join(f"{name}={value} " for name, value in environment.items())
            with self.lock, self.args.log.open("a") as file:
                file.write(f"$ {named}{' '.join(map(str, command))}\n{out}\n[exit status {status}]\n\n")
        return status, out

    def beside(self, call, items, number):
        """call(item) for each, some beside each other: most of a run is starting up."""
        with futures.ThreadPoolExecutor(number) as pool:
            try:
                for _ in pool.map(call, items):
                    pass
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(RUNNING):
                    end(process)
                raise

    def espalier(self, *arguments):
        return self.run([self.args.espalier, *arguments])

    def on_device(self, deterministic=False):
        if self.args.device == "cpu":
            return []
        return ["--device", self.args.device, *(["--deterministic"] if deterministic else [])]

    # ---- Tests ----

    def groups(self, tests, forests):
        """By suite and parameter, of all programs of the build that have tests of this filter."""
        found = []
        for path in sorted((self.args.build / "tests").glob("*tests")):
            if path.is_file() and os.access(path, os.X_OK):
                _, out = execute([path, "--gtest_list_tests", f"--gtest_filter={tests}"], 60)
                found += groups_of(path, out, forests)
        return found

    def tests(self):
        groups = self.groups(self.args.filter, self.args.forests)
        if not groups:
            self.add("tests", "all", False, f"no program of {self.args.build}/tests has a test {self.args.filter}",
                     time.monotonic())  # fmt: skip
        self.beside(self.test_group, groups, self.args.parallel)

    def test_group(self, group):
        what = f"{group.program.name}: {group.name}"
        if not self.budget.has(3, what):
            return
        began, first_and_number = time.monotonic(), group.forests or (0, self.args.forests)
        environment = dict(zip(("ESPALIER_CUDA_FIRST_FOREST", "ESPALIER_CUDA_FORESTS"), map(str, first_and_number)))
        status, out = self.run([group.program, f"--gtest_filter={group.filter}"], self.args.group_seconds, **environment)
        ran = TestCounts(out)
        self.add("tests", what, status == 0 and ran.passed > 0 and not ran.failed, ran.detail(status, out), began)

    # ---- Verify, determinism ----

    def model(self, head_dim):
        folder = self.scratch / f"model_{head_dim}"
        if not folder.exists():
            config = self.scratch / f"{head_dim}.json"
            config.write_text(json.dumps(small_model(head_dim)))
            self.espalier("init", "--config", config, "--out", folder, "--dtype", "float64", "--seed", 1)
        return folder

    def rows(self):
        path = self.scratch / "rows.jsonl"
        if not path.exists():
            self.espalier("synth", "-o", path, "--trees", 2, "--depth", 4, "--branching", 3, "--node-length", 40,
                          "--end-inside", 0.3, "--loss-rate", 0.7, "--rl", "--vocab-size", 2000, "--seed", 3)  # fmt: skip
        return path

    def verify(self):
        runs = [(128, dtype, strategy, "sft") for dtype in DTYPES for strategy in STRATEGIES]
        runs += [(64, "bfloat16", "partition", "sft"), (64, "float32", "partition", "grpo"),
                 (128, "float64", "partition", "grpo"), (128, "bfloat16", "tree-packing", "grpo")]  # fmt: skip
        runs = [run for run in runs if run[1] in self.args.dtypes]
        self.rows()
        for dim in {run[0] for run in runs}:
            self.model(dim)
        self.beside(lambda run: self.verify_one(*run), runs, self.args.parallel)

    def verify_one(self, dim, dtype, strategy, objective):
        what = f"{dtype}, {strategy}, {objective}, head dimension {dim}"
        if not self.budget.has(3, what):
            return
        began = time.monotonic()
        status, out = self.espalier("verify", "--model", self.model(dim), "--data", self.rows(), "--limit", 24,
                                    "--dtype", dtype, "--strategy", strategy, "--objective", objective, "--token-budget", 400,
                                    *self.on_device(), "--json")  # fmt: skip
        try:
            report = json.loads(out[out.index("{") : out.rindex("}") + 1])
        except ValueError:
            stopped = status is None or status < 0
            self.add("verify", what, False, "ran out of time" if stopped else last_line(out), began)
            return
        if dtype == "float64":
            detail = f"worst relative error of a gradient {report['grad_rel_error_max']:.1e}"
        else:
            detail = f"error ratio worst {report['error_ratio_max']:.2f}, median {report['error_ratio_median']:.2f}"
        isolation = "bitwise" if report["isolation_bitwise"] else "BROKEN"
        self.add("verify", what, status == 0 and report["passed"], f"{detail}; isolation {isolation}", began)

    def training(self, dtype, folder):
        """The command of three steps."""
        return ["train", "--model", self.model(128), "--data", self.rows(), "--limit", 16, "--out", folder, "--dtype", dtype,
                "--steps", 3, "--strategy", "partition", "--token-budget", 400, "--learning-rate", 0.001, "--no-calibration",
                *self.on_device(deterministic=True)]  # fmt: skip

    def determinism(self):
        dtypes = [dtype for dtype in ("bfloat16", "float32") if dtype in self.args.dtypes]
        self.rows(), self.model(128)
        began, runs = time.monotonic(), {}

        def train(run):
            dtype, index = run
            folder = self.scratch / f"run_{dtype}_{index}"
            runs[run] = folder, *self.espalier(*self.training(dtype, folder))

        self.beside(train, [(dtype, index) for dtype in dtypes for index in (1, 2)], self.args.parallel)
        for dtype in dtypes:
            (first, *_), (second, *_) = pair = runs[dtype, 1], runs[dtype, 2]
            failed = [out for _, status, out in pair if status != 0]
            if failed:
                self.add("determinism", dtype, False, last_line(failed[0]), began)
                continue
            same, count = equal_tensors(first, second)
            verdict = "equal in every bit" if same else "DIFFER"
            self.add("determinism", dtype, same and count > 0, f"{count} files of tensors {verdict}", began)

    def ranks(self):
        processes = 2 if self.args.device == "cpu" else max(1, len(execute(["nvidia-smi", "-L"], 30)[1].splitlines()))
        for dtype, tolerance in (("float64", 1e-12), ("float32", 1e-4)):
            if dtype not in self.args.dtypes or not self.budget.has(10, f"ranks, {dtype}"):
                continue
            began, alone, together = time.monotonic(), self.scratch / f"alone_{dtype}", self.scratch / f"ranks_{dtype}"
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes, "-m", "espalier"]
            done = [self.espalier(*self.training(dtype, alone)),
                    self.run([*torchrun, *self.training(dtype, together)], PYTHONPATH=str(REPOSITORY / "python"))]  # fmt: skip
            what = f"{dtype}, {processes} process{'es' if processes > 1 else ''}"
            failed = [out for status, out in done if status != 0]
            if failed:
                self.add("ranks", what, False, last_line(failed[0]), began)
                continue
            worst = largest_difference(alone, together)
            self.add("ranks", what, worst <= tolerance, f"losses and norms of gradients differ by {worst:.1e} at most", began)

    # ---- compute-sanitizer ----

    def sanitizer(self):
        groups = self.groups(self.args.sanitizer_filter, 0)
        if not groups:
            self.add("sanitizer", "all", False, f"no program has a test {self.args.sanitizer_filter}", time.monotonic())
        self.beside(lambda run: self.sanitize(*run), [(tool, group) for tool in self.args.tools for group in groups],
                    self.args.parallel)  # fmt: skip

    def sanitize(self, tool, group):
        what = f"{tool}, {group.program.name}: {group.name}"
        if not self.budget.has(15, what):
            return
        began, environment = time.monotonic(), {"ESPALIER_CUDA_FORESTS": "4"}
        if tool == "memcheck":
            environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        # Only kernels of this project: the others are many, and not ours to mend.
        command = [self.args.sanitizer, "--tool", tool, "--kernel-name", "kns=espalier", "--report-api-errors", "no",
                   "--error-exitcode", SANITIZER_STATUS, "--print-limit", 20, group.program, f"--gtest_filter={group.filter}"]  # fmt: skip
        status, out = self.run(command, **environment)
        tests, skipped, errors, warnings = sanitizer_counts(out)
        detail = f"{tests} tests, {skipped} skipped, {'no summary' if errors is None else f'{errors} errors'}"
        if warnings:
            detail += f", {warnings} warnings"
        if "Internal Sanitizer Error" in out:  # of the tool, after which calls of CUDA fail: no verdict on a kernel
            self.budget.left_out.append(f"{what} (the tool itself failed)")
            return
        # The tool's status is that of its findings, warnings among them, in place of the program's.
        ended = status == 0 or (status == SANITIZER_STATUS and warnings and "[  FAILED  ]" not in out)
        passed = ended and errors == 0 and tests > 0
        if status is None:
            reported = out.count("\n========= ")
            detail += f", ran out of time; {'nothing' if reported <= 1 else f'{reported} lines'} reported until then"
        elif not passed and tests == 0:
            detail += f": {last_line(out)}"
        self.add("sanitizer", what, passed, detail, began)


SANITIZER_STATUS = 9
SHARED_RUNS = re.compile(r"RandomForests\.TreeAttentionOnCuda$")


def groups_of(program, listing, forests):
    """Of --gtest_list_tests: a suite's name ends in a dot, its tests are indented, behind # stands a parameter."""
    names, suite = {}, ""
    for line in listing.splitlines():
        name = line.split("#")[0].strip()
        if line.startswith("  ") and suite:
            test = suite + name
            _, slash, parameter = name.partition("/")
            alone = SHARED_RUNS.search(test)
            names.setdefault(test if alone else suite[:-1] + slash + parameter, []).append(test)
        else:
            suite = name if name.endswith(".") and " " not in name else ""
    found = []
    for name, tests in names.items():
        number = 4 if SHARED_RUNS.search(name) and forests >= 100 else 1
        each = -(-forests // number)
        shares = [(first, min(each, forests - first)) for first in range(0, forests, each)] if number > 1 else [()]
        for share in shares:
            found.append(Group(program, name + (f", forests from {share[0]}" if share else ""), tuple(tests), share))
    return found


class TestCounts:
    """Of GoogleTest's output, which may have been cut off: what passed, was skipped, failed, and was running at the end."""

    def __init__(self, out):
        self.passed = len(re.findall(r"^\[ {7}OK \] ", out, re.MULTILINE))
        self.skipped = len(re.findall(r"^\[  SKIPPED \] \S+ \(\d+ ms\)$", out, re.MULTILINE))
        self.failed = re.findall(r"^\[  FAILED  \] ([^ ,]+)(?:, where .*)? \(\d+ ms\)$", out, re.MULTILINE)
        begun = re.findall(r"^\[ RUN      \] (\S+)", out, re.MULTILINE)
        unfinished = len(begun) - self.passed - self.skipped - len(self.failed)
        self.running = begun[-1] if unfinished > 0 else ""

    def detail(self, status, out):
        text = f"{self.passed} passed, {self.skipped} skipped, {len(self.failed)} failed"
        if self.failed:
            text += ": " + ", ".join(self.failed[:8]) + first_failure(out)
        if status is None:
            text += f"; ran out of time in {self.running or 'no test'}"
        elif self.running:
            text += f"; ended with status {status} in {self.running}"
        elif status != 0 and not self.failed:
            text += f"; exit status {status}: {last_line(out)}"
        return text


def first_failure(out):
    """The first line that says what was wrong, with the seed of its trace."""
    lines = out.splitlines()
    for index, line in enumerate(lines):
        if ": Failure" in line or line.startswith("unknown file"):
            said = [part.strip() for part in lines[index + 1 : index + 4] if part.strip()]
            return f" ({'; '.join(said)[:160]})".replace("|", "/")
    return ""


def equal_tensors(first, second):
    """(whether all .safetensors files below two folders are the same, their number)"""
    names = {path.relative_to(first) for path in first.rglob("*.safetensors")}
    others = {path.relative_to(second) for path in second.rglob("*.safetensors")}
    same = names == others and all(filecmp.cmp(first / name, second / name, shallow=False) for name in names)
    return same, len(names)


def largest_difference(first, second):
    """Of losses and gradient norms of two runs, relative. The later ones depend on the updates before them."""
    runs = [[json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] for folder in (first, second)]
    return max(abs(a[name] - b[name]) / abs(a[name]) for a, b in zip(*runs, strict=True) for name in ("loss", "grad_norm"))


def sanitizer_counts(out):
    """(tests that passed, that were skipped, errors or None, warnings) of compute-sanitizer around a GoogleTest program, which may
    have been stopped. racecheck warns of what it cannot follow, such as the order that asynchronous products and their barriers
    give: that alone is no error."""

    def number(pattern):
        match = re.search(pattern, out)
        return int(match.group(1)) if match else None

    errors = number(r"ERROR SUMMARY: (\d+) error")
    if errors is None:
        errors = number(r"RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) error")
    if errors is None:  # no division: all of them count
        errors = number(r"RACECHECK SUMMARY: (\d+) hazard")
    warnings = number(r"RACECHECK SUMMARY: .*?(\d+) warning") or 0
    skipped = number(r"\[  SKIPPED \] (\d+) test") or 0
    return out.count("[       OK ]"), skipped, errors, warnings


def report(outcomes):
    rows = [[o.part, o.what, "passed" if o.passed else "FAILED", o.detail, f"{o.seconds:.1f}"] for o in outcomes]
    return markdown(["part ", "what ", "result ", "detail ", "seconds"], rows)


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_common(parser, seconds=300)
    add("--parts", type=list_of(str), default=",".join(PARTS), metavar="LIST", help="(default: %(default)s)")
    add("--build", type=Path, default=REPOSITORY / "build/release", metavar="FOLDER", help="(default: build/release)")
    add("--espalier", type=Path, metavar="FILE", help="(default: that of --build)")
    add("--filter", default="*Cuda.*:*Cuda/*:*OnCuda", metavar="FILTER",
        help="of GoogleTest (default: %(default)s)")  # fmt: skip
    add("--forests", type=int, default=1000, metavar="N", help="random forests against float64 (default: %(default)s)")
    add("--sanitizer-filter", metavar="FILTER",
        default="*Cuda.*Random*:*Cuda.*Awkward*:*Cuda.EqualTheReference:*OnCuda-*/masked",
        help="tests under the sanitizer, which is tens of times slower (default: %(default)s)")  # fmt: skip
    add("--dtypes", type=list_of(str), default=",".join(DTYPES), metavar="LIST",
        help="of verify, determinism and ranks (default: %(default)s)")  # fmt: skip
    add("--tools", type=list_of(str), default="memcheck,racecheck", metavar="LIST", help="(default: %(default)s)")
    add("--sanitizer", default="compute-sanitizer", metavar="FILE", help="(default: %(default)s)")
    add("--parallel", type=int, default=6, metavar="N", help="processes beside each other (default: %(default)s)")
    add("--group-seconds", type=float, default=90, metavar="S",
        help="of the tests in one process, which count as hung behind them (default: %(default)s)")  # fmt: skip
    add("--log", type=Path, metavar="FILE", help="add the output of every command to this file")
    args = parser.parse_args(argv)
    for part in args.parts:
        if part not in PARTS:
            parser.error(f"--parts: expected names of {', '.join(PARTS)}, received {part}")
    args.espalier = args.espalier or args.build / "bin/espalier"
    return args


def main(argv=None):
    args = parse(argv)
    with tempfile.TemporaryDirectory() as scratch:
        checks = Checks(args, Path(scratch))
        stop_on_sigterm()
        try:
            for part in checks.budget.each(args.parts, 5, lambda part: part):
                getattr(checks, part)()
        except Stopped:
            checks.budget.left_out.append("what came after")
    checks.write(show=True)
    return 0 if checks.passed() else 1


if __name__ == "__main__":
    sys.exit(run_main(main))
