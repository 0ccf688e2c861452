#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of patched models with other versions of Transformers, or of another package, beside this environment.

    python scripts/versions.py 5.2.0 5.5.4 5.16.1 5.24.0
    python scripts/versions.py peft==0.18.1 --tests tests/python/test_hf_patch.py
    python scripts/versions.py axolotl==0.19.0 --tests tests/python/test_trainer_packages.py

Each version is installed into build/versions/, with what it requires and the environment has not, and comes first on
PYTHONPATH. The environment itself stays as it is.
"""

import argparse
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
TESTS = [f"tests/python/test_hf_{name}.py" for name in ("versions", "patch", "head", "refusals", "families")]


def pip(folder, *requirements):
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--upgrade", "--target", folder]
    subprocess.run([*command, *requirements], check=True)


def installed(folder):
    """name -> distribution, of the environment and before it the folder."""
    return {canonicalize_name(each.metadata["Name"]): each
            for path in (sys.path, [str(folder)]) for each in metadata.distributions(path=path)}  # fmt: skip


def missing(folder):
    """What the packages of the folder require and the environment has not, but for PyTorch, and FlashAttention, which needs a GPU."""
    found = installed(folder)
    for each in metadata.distributions(path=[str(folder)]):
        for text in each.requires or ():
            wanted = Requirement(text)
            name = canonicalize_name(wanted.name)
            if name in ("torch", "flash-attn") or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
                continue
            if name not in found or not wanted.specifier.contains(found[name].version, prereleases=True):
                yield f"{name}{wanted.specifier}"


def overlay(requirement):
    """The folder with a package and what it requires."""
    folder = ROOT / "build/versions" / requirement.replace("==", "-")
    if not (folder / "complete").is_file():
        pip(folder, requirement)
        while wanted := sorted(set(missing(folder))):
            pip(folder, *wanted)
        (folder / "complete").touch()
    return folder


def run(requirement, tests):
    """Whether all tests pass, or skip with their reasons, with the package. Tests that never ran are none that pass: a file that
    is skipped as a whole because of an import, and a run in which nothing passed, fail."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(overlay(requirement)), str(ROOT / "python")])}
    faults, passed = [], 0
    for test in tests:
        command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", test]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        lines = done.stdout.splitlines()
        print(f"{requirement} {test}: {lines[-1] if lines else done.stderr[-300:]}", flush=True)
        is_skipped = done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED and " skipped" in lines[-1]  # the file as a whole
        reasons = [line for line in lines if line.startswith("SKIPPED")]
        if done.returncode and not is_skipped:
            print(done.stdout + done.stderr, flush=True)
            faults.append(f"{test} failed")
        elif is_skipped and any("could not import" in reason for reason in reasons):
            faults.append(f"{test}: expected its imports, received {reasons[0]}")
        else:
            print("".join(f"  {reason}\n" for reason in reasons), end="", flush=True)
        found = re.search(r"(\d+) passed", lines[-1] if lines else "")
        passed += int(found[1]) if found else 0
    if not passed:
        faults.append(f"{' '.join(map(str, tests))}: expected tests that pass, received none")
    for fault in faults:
        print(f"FAILED with {requirement}: {fault}", flush=True)
    return not faults


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="+", metavar="VERSION", help="of Transformers, or PACKAGE==VERSION")
    parser.add_argument("--tests", nargs="+", default=TESTS, metavar="FILE")
    arguments = parser.parse_args()
    passed = [run(each if "==" in each else f"transformers=={each}", arguments.tests) for each in arguments.versions]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
