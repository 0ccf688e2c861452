# SPDX-License-Identifier: Apache-2.0
"""An installed Espalier works from wherever its prefix lies, without the build tree."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import REPOSITORY
from small_models import MODELS

BUILD = REPOSITORY / "build/release"


def cached(name):
    """A setting of the build."""
    return re.search(rf"^{name}:\w+=(.*)$", (BUILD / "CMakeCache.txt").read_text(), re.MULTILINE)[1]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """The release build, installed and then moved elsewhere."""
    folder = tmp_path_factory.mktemp("install")
    command = ["cmake", "--install", BUILD, "--prefix", folder / "first"]
    subprocess.run(command, check=True, capture_output=True)
    (folder / "first").rename(folder / "moved")
    return folder / "moved"


def run(*command, cwd, **variables):
    """Without the variables that could lead a program to the repository."""
    leading = ("PYTHONPATH", "LD_LIBRARY_PATH", "ESPALIER_PYTHON", "ESPALIER_OPS")
    environment = {name: value for name, value in os.environ.items() if name not in leading}
    environment.update({name: str(value) for name, value in variables.items()})
    return subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)


def hiding(*folders, moved=()):
    """The start of a command line whose command sees `folders` empty, and each (from, to) of `moved` at its new place."""
    steps = [["mount", "--bind", *map(str, pair)] for pair in moved]
    steps += [["mount", "-t", "tmpfs", "none", str(folder)] for folder in [*folders, *(pair[0] for pair in moved)]]
    unshared = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*unshared, "mount -t tmpfs none /mnt"], capture_output=True).returncode != 0:
        pytest.skip("no right to mount in a private namespace")
    return [*unshared, " && ".join([*map(shlex.join, steps), 'exec "$@"']), "sh"]


def test_the_program_runs_from_elsewhere(prefix, tmp_path):
    done = run(prefix / "bin/espalier", "--version", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("espalier "), done.stderr
    (engine,) = (prefix / "share/espalier/python/espalier").glob("_engine*.so")
    libraries = run("ldd", engine, cwd=tmp_path).stdout
    assert str((prefix / "lib/libespalier_ops.so").resolve()) in libraries.replace("/share/espalier/python/espalier/../../../../", "/"), libraries
    assert "not found" not in libraries and str(REPOSITORY / "build") not in libraries


def library_path(program):
    """The folders in which a program or library looks for libraries."""
    entries = subprocess.run(["readelf", "--dynamic", program], check=True, capture_output=True, text=True).stdout
    return [folder for line in re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", entries) for folder in line.split(":")]


def test_installed_files_know_nothing_of_the_build_tree(prefix):
    def naming_the_build(folder):
        return [path for path in folder.rglob("*") if path.is_file() and str(REPOSITORY / "build").encode() in path.read_bytes()]

    assert naming_the_build(prefix) == []
    assert naming_the_build(BUILD / "src/espalier/ops")  # control: what is not installed does
    torch = cached("ESPALIER_TORCH_RPATH")
    (engine,) = (prefix / "share/espalier/python/espalier").glob("_engine*.so")
    assert library_path(engine) == ["$ORIGIN/../../../../lib", torch]
    assert library_path(prefix / "lib/libespalier_ops.so") == ["$ORIGIN", torch]


CHATS = [{"messages": [{"role": "user", "content": "two and two?"}, {"role": "assistant", "content": "four"}]}]


def test_every_command_runs_without_the_build_tree(prefix, tmp_path):
    alone = hiding(REPOSITORY / "build", REPOSITORY / "src", REPOSITORY / "python")
    assert run(*alone, REPOSITORY / "bin/espalier", "--version", cwd=tmp_path).returncode != 0  # control: it is out of sight
    (tmp_path / "config.json").write_text(json.dumps({**MODELS["llama"], "vocab_size": 300}))
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
    for line in ["init --config config.json --out model --tokenizer bytes", "synth --vocab-size 300 --trees 1 -o synth.jsonl",
                 "prepare --model model chats.jsonl -o rows.jsonl", "inspect --data rows.jsonl --html page.html",
                 "export rows.jsonl --to traces -o traces.jsonl", "import traces.jsonl -o again.jsonl",
                 "train --model model --data rows.jsonl --out run --steps 1 --no-calibration --threads 1",
                 "logprobs --model run/checkpoints/step_1 --data rows.jsonl -o logprobs.jsonl --threads 1"]:  # fmt: skip
        done = run(*alone, prefix / "bin/espalier", *line.split(), cwd=tmp_path, XDG_CACHE_HOME=tmp_path / "cache")
        assert done.returncode == 0, (line, done.stderr)
    assert len((tmp_path / "logprobs.jsonl").read_text().splitlines()) == 1


def test_libtorch_may_lie_elsewhere(prefix, tmp_path):
    packages = Path(cached("ESPALIER_TORCH_RPATH")).parents[1]
    (tmp_path / "packages").mkdir()
    moved = hiding(moved=[(packages, tmp_path / "packages")])
    done = run(*moved, prefix / "bin/espalier", "device", cwd=tmp_path)
    assert done.returncode != 0 and "libtorch_cpu.so" in done.stderr, done  # control: it is not where it was
    done = run(*moved, prefix / "bin/espalier", "device", cwd=tmp_path, LD_LIBRARY_PATH=tmp_path / "packages/torch/lib")
    assert done.returncode == 0 and done.stdout.startswith("CPU "), done


def test_prepare_finds_a_python(prefix, tmp_path):
    (tmp_path / "chats.jsonl").write_text(json.dumps(CHATS[0]) + "\n")
    prepare = [prefix / "bin/espalier", "prepare", "--model", ".", "chats.jsonl", "-o", "rows.jsonl"]
    for name in ["first", "bare", "none"]:
        (tmp_path / name).mkdir()

    def write_python(folder, *command):
        (tmp_path / folder / "python3").write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        (tmp_path / folder / "python3").chmod(0o755)

    write_python("first", "echo", "the first of PATH:")
    write_python("bare", os.path.realpath(sys.executable), "-S")  # without what is installed beside Python
    recorded = Path(cached("ESPALIER_PYTHON"))
    # The one of the build comes before PATH, and after the one that is asked for.
    done = run(*prepare, cwd=tmp_path, PATH=f"{tmp_path}/first:{os.environ['PATH']}")
    assert done.returncode == 1 and "expected a directory with a tokenizer" in done.stderr, done
    done = run(*prepare, cwd=tmp_path, ESPALIER_PYTHON=tmp_path / "first/python3")
    assert done.stdout.startswith("the first of PATH: -P -m espalier prepare --model"), done
    gone = hiding(recorded.parent)
    done = run(*gone, *prepare, cwd=tmp_path, PATH=f"{tmp_path}/first:{os.environ['PATH']}")
    assert done.stdout.startswith("the first of PATH: -P -m espalier prepare --model"), done
    done = run(*gone, "env", f"PATH={tmp_path}/none", *prepare, cwd=tmp_path)
    assert done.returncode == 1 and done.stderr == (
        "espalier: error: cannot start python3; set ESPALIER_PYTHON to a Python that has the packages of Espalier\n")
    done = run(*prepare, cwd=tmp_path, ESPALIER_PYTHON=tmp_path / "bare/python3")
    assert done.returncode == 1 and "expected a Python with the package transformers, received" in done.stderr, done
    assert "No module named 'transformers'" in done.stderr and "set ESPALIER_PYTHON to another" in done.stderr


SHELL_FILES = {"bash-completion/completions/espalier": ["completion", "bash"],
               "zsh/site-functions/_espalier": ["completion", "zsh"],
               "fish/vendor_completions.d/espalier.fish": ["completion", "fish"],
               "man/man1/espalier.1": ["man"]}  # fmt: skip


@pytest.mark.parametrize("path", SHELL_FILES)
def test_completion_and_manual_are_installed(prefix, path):
    done = run(prefix / "bin/espalier", *SHELL_FILES[path], cwd="/")
    assert done.returncode == 0 and len(done.stdout) > 1000
    assert (prefix / "share" / path).read_text() == done.stdout


def test_prepare_uses_the_installed_python_package(prefix, tmp_path):
    done = run(prefix / "bin/espalier", "prepare", "--help", cwd=tmp_path)
    assert done.returncode == 0 and "--per-turn" in done.stdout, done.stderr
    package = prefix / "share/espalier/python/espalier"
    assert (package / "commands/prepare.py").read_text() == (REPOSITORY / "python/espalier/commands/prepare.py").read_text()
    # Control: it is this copy that runs.
    shutil.move(package, tmp_path / "espalier")
    try:
        done = run(prefix / "bin/espalier", "prepare", "--help", cwd="/")
    finally:
        shutil.move(tmp_path / "espalier", package)
    assert done.returncode == 1
    assert done.stderr == f"espalier: error: expected Espalier's Python package in {prefix}/bin/../share/espalier/python, found none\n"


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
    assert done.returncode != 0 and "the component ops needs LibTorch" in " ".join(done.stderr.split()), done.stderr


@pytest.fixture(scope="module")
def programs(prefix, tmp_path_factory):
    """The folder of the programs of examples/cpp, built against the installed package."""
    folder = tmp_path_factory.mktemp("examples")
    configure = ["cmake", "-S", REPOSITORY / "examples/cpp", "-B", folder, f"-DCMAKE_PREFIX_PATH={prefix}",
                 "-DCMAKE_FIND_USE_PACKAGE_REGISTRY=OFF", f"-DESPALIER_PYTHON={sys.executable}"]  # fmt: skip
    for command in (configure, ["cmake", "--build", folder]):
        done = run(*command, cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.nightly
def test_programs_in_cpp_inspect_verify_train_and_sample(prefix, programs, tmp_path):
    for source in (REPOSITORY / "examples/cpp").glob("*.cpp"):
        assert len(source.read_text().splitlines()) <= 100, source
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen3"]))
    command = prefix / "bin/espalier"
    run(command, "init", "--config", "config.json", "--out", "model", cwd=tmp_path)
    run(command, "synth", "--out", "rows.jsonl", "--trees", 2, "--depth", 3, "--node-length", 6,
        "--vocab-size", MODELS["qwen3"]["vocab_size"], cwd=tmp_path)  # fmt: skip

    def output(name, *arguments):
        done = run(programs / name, *arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    by_command = json.loads(run(command, "inspect", "--data", "rows.jsonl", "--json", cwd=tmp_path).stdout)
    inspected = json.loads(output("inspect", "rows.jsonl"))
    assert inspected["flat_tokens"] == by_command["flat_tokens"] > inspected["tree_tokens"] == by_command["tree_tokens"]
    verified = json.loads(output("verify", "model", "rows.jsonl"))
    assert verified["passed"] and verified["grad_rel_error_max"] < 1e-12
    assert "0 of 2 steps" in output("train", "model", "rows.jsonl", "run", 2)
    assert "2 of 4 steps" in output("train", "model", "rows.jsonl", "run", 4)
    assert "0 of 4 steps" in output("train", "model", "rows.jsonl", "whole", 4)

    def weights(run):
        return (tmp_path / run / "checkpoints/step_4/model.safetensors").read_bytes()

    assert weights("run") == weights("whole") != (tmp_path / "model/model.safetensors").read_bytes()
    rows = len((tmp_path / "rows.jsonl").read_text().splitlines())
    assert output("sample", "model", "rows.jsonl", "sampled.jsonl") == f"{4 * rows} completions of {rows} prompts\n"
    assert len((tmp_path / "sampled.jsonl").read_text().splitlines()) == 4 * rows
    # Control: what is wrong is said, and nothing is written.
    (tmp_path / "large.jsonl").write_text('{"input_ids": [1, 100000, 2]}\n')
    done = run(programs / "sample", "model", "large.jsonl", "other.jsonl", cwd=tmp_path)
    assert done.returncode == 1 and "large.jsonl:1: field `input_ids`" in done.stderr and not (tmp_path / "other.jsonl").exists()
