# SPDX-License-Identifier: Apache-2.0
"""The Python package as a whole: what importing it loads, what it says where it is not built, examples and stubs."""

import ast
import graphlib
import inspect
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

import espalier as package
from conftest import REPOSITORY

PAGES = "".join(path.read_text(encoding="utf-8") for path in sorted((REPOSITORY / "docs").glob("*.md")))


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
import espalier.commands.prepare
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


def mixed_environment(folder, init):
    """A folder into which both distributions were installed; the text of __init__.py, None for ours."""
    (folder / "espalier").mkdir(parents=True)
    for path in (REPOSITORY / "python/espalier").iterdir():
        (folder / "espalier" / path.name).symlink_to(path)
    if init is not None:
        (folder / "espalier/__init__.py").unlink()
        (folder / "espalier/__init__.py").write_text(init)
    (folder / "espalier-0.1.3.dist-info").mkdir()
    (folder / "espalier-0.1.3.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: espalier\nVersion: 0.1.3\n")
    (folder / "espalier_train-0.2.0.dist-info").mkdir()


def test_another_distribution_of_the_same_name(tmp_path):
    """Ours was installed last: one warning. Theirs was: an error where a module of ours is asked for."""
    mixed_environment(tmp_path / "ours", None)
    done = python("import espalier; print(espalier.build([[1, 2], [1, 3]]).tree_tokens)", tmp_path / "ours", tmp_path)
    assert done.stdout == "3\n" and done.stderr.count("Warning") == 1
    assert "<string>:1: UserWarning: import espalier: expected the files of the distribution espalier-train alone" in done.stderr
    assert "found those of another one, espalier-0.1.3.dist-info" in done.stderr and "pip uninstall espalier" in done.stderr
    mixed_environment(tmp_path / "theirs", "VALUE = 1\n")
    done = python("import espalier; print(espalier.VALUE); import espalier.trees", tmp_path / "theirs", tmp_path)
    assert done.stdout == "1\n" and done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: import espalier: expected the package of espalier-train, received that of another")
    shutil.rmtree(tmp_path / "ours/espalier-0.1.3.dist-info")  # control
    done = python("import espalier; espalier.build([[1, 2]])", tmp_path / "ours", tmp_path)
    assert done.returncode == 0 and done.stderr == ""


def imports_of(sources):
    """Name of a module -> names of the modules in `sources` (name -> text) that it imports, inside of functions too. What
    is imported for type checkers alone is never run."""
    found = {}
    for name, text in sources.items():
        home = name.removesuffix(".__init__")
        folder = name.rpartition(".")[0].split(".")
        found[home] = set()
        tree = ast.parse(text)
        unused = {id(node) for part in tree.body if isinstance(part, ast.If) and ast.unparse(part.test) == "TYPE_CHECKING"
                  for node in ast.walk(part)}  # fmt: skip
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level and id(node) not in unused:
                package = ".".join([*folder[:len(folder) + 1 - node.level], *([node.module] if node.module else [])])
                found[home] |= {f"{package}.{part.name}" if {f"{package}.{part.name}", f"{package}.{part.name}.__init__"}
                                & set(sources) else package for part in node.names}  # fmt: skip
    return found


def test_no_two_modules_import_each_other():
    """In whatever order modules are loaded, each finds what it imports."""
    folder = REPOSITORY / "python"
    sources = {".".join(path.relative_to(folder).with_suffix("").parts): path.read_text()
               for path in folder.rglob("espalier/**/*.py")}  # fmt: skip
    found = imports_of(sources)
    assert "espalier.hf.patching" in found["espalier.hf.verification"] and len(found) > 70
    graphlib.TopologicalSorter(found).prepare()
    # Control: a circle through a function.
    circle = {"a.b": "from . import c", "a.c": "def f():\n    from .b import x"}
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(imports_of(circle)).prepare()


def public_names(module):
    """(name, object) of what a module and the modules in it make public."""
    for name in module.__all__:
        value = getattr(module, name)
        yield f"{module.__name__}.{name}", value
        if inspect.ismodule(value):
            yield from public_names(value)


def members_of(kind):
    """Methods and properties of a class that are its own, or of a class of ours."""
    ours = [base for base in kind.__mro__ if base.__module__.startswith("espalier")]
    return {name: value for base in ours for name, value in vars(base).items()
            if not name.startswith("_") and (callable(value) or hasattr(value, "__get__"))}  # fmt: skip


def undocumented(module, pages):
    """Public names without a docstring, or that no page has; and members of public classes without one."""
    for name, value in public_names(module):
        if not value.__doc__ or not re.search(rf"\b{name.rpartition('.')[2]}\b", pages):
            yield name
        if inspect.isclass(value):
            yield from (f"{name}.{member}" for member, of in members_of(value).items() if not of.__doc__)


