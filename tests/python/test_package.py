# SPDX-License-Identifier: Apache-2.0
"""The Python package as a whole: what importing it loads, what it says where it is not built, examples and stubs."""

import doctest
import importlib
import io
import os
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout

import pytest

import espalier as package
from conftest import REPOSITORY

PAGE = (REPOSITORY / "docs/python.md").read_text(encoding="utf-8")


def python(code, folder, cwd):
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True)


def test_importing_the_package_loads_nothing_else(tmp_path):
    code = """
import sys
import espalier
print([name for name in ("torch", "numpy", "transformers", "espalier._core") if name in sys.modules])
espalier.build([[1, 2]])
print([name for name in ("torch", "numpy", "transformers", "espalier._core") if name in sys.modules])
print(set(espalier.__all__) <= set(dir(espalier)))
"""
    done = python(code, REPOSITORY / "python", tmp_path)
    assert done.stdout.splitlines() == ["[]", "['numpy', 'espalier._core']", "True"], done.stderr


def test_a_package_that_is_not_built_says_how_to_build_it(tmp_path):
    plain = shutil.ignore_patterns("_core*", "__pycache__")
    shutil.copytree(REPOSITORY / "python/espalier", tmp_path / "espalier", ignore=plain)
    code = """
import espalier
import espalier.prepare
print(espalier.InputError.__name__)
for name in ("build", "nothing"):
    try:
        getattr(espalier, name)
    except Exception as error:
        print(type(error).__name__, error)
"""
    done = python(code, tmp_path, tmp_path)
    lines = done.stdout.splitlines()
    assert lines[0] == "InputError", done.stderr
    assert lines[1].startswith("ImportError expected the compiled part of Espalier (espalier._core), which is not")
    assert "`pip install .`" in lines[1] and lines[2] == "AttributeError module 'espalier' has no attribute 'nothing'"


def test_every_public_name_is_there_and_documented():
    for name in package.__all__:
        assert getattr(package, name).__doc__, name
    for name in ("Forest", "Layout", "Plan", "MicroBatch", "Trajectories"):
        members = [member for member in dir(getattr(package, name)) if not member.startswith("_")]
        assert [member for member in members if not getattr(getattr(package, name), member).__doc__] == [], name


def test_type_checkers_know_the_public_names():
    stubs = (REPOSITORY / "python/espalier/__init__.pyi").read_text()
    assert re.findall(r"(\w+) as \1\b", stubs) == package.__all__


@pytest.mark.parametrize("module", ["trees", "files", "report"])
def test_examples_of_docstrings(module):
    failed, tried = doctest.testmod(importlib.import_module(f"espalier.{module}"))
    assert failed == 0 and tried > 3


def test_the_page_shows_what_its_code_prints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    names, shown = {}, 0
    for (kind, code), (next_kind, text) in zip(blocks, [*blocks[1:], ("", "")]):
        if kind == "python":
            printed = io.StringIO()
            with redirect_stdout(printed):
                exec(compile(code, "docs/python.md", "exec"), names)
            assert printed.getvalue() == (text if next_kind == "text" else "")
            shown += next_kind == "text"
    assert shown >= 5


def test_stubs_are_those_of_the_module(tmp_path):
    nanobind = pytest.importorskip("nanobind")
    requirements = (REPOSITORY / "requirements.txt").read_text()
    if f"nanobind=={nanobind.__version__} " not in requirements:
        pytest.skip(f"nanobind {nanobind.__version__} writes other stubs than the pinned one")
    command = [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "espalier._core", "-o", tmp_path / "_core.pyi"]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY / "python")})
    stubs = REPOSITORY / "python/espalier/_core.pyi"
    assert (tmp_path / "_core.pyi").read_text() == stubs.read_text(), (
        f"write them again: PYTHONPATH=python python -m nanobind.stubgen -m espalier._core -o {stubs}")  # fmt: skip
