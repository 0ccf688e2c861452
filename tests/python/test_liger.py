# SPDX-License-Identifier: Apache-2.0
"""Patched models with Liger's kernels in Triton's interpreter: the checks of liger_checks.py, in a process of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from wrappers import path_with

pytestmark = pytest.mark.nightly
CHECKS = ["llama", "a_family_that_a_proof_decides_on", "trainers_of_trl"]
if os.environ.get("ESPALIER_LIGER") == "all":  # minutes more
    CHECKS += ["options", "it_is_verified", "trainers", "qwen3", "qwen2", "classes_are_replaced"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    pytest.importorskip("triton")
    pytest.importorskip("trl")
    folder = tmp_path_factory.mktemp("liger")
    environment = os.environ | {"PYTHONPATH": path_with("liger_kernel"), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder)}
    command = [sys.executable, Path(__file__).with_name("liger_checks.py"), folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (folder / "liger.json").exists(), done.stdout + done.stderr
    return json.loads((folder / "liger.json").read_text())


@pytest.mark.parametrize("name", CHECKS)
def test_in_the_interpreter(found, name):
    assert found[name] is None, found[name]


def test_the_checks_are_all(found):
    assert set(found) == set(CHECKS)
