# SPDX-License-Identifier: Apache-2.0
"""The wheel of espalier-train: it is built, needs no library that a machine may lack, and package and command run where there is
NumPy only."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from conftest import REPOSITORY

# Read here, before the tests have a cache folder of their own (conftest.own_cache), in which nothing is.
CCACHE_FOLDER = shutil.which("ccache") and subprocess.run(["ccache", "--get-config=cache_dir"], check=True, capture_output=True,
                                                          text=True).stdout.strip()  # fmt: skip

# What every Linux that NumPy runs on has.
EVERYWHERE = {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2", "libpthread.so.0"}


def run(*command, cwd, **variables):
    environment = {**os.environ, **variables}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def entries(library, kind):
    """What the dynamic section of a library names: its NEEDED libraries, or its RUNPATH."""
    return re.findall(rf"\({kind}\).*\[(.*)\]", run("readelf", "--dynamic", library, cwd="/"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    for module in ("nanobind", "scikit_build_core"):
        pytest.importorskip(module)
    folder = tmp_path_factory.mktemp("wheel")
    # By the compiler and with the flags of build/release, so that objects come from ccache. Its own folder below
    # build/ is kept, too.
    cache = (REPOSITORY / "build/release/CMakeCache.txt").read_text()
    compiler, strict = (re.search(rf"^{name}:\w+=(.*)$", cache, re.MULTILINE)[1]
                        for name in ("CMAKE_CXX_COMPILER", "ESPALIER_WERROR"))  # fmt: skip
    variables = {"CXX": compiler}
    if CCACHE_FOLDER:
        variables |= {"CMAKE_CXX_COMPILER_LAUNCHER": "ccache", "CCACHE_DIR": CCACHE_FOLDER, "CCACHE_BASEDIR": str(REPOSITORY),
                      "CCACHE_SLOPPINESS": "pch_defines,time_macros,include_file_mtime,include_file_ctime"}  # as scripts/build.sh
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-build-isolation",
        "--no-deps", "--no-index", f"--config-settings=cmake.define.ESPALIER_WERROR={strict}", "--wheel-dir", folder,
        REPOSITORY, cwd=folder, **variables)  # fmt: skip
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A virtual environment with the wheel and NumPy, and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    run(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index",
        "--target", packages, wheel, cwd=folder)  # fmt: skip
    for name in ("numpy", "numpy.libs"):
        (packages / name).symlink_to(Path(sysconfig.get_path("platlib")) / name)
    return folder / "venv/bin/python", packages / "espalier"


def test_the_wheel_has_the_package_and_little_else(wheel):
    version = re.search(r"project\(espalier VERSION ([0-9.]+)", (REPOSITORY / "CMakeLists.txt").read_text())[1]
    assert wheel.name.startswith(f"espalier_train-{version}-cp3") and wheel.stat().st_size < 5_000_000
    names = set(zipfile.ZipFile(wheel).namelist())
    package = REPOSITORY / "python"
    python = {str(path.relative_to(package)) for ending in ("py", "pyi", "html", "css", "js") for path in package.rglob(f"*.{ending}")}
    assert python <= names and "espalier/py.typed" in names and "espalier/_core.pyi" in names
    rest = {name for name in names - python if not name.endswith((".py", ".pyi")) and ".dist-info/" not in name}
    assert {re.sub(r"\.(cpython|abi3|so)\b.*", "", name) for name in rest} <= {
        "espalier/_core", "espalier/commands/flags.json", "espalier/libfmt", "espalier/libsimdjson", "espalier/py.typed"}, rest  # fmt: skip
    linked = {"fmt", "nanobind", "nlohmann-json", "robin-map", "simdjson", "xxhash", "zlib", "zstd"}
    assert {Path(name).stem for name in names if "/licenses/packaging/" in name} == linked


def test_it_needs_no_library_that_a_machine_may_lack(installed):
    _, package = installed
    own = {path.name for path in package.glob("*.so*")}
    libraries = sorted(package.glob("*.so*"))
    needed = {name for library in libraries for name in entries(library, "NEEDED")}
    assert needed - own <= EVERYWHERE, needed
    core = next(path for path in libraries if path.name.startswith("_core"))
    assert entries(core, "RUNPATH") == ["$ORIGIN"] and entries(core, "RPATH") == []
    assert str(REPOSITORY / "build").encode() not in core.read_bytes()
    # Control: the module of a build for this machine takes the system's.
    (here,) = (REPOSITORY / "python/espalier").glob("_core*.so")
    assert set(entries(here, "NEEDED")) - EVERYWHERE != set()


# What the package does with NumPy alone.
USE = """
import sys
import espalier
rows = [{"input_ids": [1, 2, 3], "group_id": "a"}, {"input_ids": [1, 2, 4], "group_id": "a"}]
for name in ("rows.jsonl", "rows.jsonl.gz", "rows.jsonl.zst", "rows.safetensors"):
    espalier.write(name, rows)
    forest = espalier.build(espalier.read(name))
    assert forest.tokens.tolist() == [1, 2, 3, 4]