def test_every_public_name_is_there_and_documented():
    names = dict(public_names(package))
    assert {"espalier.build", "espalier.hf.patch", "espalier.distributed.Ranks", "espalier.io.from_trl", "espalier.trl.patch",
            "espalier.ops.moe"} <= set(names)  # fmt: skip
    assert list(undocumented(package, PAGES)) == []
    # Controls: a page without names, and members without docstrings.
    assert set(undocumented(package, "")) == set(names)
    bare = type("Bare", (), {"__doc__": "A class.", "__module__": "espalier.bare", "member": lambda self: None})
    assert list(undocumented(SimpleNamespace(__name__="bare", __all__=["Bare"], Bare=bare), "Bare")) == ["bare.Bare.member"]


def test_type_checkers_know_the_public_names():
    """Of the package by its stubs; its packages are Python, and say in __all__ what they export."""
    stubs = (REPOSITORY / "python/espalier/__init__.pyi").read_text()
    assert re.findall(r"(\w+) as \1\b", stubs) == package.__all__
    for name, value in public_names(package):
        if inspect.ismodule(value):
            assert sorted(value.__all__) == value.__all__, name


# What a user may write, with the type that a checker finds for each value.
TYPED = """
import espalier
import torch

forest = espalier.build([[1, 2, 3], [1, 2, 4]], tree_keys=["a", "a"])
plan = espalier.plan(forest, token_budget=8)
rows = espalier.read("rows.jsonl")
step = espalier.Step(torch.nn.Linear(2, 2), plan, recompute=True)
config = espalier.EngineConfig(learning_rate=1e-5, dtype="float64")
engine = espalier.Engine("MODEL", config=config, lora=espalier.LoraConfig(lora_rank=8, lora_targets=["q_proj"]), threads=2)
found = [
    forest, plan, rows,
    espalier.inspect(rows).data,
    espalier.hf.patch(step).num_terms,
    espalier.hf.verify(step, {}).passed,
    [step.logprobs(batch) for batch in step],
    [step.logprobs(batch, entropy=True) for batch in step],
    espalier.ops.moe_route(torch.zeros(2, 3), 2),
    engine.forward_backward(rows, "grpo", clip_high=0.28),
    engine.forward_backward([[1, 2]], lambda logprobs, positions: -torch.cat(logprobs).mean()),
    espalier.distributed.Ranks(torch.nn.Linear(2, 2)).share([[1, 2]]),
    espalier.io.from_trl({}),
    config.replace(device="cuda:1").dtype,
    engine.sample([[1, 2]], espalier.SamplingParams(samples=4, stop_ids=[])),
    rows.group_id,
    list(plan),
]
"""
TYPES = ["Forest", "Plan", "Trajectories", "dict[str, Any]", "int", "bool", "list[Tensor]", "list[tuple[Tensor, Tensor]]",
         "tuple[Tensor, Tensor]", "dict[str, float]", "dict[str, float]", "Share", "list[dict[str, Any]]",
         "Literal['float64'] | Literal['float32'] | Literal['bfloat16']", "list[dict[str, Any]]", "list[str] | None",
         "list[MicroBatch]"]  # fmt: skip
WRONG = ["espalier.plan(forest, token_budget='8')", "espalier.Step(1, 2)", "espalier.distribute(forest)",
         "espalier.hf.patch(step, check='yes')", "espalier.build([1, 2])", "engine.logprobs(3)", "step.backward(1)",
         "espalier.ops.causal_conv1d(1, 2, 3, 4)", "espalier.Engine(1)", "espalier.EngineConfig(dtype='half')",
         "espalier.SamplingParams(sample=2)", "espalier.ObjectiveConfig('grpo')", "espalier.Engine('M', config=espalier.LoraConfig())"]  # fmt: skip


def test_programs_of_users_have_types(tmp_path):
    pytest.importorskip("mypy")
    values = re.findall(r"^    (.*),$", TYPED, re.MULTILINE)
    values = [*values[0].split(", "), *values[1:]]
    (tmp_path / "program.py").write_text(TYPED + "".join(f"reveal_type({value})\n" for value in values))
    (tmp_path / "wrong.py").write_text("import espalier\nfrom program import *\n" + "".join(f"{line}\n" for line in WRONG))
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = True\ncache_dir = cache\n"
                                       "[mypy-transformers.*]\nfollow_imports = skip\n")  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "mypy", "program.py", "wrong.py"], cwd=tmp_path, capture_output=True,
                          text=True, env={**os.environ, "MYPYPATH": str(REPOSITORY / "python")})  # fmt: skip
    found = [re.sub(r"\b[a-z_]\w*\.(?=[A-Za-z_])", "", each) for each in re.findall(r'Revealed type is "(.*)"', done.stdout)]
    assert found == TYPES, done.stdout + done.stderr
    faults = re.findall(r"^(\w+)\.py:(\d+): error: .*  \[([\w-]+)\]$", done.stdout, re.MULTILINE)
    assert sorted({(file, int(line)) for file, line, _ in faults}) == [("wrong", 3 + line) for line in range(len(WRONG))]
    assert {kind for *_, kind in faults} == {"arg-type", "call-arg", "list-item"}


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
