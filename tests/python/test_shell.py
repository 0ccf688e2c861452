# SPDX-License-Identifier: Apache-2.0
"""Completion in real shells, and the manual page. Both say what --help says."""

import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest

from conftest import REPOSITORY

COMMANDS = ["prepare", "import", "inspect", "plan", "export", "train", "rerun", "launch", "serve", "logprobs", "merge", "sample", "verify", "bench", "device", "synth", "init", "completion", "man"]
SHELLS = ["bash", "zsh", "fish"]


def needs(program):
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory, espalier):
    """The completion of each shell, under the name that it has where it is installed."""
    folder = tmp_path_factory.mktemp("completion")
    for shell, name in {"bash": "espalier", "zsh": "_espalier", "fish": "espalier.fish"}.items():
        (folder / name).write_text(espalier("completion", shell).stdout)
    return folder


@pytest.fixture(scope="module")
def page(tmp_path_factory, espalier):
    """The file of the manual page."""
    path = tmp_path_factory.mktemp("man") / "espalier.1"
    path.write_text(espalier("man").stdout)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A working folder with a folder and files to complete to."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "model one").mkdir()
    for name in ["model.txt", "rows one.jsonl", "chats.jsonl"]:
        (folder / name).touch()
    return folder


# It prints what it received. What is typed does not itself contain <BEGIN>.
RECEIVER = """espalier() { printf '<%s>' BEG''IN "$@" EN''D; }"""
START = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], "source '{}/espalier'"),
    "zsh": (["zsh", "-f", "-i"], "fpath=('{}' $fpath); autoload -Uz compinit; compinit -u -D"),
}


def read_until(terminal, pattern, shell):
    text, deadline = "", time.monotonic() + 120
    while not (found := re.search(pattern, text, re.DOTALL)):
        ready, _, _ = select.select([terminal], [], [], max(0, deadline - time.monotonic()))
        assert ready, f"{shell} printed {text!r}, never {pattern}"
        text += os.read(terminal, 65536).decode(errors="replace")
    return found


def completed_at_a_terminal(shell, scripts, files, line):
    """The words that the command receives when `line`, a tab and a line end are typed."""
    command, setting = START[shell]
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(files)
        os.environ.update(TERM="dumb", INPUTRC="/dev/null", HISTFILE="", PS1="$ ", LC_ALL="C.UTF-8")
        os.execvp(command[0], command)
    try:
        for each in [setting.format(scripts), RECEIVER]:
            os.write(terminal, f"{each}; printf '<%s>' REA''DY\n".encode())
            read_until(terminal, "<READY>", shell)
        os.write(terminal, f"{line}\t\n".encode())
        return read_until(terminal, "<BEGIN>(.*)<END>", shell)[1][1:-1].split("><")
    finally:
        os.close(terminal)
        os.waitpid(process, 0)


def completed_by_fish(scripts, files, line):
    """The words of `line` with the last one completed, which has to be possible in one way."""
    command = ["fish", "--no-config", "-c", f"source '{scripts}/espalier.fish'; complete -C '{line}'"]
    done = subprocess.run(command, cwd=files, check=True, capture_output=True, text=True)
    offers = [offer.split("\t")[0].replace("\\ ", " ") for offer in done.stdout.splitlines()]
    assert not done.stderr and len(offers) <= 1, done
    words = shlex.split(line)[1:]
    return words[:-1] + (offers or words[-1:])


