#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the code of documents and compares what it prints with what they show.

    tests/documents.py docs/quickstarts/*.md     with the `espalier` of PATH and the package of this Python

Blocks of a page run in order, in one folder. `sh`: each command by itself; `$M` is a small random model, and the conversations
in examples/ are cut short. `python`: in one namespace for the whole page; with `title="NAME"` the block is written to that file
instead. A `text` block shows what the block before it printed. For `sh` each of its lines has to be there, with numbers and names
of parameters left out; for `python` it is all that was printed, to the letter, or with `title="similar"` compared as for `sh`.
"""

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
FENCE = re.compile(r'^```(sh|python|text)(?: title="([^"\n]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
SHORTER = {"--steps 100": "--steps 2", "step_100": "step_2"}  # a hundred steps show no more than two
SHELLS = {"zsh": ["zsh", "-f", "-c"], "fish": ["fish", "--no-config", "-c"]}


class Block(NamedTuple):
    kind: str  # "sh" or "python"
    title: str  # of a file that is written, or ""
    code: str
    shown: str | None  # the output that the page shows
    exactly: bool  # whether the output is that to the letter


def blocks_of(text):
    """The blocks of a page that run."""
    found = list(FENCE.finditer(text))
    for block, after in zip(found, [*found[1:], None]):
        if block[1] == "text":
            continue
        shows = after is not None and after[1] == "text" and not text[block.end() : after.start()].strip()
        yield Block(block[1], block[2] or "", block[3], after[3] if shows else None, shows and after[2] != "similar")


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


def make_desk(folder):
    """Puts into `folder` what the commands and programs of the documents name."""
    examples = REPOSITORY / "examples"
    subprocess.run(["espalier", "init", "--config", examples / "tiny_llama.json", "--out", folder / "model", "--tokenizer", "bytes"],
                   check=True, capture_output=True)  # fmt: skip
    (folder / "bin").symlink_to(REPOSITORY / "bin")
    (folder / "examples").mkdir()
    for path in examples.iterdir():
        if path.name != "tau_airline_part.jsonl":
            (folder / "examples" / path.name).symlink_to(path)
    with open(examples / "tau_airline_part.jsonl") as source, open(folder / "examples/tau_airline_part.jsonl", "w") as target:
        for chat in map(json.loads, source):
            messages = [{**each, "content": each["content"] and each["content"][:2500 if each["role"] == "system" else 120]} for each in chat["messages"][:6]]
            target.write(json.dumps({**chat, "messages": messages}) + "\n")
    (folder / "texts.jsonl").write_text('{"text": "a first text"}\n{"text": "a first word"}\n')
    os.environ["M"] = str(folder / "model")


def run_command(command, folder):
    """Output of a command that has to succeed, or None where what it needs is not on this machine."""
    words = command.split()
    where, command = folder, command.replace("PREFIX", str(folder / "prefix"))
    shell = ["bash", "-euo", "pipefail", "-c"]
    if words[0] == "pip" or words[:2] == ["make", "wheels"]:  # tests/python/test_wheel.py installs
        return None
    if words[0] == "docker":
        if shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True).returncode != 0:
            return None
    elif words[0] == "make":  # every target has its own tests; here they have to exist
        command, where = f"make --dry-run {words[1]}", REPOSITORY
    elif words[0] == "cmake":
        where = REPOSITORY
    for name, start in SHELLS.items():
        if f"# {name}," in command:
            if shutil.which(name) is None:
                return None
            shell, command = start, ("autoload -Uz compinit; compinit -u -D; " if name == "zsh" else "") + command
    done = subprocess.run([*shell, command], cwd=where, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def check_lines(shown, printed):
    """Each line that is shown was printed, but for numbers and names of parameters."""
    skeletons = {skeleton(line) for line in printed.splitlines()}
    missing = [line for line in shown.splitlines() if skeleton(line) not in skeletons]
    assert not missing, f"the page shows what its code does not print: {missing}\n{printed}"


def run_page(path, folder):
    """Runs the blocks of a page in `folder`, which is that of `make_desk`. Returns how many commands and programs ran."""
    names, ran = {"__name__": "__main__"}, 0
    for block in blocks_of(path.read_text(encoding="utf-8")):
        if block.title:
            (folder / block.title).write_text(block.code)
            continue
        code = block.code
        for long, short in SHORTER.items():
            code = code.replace(long, short)
        if block.kind == "sh":
            outputs = [run_command(command, folder) for command in commands_of(code)]
            ran += sum(output is not None for output in outputs)
            if block.shown and None not in outputs:
                check_lines(block.shown, "".join(outputs))
            continue
        with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as stdout:
            exec(compile(code, str(path), "exec"), names)
        ran += 1
        if block.exactly:
            assert stdout.getvalue() == block.shown, f"the page shows\n{block.shown}\nits code prints\n{stdout.getvalue()}"
        elif block.shown:
            check_lines(block.shown, stdout.getvalue())
    return ran


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path)
    pages = [page.resolve() for page in parser.parse_args().pages]
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for page in pages:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            make_desk(Path(folder))
            ran = run_page(page, Path(folder))
        print(f"{page.relative_to(REPOSITORY)}: {ran} commands and programs, {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
