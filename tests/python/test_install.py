# SPDX-License-Identifier: Apache-2.0
"""An installed Espalier works from wherever its prefix lies, without the build tree."""

import os
import shutil
import subprocess
import sys

import pytest

from conftest import REPOSITORY


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """The release build, installed and then moved elsewhere."""
    folder = tmp_path_factory.mktemp("install")
    command = ["cmake", "--install", REPOSITORY / "build/release", "--prefix", folder / "first"]
    subprocess.run(command, check=True, capture_output=True)
    (folder / "first").rename(folder / "moved")
    return folder / "moved"


def run(*command, cwd):
    """Without the variables that could lead a program to the repository."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LD_LIBRARY_PATH")}
    return subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)


def test_the_program_runs_from_elsewhere(prefix, tmp_path):
    done = run(prefix / "bin/espalier", "--version", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("espalier "), done.stderr
    libraries = run("ldd", prefix / "bin/espalier", cwd=tmp_path).stdout
    assert str((prefix / "lib/libespalier_ops.so").resolve()) in libraries.replace("/bin/../", "/"), libraries
    assert "not found" not in libraries and str(REPOSITORY / "build") not in libraries


def test_prepare_uses_the_installed_python_package(prefix, tmp_path):
    done = run(prefix / "bin/espalier", "prepare", "--help", cwd=tmp_path)
    assert done.returncode == 0 and "--per-turn" in done.stdout, done.stderr
    package = prefix / "share/espalier/python/espalier"
    assert (package / "prepare.py").read_text() == (REPOSITORY / "python/espalier/prepare.py").read_text()
    # Control: it is this copy that runs.
    shutil.move(package, tmp_path / "espalier")
    try:
        done = run(prefix / "bin/espalier", "prepare", "--help", cwd="/")
    finally:
        shutil.move(tmp_path / "espalier", package)
    assert done.returncode == 1
    assert done.stderr == f"espalier: error: prepare: expected Espalier's Python package in {package.parent}, found none\n"


def test_python_loads_the_installed_ops(prefix, tmp_path):
    script = """
import sys
import torch
torch.ops.load_library(sys.argv[1])
q, k, v = (torch.ones(3, 1, 8) for _ in range(3))
v[1] = 5
ends = torch.tensor([3, 2, 3], dtype=torch.int32)  # a root and two leaves
out, _ = torch.ops.espalier.tree_attention(q, k, v, ends, 1.0, [], [], torch.empty(0, 5, dtype=torch.int64))
assert torch.allclose(out[:, 0, 0], torch.tensor([1.0, 3.0, 1.0])), out
"""
    done = run(sys.executable, "-c", script, prefix / "lib/libespalier_ops.so", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_project_links_the_installed_ops(prefix, tmp_path):
    source = REPOSITORY / "tests/consumer/ops"
    configure = ["cmake", "-S", source, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={prefix}",
                 "-DCMAKE_FIND_USE_PACKAGE_REGISTRY=OFF"]  # fmt: skip
    done = run(*configure, f"-DESPALIER_PYTHON={sys.executable}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = run("cmake", "--build", tmp_path / "build", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    # Each leaf reads the root and itself: the root's value counts 1 + 1/2 + 1/2 times.
    done = run(tmp_path / "build/consumer", cwd=tmp_path)
    assert done.stdout == "2 0.5 0.5 \n", done.stderr
    # Control: without its LibTorch the package says what it needs.
    done = run("cmake", "-S", source, "-B", tmp_path / "none", f"-DCMAKE_PREFIX_PATH={prefix}",
               "-DCMAKE_FIND_USE_PACKAGE_REGISTRY=OFF", "-DESPALIER_PYTHON=/bin/false", cwd=tmp_path)  # fmt: skip
    assert done.returncode != 0 and "Espalier::ops needs LibTorch" in " ".join(done.stderr.split()), done.stderr
