# SPDX-License-Identifier: Apache-2.0
"""The commands in the documents run, and print what the documents show.

Every `sh` block of a document runs, in order, in one folder. `$M` is a small random model, and the conversations are cut
short. What follows a block as `text` is compared line by line, with numbers and names of parameters left out.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import REPOSITORY

DOCUMENTS = [path.relative_to(REPOSITORY) for path in
             [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]]  # fmt: skip
BLOCK = re.compile(r"^```(sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHORTER = {"--steps 100": "--steps 2", "step_100": "step_2"}  # a hundred steps show no more than two
SHELLS = {"zsh": ["zsh", "-f", "-c"], "fish": ["fish", "--no-config", "-c"]}


def blocks_of(text):
    """(commands, shown output) of every `sh` block."""
    found = [(match[1], match[2], match.start(), match.end()) for match in BLOCK.finditer(text)]
    for (kind, commands, _, end), following in zip(found, [*found[1:], ("", "", -1, -1)]):
        if kind == "sh":
            yield commands, following[1] if following[0] == "text" and not text[end:following[2]].strip() else ""


def commands_of(block):
    """One string for each command: lines are joined where one is continued or a quote is open."""
    command = ""
    for line in block.splitlines():
        command += line + "\n"
        if line.endswith("\\") or command.count("'") % 2:
            continue
        if command.strip():
            yield command.strip()
        command = ""
    assert not command, f"the block ends inside a command: {command}"


def skeleton(line):
    """What two runs of different models have in common in a line of output."""
    line = re.sub(r"model\.[\w.]+", "PARAMETER", line)
    return re.sub(r"\s+", " ", re.sub(r"\d[\d,.]*(e[+-]\d+)?", "#", line)).strip()


@pytest.fixture(scope="module")
def desk(tmp_path_factory, espalier):
    """A folder in which the documents' commands find what they name."""
    folder = tmp_path_factory.mktemp("desk")
    espalier("init", "--config", REPOSITORY / "examples/tiny_llama.json", "--out", folder / "model", "--tokenizer", "bytes")
    (folder / "bin").symlink_to(REPOSITORY / "bin")
    (folder / "examples").mkdir()
    with open(REPOSITORY / "examples/tau_airline_part.jsonl") as source, \
            open(folder / "examples/tau_airline_part.jsonl", "w") as target:  # fmt: skip
        for chat in map(json.loads, source):
            target.write(json.dumps({**chat, "messages": chat["messages"][:6]}) + "\n")
    (folder / "texts.jsonl").write_text('{"text": "a first text"}\n{"text": "a first word"}\n')
    return folder


def run(command, folder):
    """Output of a command that has to succeed, or None where what it needs is not on this machine."""
    program = command.split()[0]
    where, command = folder, command.replace("PREFIX", str(folder / "prefix"))
    shell = ["bash", "-euo", "pipefail", "-c"]
    if program == "docker":
        if shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True).returncode != 0:
            return None
    elif program == "make":  # every target has tests of its own; here they have to exist
        command, where = f"make --dry-run {command.split()[1]}", REPOSITORY
    elif program == "cmake":
        where = REPOSITORY
    for name, start in SHELLS.items():
        if f"# {name}," in command:
            if shutil.which(name) is None:
                return None
            shell, command = start, ("autoload -Uz compinit; compinit -u -D; " if name == "zsh" else "") + command
    path = [str(REPOSITORY / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]  # with a python3 as a user has it
    environment = {**os.environ, "M": str(folder / "model"), "PATH": ":".join(path)}
    done = subprocess.run([*shell, command], cwd=where, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_the_commands_of_a_document_run_and_print_what_it_shows(desk, document):
    ran = 0
    for block, shown in blocks_of((REPOSITORY / document).read_text()):
        for long, short in SHORTER.items():
            block = block.replace(long, short)
        outputs = [run(command, desk) for command in commands_of(block)]
        ran += sum(output is not None for output in outputs)
        printed = {skeleton(line) for output in outputs if output for line in output.splitlines()}
        missing = [line for line in shown.splitlines() if skeleton(line) not in printed]
        assert not missing, f"{document} shows what its commands do not print: {missing}\n{sorted(printed)}"
    assert ran or "```sh" not in (REPOSITORY / document).read_text()


def test_commands_and_output_are_told_apart():
    text = "```sh\na \\\n  b\nc 'd\ne'\n```\n```text\nf 1\n```\nwords\n```sh\ng\n```\nwords\n```text\nh\n```\n"
    blocks = list(blocks_of(text))
    assert [shown for _, shown in blocks] == ["f 1\n", ""]
    assert list(commands_of(blocks[0][0])) == ["a \\\n  b", "c 'd\ne'"]
    assert skeleton("  loss 1.5e-3 in  model.layers.0.w 7,000") == skeleton("loss 2 in model.norm 1")
    assert skeleton("2 rows") != skeleton("2 trees")


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_pictures_are_there(document):
    for name in re.findall(r'(?:src|srcset)="([^"]+)"', (REPOSITORY / document).read_text()):
        assert (REPOSITORY / document).parent.joinpath(name).stat().st_size > 0