COMPLETIONS = {
    "veri": ["verify"],
    "train --strat": ["train", "--strategy"],
    "train --strategy part": ["train", "--strategy", "partition"],
    "train --strategy=part": ["train", "--strategy=partition"],
    "train --device cu": ["train", "--device", "cuda"],
    "train --model mod": ["train", "--model", "model one/"],
    "train --data rows": ["train", "--data", "rows one.jsonl"],
    "train --data=rows": ["train", "--data=rows one.jsonl"],
    "train --resume --dry": ["train", "--resume", "--dry-run"],
    "train --steps ro": ["train", "--steps", "ro"],  # a number: nothing to offer
    "logprobs -o ro": ["logprobs", "-o", "rows one.jsonl"],
    "prepare --per": ["prepare", "--per-turn"],
    "prepare --tool-calls temp": ["prepare", "--tool-calls", "template"],
    "import --from tra": ["import", "--from", "traces"],
    "import --from traces cha": ["import", "--from", "traces", "chats.jsonl"],
    "export --to par": ["export", "--to", "parquet"],
    "prepare --model model\\ one cha": ["prepare", "--model", "model one", "chats.jsonl"],
    "completion zs": ["completion", "zsh"],
}


@pytest.mark.parametrize("line", COMPLETIONS)
@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes(scripts, files, shell, line):
    needs(shell)
    if shell == "fish":
        received = completed_by_fish(scripts, files, f"espalier {line}")
    else:
        received = completed_at_a_terminal(shell, scripts, files, f"espalier {line}")
    # A folder may be followed by a slash, and a flag whose value follows by an equals sign.
    assert [word.rstrip("/=") for word in received] == [word.rstrip("/=") for word in COMPLETIONS[line]]