assert len(espalier.plan(forest, token_budget=3)) == 2
assert espalier.inspect("rows.jsonl").data["tree_tokens"] == 4
try:
    espalier.read("none.jsonl")
except espalier.InputError as error:
    print(espalier.__version__, error)
print(sorted({"torch", "transformers", "safetensors"} & set(sys.modules)))
print(espalier.__file__)
"""


def test_it_runs_where_there_is_numpy_only(installed, tmp_path):
    python, package = installed
    said = run(python, "-I", "-c", USE, cwd=tmp_path).splitlines()
    assert "none.jsonl" in said[0] and said[1] == "[]" and said[2].startswith(str(package))


def espalier(installed, *arguments, cwd, **variables):
    return run(installed[0], "-I", "-m", "espalier", *arguments, cwd=cwd, **variables)


def test_the_command_runs_where_there_is_numpy_only(installed, tmp_path):
    for line in ("synth --trees 2 -o rows.jsonl", "inspect --data rows.jsonl --html page.html", "plan --data rows.jsonl --ranks 2",
                 "export rows.jsonl --to traces -o traces.jsonl", "import traces.jsonl -o again.jsonl"):  # fmt: skip
        espalier(installed, *line.split(), cwd=tmp_path)
    version = re.search(r"project\(espalier VERSION ([0-9.]+)", (REPOSITORY / "CMakeLists.txt").read_text())[1]
    assert espalier(installed, "--version", cwd=tmp_path).startswith(f"espalier {version}\n")
    # It explains every command in the same words as with LibTorch.
    for words in ([], ["inspect"], ["plan"], ["synth"], ["prepare"], ["completion"], ["train"], ["verify"], ["sample"]):
        full = run(REPOSITORY / "bin/espalier", *words, "--help", cwd=tmp_path)
        assert espalier(installed, *words, "--help", cwd=tmp_path) == full and len(full) > 300, words


def test_commands_that_need_libtorch_say_what_to_install(installed, tmp_path):
    for words in (["train", "--steps", "1"], ["verify"], ["plan", "--data", "rows.jsonl", "--model", "model"]):
        command = [installed[0], "-I", "-m", "espalier", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        needs = words[0] + (" --model" if "--model" in words else "")
        assert (done.returncode, done.stderr) == (1, f"espalier: error: {needs} needs LibTorch: run pip install 'espalier-train[torch]', or `make build` in a clone\n")


def has_numpy(python):
    return subprocess.run([python, "-I", "-c", "import numpy"], capture_output=True).returncode == 0


def test_a_wheel_for_the_stable_abi_runs_under_later_pythons(wheel, tmp_path):
    """Of Python 3.12 or later, under those on PATH that have NumPy."""
    if "-abi3-" not in wheel.name:
        pytest.skip(f"{wheel.name} serves this Python alone")
    names = [f"python3.{minor}" for minor in range(sys.version_info.minor + 1, 20)]
    later = [path for path in map(shutil.which, names) if path and has_numpy(path)]
    if not later:
        pytest.skip(f"none of {names[0]} to {names[-1]} is on PATH with NumPy")
    zipfile.ZipFile(wheel).extractall(tmp_path / "package")
    for python in later:
        said = run(python, "-c", USE, cwd=tmp_path, PYTHONPATH=str(tmp_path / "package")).splitlines()
        assert "none.jsonl" in said[0] and said[2].startswith(str(tmp_path / "package")), python


def test_auditwheel_finds_nothing_from_outside(wheel):
    pytest.importorskip("auditwheel")
    said = " ".join(run(sys.executable, "-m", "auditwheel", "show", wheel, cwd="/").split())
    assert "is consistent with the following platform tag: \"manylinux_" in said, said
    assert not re.search(r"libzstd|libxxhash|libz\.so", said), said
