# SPDX-License-Identifier: Apache-2.0
"""bench/gpu_checks.py on the CPU: what counts as passed. Its workers and the suite that calls it: test_gpu_suite.py."""

import json
import shutil
import time

import pytest

from test_gpu_suite import BUILD, script  # and bench/ is on the path

import gpu_checks


def checks(tmp_path, *arguments):
    done = script("gpu_checks.py", "--device", "cpu", "--build", BUILD, "--json", tmp_path / "c.json", "--log",
                  tmp_path / "c.log", *arguments, OMP_NUM_THREADS="1")  # fmt: skip
    return done, json.loads((tmp_path / "c.json").read_text())


def test_determinism_on_the_cpu(tmp_path):
    done, record = checks(tmp_path, "--parts", "determinism")
    assert done.returncode == 0 and record["passed"], done.stdout
    assert "equal in every bit" in done.stdout and "$ " in (tmp_path / "c.log").read_text()


@pytest.mark.nightly
def test_ranks_on_the_cpu(tmp_path):
    done, record = checks(tmp_path, "--parts", "ranks", "--dtypes", "float64")
    assert done.returncode == 0 and record["passed"] and "float64, 2 processes" in done.stdout, done.stdout


def test_another_gradient_of_a_rank_is_noticed(tmp_path):
    """Negative control: a gradient norm that is off in the tenth digit."""
    for name, norm in {"a": 1.0, "b": 1 + 1e-10}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(f'{{"loss": 2.0, "grad_norm": 1.0}}\n{{"loss": 2.0, "grad_norm": {norm!r}}}\n')
    assert gpu_checks.largest_difference(tmp_path / "a", tmp_path / "a") == 0
    assert 0.9e-10 < gpu_checks.largest_difference(tmp_path / "a", tmp_path / "b") < 1.1e-10


def test_tests_that_are_all_skipped_do_not_pass(tmp_path):
    if not shutil.which("nvidia-smi"):
        done, record = checks(tmp_path, "--parts", "tests", "--filter", "RandomForests.*Cuda")
        assert done.returncode == 1 and not record["passed"] and "0 passed, 1 skipped" in done.stdout
    done, record = checks(tmp_path, "--parts", "tests", "--filter", "RandomForests.*Cpu:RandomForests.What*")
    assert done.returncode == 0 and "2 passed, 0 skipped, 0 failed" in done.stdout
    done, record = checks(tmp_path, "--parts", "tests,sanitizer", "--filter", "No.Such", "--sanitizer-filter", "No.Such")
    assert done.returncode == 1 and len(record["outcomes"]) == 2


FAKE_SANITIZER = """#!/bin/sh
while [ "$1" != --print-limit ]; do [ "$1" = --tool ] && tool=$2; shift; done
shift 2
"$@" 2>&1
status=$?
if [ $tool = memcheck ]; then echo "========= ERROR SUMMARY: $ERRORS errors"
else echo "========= RACECHECK SUMMARY: $((ERRORS + WARNINGS)) hazards displayed ($ERRORS errors, $WARNINGS warnings)"; fi
[ "$ERRORS" = 0 ] || exit 9
[ "$tool" = memcheck ] || [ "$WARNINGS" = 0 ] || exit 9
exit $status
"""


@pytest.mark.parametrize("errors,warnings", [(0, 0), (3, 0), (0, 2), (3, 2)])
def test_sanitizer_counts(tmp_path, monkeypatch, errors, warnings):
    """A stand-in that prints what the tool prints. Warnings of racecheck are shown, and are no failure by themselves."""
    fake = tmp_path / "sanitizer"
    fake.write_text(FAKE_SANITIZER)
    fake.chmod(0o755)
    monkeypatch.setenv("ERRORS", str(errors))
    monkeypatch.setenv("WARNINGS", str(warnings))
    done, record = checks(tmp_path, "--parts", "sanitizer", "--sanitizer", fake, "--sanitizer-filter", "RandomForests.What*")
    assert done.returncode == (1 if errors else 0)
    counted = f"1 tests, 0 skipped, {errors} errors"
    details = {o["what"].partition(",")[0]: o["detail"] for o in record["outcomes"]}
    assert details == {"memcheck": counted, "racecheck": counted + (f", {warnings} warnings" if warnings else "")}
    assert gpu_checks.sanitizer_counts("[       OK ] A.B (1 ms)\n") == (1, 0, None, 0)


