# SPDX-License-Identifier: Apache-2.0
"""espalier-ops, the operators as a source distribution: it holds all that its build names, and depends on the PyTorch
that it is built against. The build itself takes long and is not a test."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from email import message_from_string
from pathlib import PurePosixPath

import pytest

from conftest import REPOSITORY

FOLDER = REPOSITORY / "packaging/ops"
OURS = re.compile(r'^#include "(espalier/[^"@]+)"', re.MULTILINE)
SOURCES = re.compile(r"[\w./]+\.(?:cpp|cu)\b")


def by_backend(call, folder):
    """What a function of the backend leaves in `folder`."""
    code = f"from scikit_build_core.build import *; print({call})"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], cwd=FOLDER, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Text by path of the files of the source distribution."""
    pytest.importorskip("scikit_build_core")
    archive = by_backend("build_sdist(__import__('sys').argv[1])", tmp_path_factory.mktemp("sdist"))
    with tarfile.open(archive) as tar:
        members = tar.getmembers()
        assert all(member.isfile() for member in members), "links would point outside"
        read = lambda member: tar.extractfile(member).read().decode()
        return {str(PurePosixPath(*PurePosixPath(member.name).parts[1:])): read(member) for member in members}


def missing_of(files):
    """What CMake or the sources name and `files` do not have."""
    missing = set()
    for name in ("src/espalier/ops", "src/espalier/ops/kernels/cpu", "src/espalier/ops/kernels/cuda"):
        text = re.sub(r"#.*", "", files[f"{name}/CMakeLists.txt"])
        found = SOURCES.findall(text)
        assert len(found) > 5
        if loops := re.search(r"set\(loops ([^)]+)\)", text):  # which sources that CMake writes include
            missing |= {f"{name}/{each}_loops.h" for each in loops[1].split()} - files.keys()
        missing |= {f"{name}/{source}" for source in found} - files.keys()
    for name in re.findall(r"^include\((\w+)\)|^find_package\((\w+)", files["CMakeLists.txt"], re.MULTILINE):
        missing |= {f"cmake/{name[0]}.cmake" if name[0] else f"cmake/Find{name[1]}.cmake"} - files.keys()
    for name, text in files.items():
        if name.startswith("src/espalier/ops/"):
            missing |= {f"src/{path}" for path in OURS.findall(text)} - files.keys()
    return missing


def test_the_source_distribution_has_all_that_its_build_names(files):
    assert not missing_of(files)
    assert "EspalierCuda" in files["CMakeLists.txt"] and "Apache License" in files["LICENSE"]
    gone = {"src/espalier/ops/paths.cpp", "src/espalier/base/csr.h", "cmake/EspalierCuda.cmake",
            "src/espalier/ops/kernels/cpu/head/logit_math_loops.h",
            "src/espalier/ops/kernels/cuda/attention/tensor_map.cu"}  # fmt: skip
    assert missing_of({name: text for name, text in files.items() if name not in gone}) == gone  # negative control


def test_nothing_but_headers_of_base_is_needed(files):
    """No source of base is compiled, with the libraries of the system that it would need."""
    headers = {name for name in files if name.startswith("src/espalier/base/") and name.endswith(".h")}
    included = {f"src/{path}" for name, text in files.items() if name.startswith("src/espalier/ops/")
                for path in OURS.findall(text) if path.startswith("espalier/base/")}  # fmt: skip
    known = set()
    while included - known:
        known |= included
        included = {f"src/{path}" for name in known for path in OURS.findall(files[name])}
    assert known <= headers
    outside = {path for name in known for path in re.findall(r"^#include <(\w+/.*)>", files[name], re.MULTILINE)}
    assert all(path.startswith("fmt/") for path in outside), outside


def test_metadata(files, tmp_path):
    torch = pytest.importorskip("torch")
    version = re.search(r"project\(espalier VERSION ([0-9.]+)", (REPOSITORY / "CMakeLists.txt").read_text())[1]
    source = message_from_string(files["PKG-INFO"])
    assert (source["Name"], source["Version"]) == ("espalier-ops", version)
    assert source.get_all("Requires-Dist") == ["torch>=2.9"] and source.get_all("Dynamic") == ["Requires-Dist"]
    folder = by_backend("prepare_metadata_for_build_wheel(__import__('sys').argv[1])", tmp_path)
    wheel = message_from_string((folder / "METADATA").read_text())
    major, minor = torch.__version__.split(".")[:2]
    assert wheel.get_all("Requires-Dist") == [f"torch=={major}.{minor}.*"] and wheel["Version"] == version


def test_without_pytorch_the_build_says_what_helps(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    done = subprocess.run(["cmake", "-S", FOLDER, "-B", tmp_path / "build", f"-DPython_EXECUTABLE={python}"],
                          capture_output=True, text=True)  # fmt: skip
    said = " ".join(done.stderr.split())
    assert done.returncode != 0 and f"expected PyTorch in {python}, against which it is built, found none" in said
    assert "--no-build-isolation" in said


def test_the_package_finds_the_library_of_the_distribution(tmp_path):
    library = REPOSITORY / "build/release/src/espalier/ops/libespalier_ops.so"
    shutil.copytree(REPOSITORY / "python/espalier", tmp_path / "espalier", ignore=shutil.ignore_patterns("*.so", "hf"))
    shutil.copytree(FOLDER / "espalier_ops", tmp_path / "espalier_ops", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {name: value for name, value in os.environ.items() if name != "ESPALIER_OPS"}
    code = f"""
import os
try:
    from espalier import ops
except ImportError as error:
    assert "install espalier-ops" in str(error), error
else:
    raise AssertionError("found without the file")
os.symlink({str(library)!r}, "espalier_ops/libespalier_ops.so")
from espalier import ops
import espalier_ops
assert ops._library() == espalier_ops.library()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True,
                          env=environment | {"PYTHONPATH": str(tmp_path)})  # fmt: skip
    assert done.returncode == 0, done.stderr