def offered_by_bash(scripts, files, *words):
    """What bash offers for the last of the words."""
    script = ('source "$0"; COMP_WORDS=(espalier "$@"); COMP_CWORD=$#; _espalier; '
              'for each in "${COMPREPLY[@]}"; do printf "%s\\n" "$each"; done')  # fmt: skip
    done = subprocess.run(["bash", "-c", script, scripts / "espalier", *words], cwd=files, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done
    return done.stdout.split("\n")[:-1]


def flags_of_help(espalier, *command):
    """The long names of the flags in a help text, where they begin a line."""
    return set(re.findall(r"^ {1,6}(?:-\w\b[^-\n]*)?(--[a-z][a-z0-9-]*)", espalier(*command, "--help").stdout, re.MULTILINE))


def flags_of_manual(page, command):
    """The names of the flags in the section of a command."""
    section = re.search(rf"^\.SS espalier {command}\n(.*?)(?=^\.SS|\Z)", page, re.MULTILINE | re.DOTALL)[1]
    heads = re.findall(r"^\.TP\n(.*)$", section, re.MULTILINE)
    return {name.replace("\\-", "-") for head in heads for name in re.findall(r"\\fB(\\-\\-.*?)\\fR", head)}


@pytest.mark.parametrize("command", COMMANDS)
def test_completion_and_manual_have_the_flags_of_help(espalier, scripts, page, files, command):
    expected = flags_of_help(espalier, command)
    assert "--help" in expected and (len(expected) > 3 or command in ("rerun", "completion", "man"))
    assert set(offered_by_bash(scripts, files, command, "--")) == expected
    zsh, fish = (scripts / "_espalier").read_text(), (scripts / "espalier.fish").read_text()
    of_zsh = re.search(rf"^    {command}\) _arguments(.*?);;$", zsh, re.MULTILINE | re.DOTALL)[1]
    assert set(re.findall(r"^ +'.*?(--[a-z0-9-]+)[=\[]", of_zsh.replace("' '", "'\n '"), re.MULTILINE)) == expected
    of_fish = re.findall(rf"-n '__espalier_command {command}'.* -l ([a-z0-9-]+)", fish)
    assert {f"--{name}" for name in of_fish} == expected
    assert flags_of_manual(page.read_text(), command) == expected


def test_completion_offers_the_commands_and_the_accepted_words(espalier, scripts, files):
    # The list of commands of help: a name, and its description two spaces or more further on.
    named = re.findall(r"^ {1,6}([a-z]+)  +\S", espalier("--help").stdout, re.MULTILINE)
    assert named == COMMANDS
    assert offered_by_bash(scripts, files, "") == [*COMMANDS, "--version", "--help"]
    refused = espalier("train", "--strategy", "nonsense", check=False).stderr
    words = offered_by_bash(scripts, files, "train", "--strategy", "")
    assert len(words) == 5 and all(word in refused for word in words), refused
    # After one value of --data another one may follow, but also a flag.
    assert offered_by_bash(scripts, files, "train", "--data", "a", "r") == ["rows one.jsonl"]
    assert offered_by_bash(scripts, files, "train", "--data", "a", "--st") == ["--steps", "--strategy"]
    assert offered_by_bash(scripts, files, "train", "--model", "a", "r") == []


@pytest.mark.parametrize("shell", SHELLS)
def test_the_scripts_have_no_syntax_errors(scripts, shell):
    needs(shell)
    script = scripts / {"bash": "espalier", "zsh": "_espalier", "fish": "espalier.fish"}[shell]
    done = subprocess.run([shell, "-n", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_only_known_shells_are_completed(espalier):
    done = espalier("completion", "csh", check=False)
    assert done.returncode == 2 and done.stdout == "" and "csh" in done.stderr and "fish" in done.stderr


@pytest.mark.parametrize("command", [["completion", "bash"], ["man"]])
def test_output_that_cannot_be_written_fails_and_a_closed_pipe_is_silent(espalier, command):
    path = str(REPOSITORY / "bin/espalier")
    with open("/dev/full", "w") as full:
        done = subprocess.run([path, *command], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and done.stderr.startswith("espalier: error: cannot write to standard output: No space left")
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([path, *command], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")
    done = espalier(*command, check=False, variables={"ESPALIER_PYTHON": "/none/python3"})
    assert (done.returncode, done.stdout) == (1, "") and done.stderr == (
        "espalier: error: cannot start /none/python3; set ESPALIER_PYTHON to a Python that has the packages of Espalier\n")


CHECKERS = {
    "groff": ["groff", "-man", "-ww", "-z", "-Tutf8"],
    "man": ["man", "--warnings", "--encoding=UTF-8", "--local-file", "--ditroff"],
    "mandoc": ["mandoc", "-T", "lint", "-W", "warning"],
}


@pytest.mark.parametrize("checker", CHECKERS)
def test_the_manual_page_is_sound(page, checker):
    needs(checker)
    done = subprocess.run([*CHECKERS[checker], page], capture_output=True, text=True,
                          env={**os.environ, "LC_ALL": "C.UTF-8"})  # fmt: skip
    # The page has no date, because it changes with every build.
    complaints = [line for line in (done.stdout if checker == "mandoc" else done.stderr).splitlines()
                  if "missing date" not in line]  # fmt: skip
    assert complaints == [] and (done.returncode == 0 or checker == "mandoc"), done


def test_the_manual_page_reads_as_help_does(espalier, page):
    needs("groff")
    done = subprocess.run(["groff", "-man", "-Tascii", "-P-cbou", page], check=True, capture_output=True, text=True)
    text = " ".join(done.stdout.split())
    version = espalier("--version").stdout.splitlines()[0]
    for sentence in ["espalier - train language models", version, "Example: espalier plan --model DIR --data rows.jsonl",
                     "espalier prepare --output ROWS [flags] FILE ...",
                     "--strategy auto|partition|tree-packing|append-only|sequence-packing", "(default: 1e-05)"]:  # fmt: skip
        assert sentence in text, sentence


def test_help_and_completion_load_nothing_that_is_compiled():
    for words in (["--help"], ["train", "--help"], ["logprobs", "--help"], ["inspect", "--help"], ["completion", "bash"]):
        command = [sys.executable, "-X", "importtime", "-m", "espalier", *words]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY / "python")})
        loaded = {line.rsplit("|")[-1].strip() for line in done.stderr.splitlines()}
        assert done.returncode == 0 and "espalier.commands.registry" in loaded  # control: names are read
        assert not loaded & {"torch", "numpy", "transformers", "espalier._core", "espalier._engine"}, (words, loaded)
