# SPDX-License-Identifier: Apache-2.0
"""scripts/setup.sh in an environment that has PyTorch and nothing else, as for README's first commands. Stand-ins take the place of
PyTorch and of what pip would download; the workflows build wheels in real environments of every version."""

import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from conftest import REPOSITORY

VERSIONS = ["2.10.0", "2.11.0", "2.12.1", "2.13.0+cpu", "2.14.1", "2.15.0"]
TOOLS = {"nanobind": "nanobind", "scikit-build-core": "scikit_build_core"}


def pins():
    lines = (line.split() for line in (REPOSITORY / "requirements.txt").read_text().splitlines())
    return dict(line[0].split("==") for line in lines if line and "==" in line[0])


def write_wheel(folder, name, version):
    module = TOOLS[name]
    info = f"{module}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{module}/__init__.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A virtual environment with pip."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder


@pytest.fixture
def setup(environment, tmp_path):
    """Runs setup.sh of a clone, in the environment with a version of PyTorch, without an index."""
    (tmp_path / "clone/scripts").mkdir(parents=True)
    shutil.copy(REPOSITORY / "scripts/setup.sh", tmp_path / "clone/scripts")
    shutil.copy(REPOSITORY / "requirements.txt", tmp_path / "clone")
    (tmp_path / "wheels").mkdir()
    (packages,) = environment.glob("lib/python*/site-packages")

    def run(*arguments, torch="2.15.0"):
        for each in packages.glob("torch-*"):
            shutil.rmtree(each)
        if torch is not None:
            info = packages / f"torch-{torch}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\n")
        variables = {"VIRTUAL_ENV": str(environment), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "wheels")}
        return subprocess.run(["bash", "scripts/setup.sh", *arguments], cwd=tmp_path / "clone", capture_output=True, text=True,
                              env=os.environ | variables)  # fmt: skip

    return run


@pytest.mark.parametrize("torch", VERSIONS)
def test_what_builds_need_is_installed_beside_the_environment(setup, environment, tmp_path, torch):
    for name in TOOLS:
        write_wheel(tmp_path / "wheels", name, pins()[name])
    before = sorted(environment.rglob("*nanobind*"))
    done = setup(torch=torch)
    assert done.returncode == 0 and f"using the active environment {environment}" in done.stderr, done.stderr
    tools = tmp_path / "clone/build/python-tools"
    assert {"nanobind", "scikit_build_core"} <= {each.name for each in tools.iterdir()}
    assert sorted(environment.rglob("*nanobind*")) == before
    again = setup(torch=torch)
    assert again.returncode == 0 and "installing" not in again.stderr, again.stderr
    assert setup("--print-python", torch=torch).stdout == f"{environment}/bin/python\n"


def test_without_an_index_one_line_says_what_to_install(setup, environment):
    done = setup()
    needed = " ".join(f"{name}=={pins()[name]}" for name in TOOLS)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"setup: cannot install what the build needs; run: {environment}/bin/python -m pip install {needed}"
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) < 8, done.stderr


def test_what_tests_need_is_named_as_one_command(setup, environment):
    done = setup("--complete")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    command, _, named = line.partition("-m pip install ")
    assert command == f"setup: this takes more than the active environment has; run: {environment}/bin/python "
    assert {f"{name}=={pins()[name]}" for name in ("pytest", "transformers", "nanobind", "ruff")} <= set(named.split())
    assert "torch" not in {each.partition("==")[0] for each in named.split()}, "the PyTorch of the user stays"
    assert setup("--print-missing").stdout.split() == named.split()


@pytest.mark.parametrize("torch", [None, "2.8.0"])
def test_an_environment_without_a_pytorch_that_fits_is_not_used(setup, tmp_path, torch):
    assert setup("--print-python", torch=torch).stdout == f"{tmp_path}/clone/.venv/bin/python\n"