def test_warnings_do_not_hide_a_test_that_failed(tmp_path, monkeypatch):
    fake = tmp_path / "sanitizer"
    fake.write_text(FAKE_SANITIZER.replace('"$@" 2>&1', 'echo "[       OK ] A.B"; echo "[  FAILED  ] A.C"'))
    fake.chmod(0o755)
    monkeypatch.setenv("ERRORS", "0")
    monkeypatch.setenv("WARNINGS", "1")
    done, _ = checks(tmp_path, "--parts", "sanitizer", "--tools", "racecheck", "--sanitizer", fake, "--sanitizer-filter",
                     "RandomForests.What*")  # fmt: skip
    assert done.returncode == 1


LISTING = """Running main() from gtest_main.cc
Kinds/TreeAttentionCuda.
  Equals/ampere  # GetParam() = 0x1 pointing to "ampere"
  Equals/varlen  # GetParam() = 0x2 pointing to "varlen"
  Awkward/ampere  # GetParam() = 0x1 pointing to "ampere"
ElementwiseCuda.
  EqualTheReference
RandomForests.
  TreeAttentionOnCuda
"""


def test_groups_of_tests():
    """By suite and parameter; the random forests are shared out."""
    groups = gpu_checks.groups_of("p", LISTING, 1000)
    assert [group.name for group in groups[:3]] == ["Kinds/TreeAttentionCuda/ampere", "Kinds/TreeAttentionCuda/varlen",
                                                    "ElementwiseCuda"]  # fmt: skip
    assert groups[0].filter == "Kinds/TreeAttentionCuda.Equals/ampere:Kinds/TreeAttentionCuda.Awkward/ampere"
    assert [group.forests for group in groups[3:]] == [(0, 250), (250, 250), (500, 250), (750, 250)]
    assert sum(group.forests[1] for group in gpu_checks.groups_of("p", LISTING, 1001)[3:]) == 1001
    assert len(gpu_checks.groups_of("p", LISTING, 50)) == 4


CRASHED = """[ RUN      ] A.Right
[       OK ] A.Right (1 ms)
[ RUN      ] K/A.Wrong/x
file.cpp:7: Failure
Expected: (a) <= (2), actual: 5 vs 2
seed 17
[  FAILED  ] K/A.Wrong/x, where GetParam() = "x" (3 ms)
[ RUN      ] A.Not
[  SKIPPED ] A.Not (0 ms)
[ RUN      ] A.Hangs
"""


def test_counts_of_output_that_was_cut_off():
    counts = gpu_checks.TestCounts(CRASHED)
    assert (counts.passed, counts.skipped, counts.failed, counts.running) == (1, 1, ["K/A.Wrong/x"], "A.Hangs")
    assert "K/A.Wrong/x (Expected: (a) <= (2), actual: 5 vs 2; seed 17" in counts.detail(-6, CRASHED)
    assert "ended with status -6 in A.Hangs" in counts.detail(-6, CRASHED)
    assert "ran out of time in A.Hangs" in counts.detail(None, CRASHED)
    listed = "[  FAILED  ] 1 test, listed below:\n[  FAILED  ] K/A.Wrong/x\n"
    assert gpu_checks.TestCounts(CRASHED + listed).failed == counts.failed
    assert "exit status 127: no such library" in gpu_checks.TestCounts("").detail(127, "no such library\n")


HANGING_TESTS = """#!/bin/sh
case "$*" in
*--gtest_list_tests*) printf 'A.\\n  Good\\nB.\\n  Hangs\\n' ;;
*A.Good*) echo '[ RUN      ] A.Good'; echo '[       OK ] A.Good (1 ms)' ;;
*) echo '[ RUN      ] B.Hangs'; sleep 60 ;;
esac
"""


def test_a_test_that_hangs_takes_no_other_along(tmp_path):
    program = tmp_path / "tests/fake_tests"
    program.parent.mkdir()
    program.write_text(HANGING_TESTS)
    program.chmod(0o755)
    began = time.monotonic()
    done = script("gpu_checks.py", "--build", tmp_path, "--parts", "tests", "--filter", "*", "--group-seconds", 2, "--json",
                  tmp_path / "c.json", "--log", tmp_path / "c.log")  # fmt: skip
    outcomes = {o["what"]: o for o in json.loads((tmp_path / "c.json").read_text())["outcomes"]}
    assert done.returncode == 1 and time.monotonic() - began < 30
    assert outcomes["fake_tests: A"]["passed"] and not outcomes["fake_tests: B"]["passed"]
    assert "ran out of time in B.Hangs" in outcomes["fake_tests: B"]["detail"]
    assert "[ RUN      ] B.Hangs" in (tmp_path / "c.log").read_text()
