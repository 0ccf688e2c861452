# SPDX-License-Identifier: Apache-2.0
"""espalier prepare --workers: rows, errors and notes do not depend on it, and no process and no half-written file stay behind.

What may end processes, or not end at all, runs in a process of its own with a time limit.
"""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import NO_CALLS, write_model
from espalier.chats import workers

PYTHON_FOLDER = Path(__file__).resolve().parents[2] / "python"
LIMIT = 20  # seconds
BAD = b'{"messages": [{"role": "user"}]}'
DAMAGE = "received a truncated gzip file"


def chat(number, words=1):
    return {"id": f"c{number}", "messages": [
        {"role": "user", "content": f"Question {number}?"},
        {"role": "assistant", "content": "word " * words + str(number)}]}  # fmt: skip


def lines_of(records):
    return b"".join((record if isinstance(record, bytes) else json.dumps(record).encode()) + b"\n" for record in records)


def running(pids):
    """Those of the processes that have not ended."""

    def is_running(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False

    return [pid for pid in pids if is_running(pid)]


def wait_for(condition):
    end = time.monotonic() + LIMIT
    while not (value := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return value


@pytest.fixture
def python(tmp_path):
    """Runs Python code in a process of its own, which has to end; returns what it printed."""

    def run(code, *arguments):
        command = [sys.executable, "-c", code, *map(str, arguments)]
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": str(PYTHON_FOLDER)}, capture_output=True, text=True, timeout=LIMIT
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


# ---- The same with any number ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.safetensors"])
def test_rows_and_notes_do_not_depend_on_workers(prepare, tmp_path, capsys, name):
    records = [chat(number % 150, words=1 + 300 * (number % 67 == 0)) for number in range(300)]
    records[40] |= {"source": "a"}
    records[250] |= {"source": "b", "uuid": 1}
    records[199]["messages"][1]["reasoning_content"] = "T"
    outputs = []
    for count in ("1", "2", "5"):
        code, _ = prepare("native", records, "--workers", count, name=name)
        outputs.append((code, (tmp_path / name).read_bytes(), capsys.readouterr().err))
    assert outputs[0][0] == 0 and outputs == outputs[:1] * 3
    error = outputs[0][2]
    assert "ignored: source (2), uuid (1)" in error and "chats.jsonl:200" in error
    assert "150 conversations with the name of an earlier one" in error and "300 conversations, 300 trajectories" in error


def test_rows_have_the_order_of_the_file(prepare):
    _, rows = prepare("native", [chat(number) for number in range(200)], "--workers", "3")
    assert [row["trajectory_id"] for row in rows] == [f"c{number}" for number in range(200)]


def test_bad_rows_are_skipped_and_named_in_the_order_of_the_file(prepare, capsys):
    records = [BAD if number in (3, 70, 199) else chat(number) for number in range(200)]
    code, rows = prepare("native", records, "--workers", "2", "--skip-bad-rows")
    assert code == 0 and len(rows) == 197
    assert re.findall(r"chats.jsonl:(\d+): field", capsys.readouterr().err) == ["4", "71", "200"]


# Runs `prepare` several times in one process, and prints what each has printed, with its exit code at the end.
RUNS = """
import contextlib, io, json, sys
from espalier.commands.prepare import main
for line in sys.argv[1:]:
    with contextlib.redirect_stderr(io.StringIO()) as error:
        code = main(json.loads(line))
    print(json.dumps([code, error.getvalue()]))
"""


@pytest.fixture
def outcomes(python, models, tmp_path):
    """The last line, exit code and rows of `prepare` of a file with 1, 2 and 4 workers."""

    def run(data, *flags, name="chats.jsonl"):
        (tmp_path / name).write_bytes(data)
        outputs = [tmp_path / f"rows{count}.jsonl" for count in (1, 2, 4)]
        commands = [
            ["--model", str(models["native"]), str(tmp_path / name), "-o", str(output), "--workers", output.stem[4:], *flags]
            for output in outputs
        ]
        results = [json.loads(line) for line in python(RUNS, *map(json.dumps, commands))]
        assert not list(tmp_path.glob(".espalier*")), "a temporary file was left behind"
        return [
            (code, error.splitlines()[-1], output.read_bytes() if output.exists() else None)
            for (code, error), output in zip(results, outputs)
        ]

    return run


def test_the_first_bad_row_of_the_file_is_the_one_that_is_reported(outcomes):
    """The rows before it take longer than those of the chunks behind it."""
    records = [chat(number, words=4_000 if number < 60 else 1) for number in range(300)]
    for number in (61, 70, 140, 290):
        records[number] = BAD
    for code, error, rows in outcomes(lines_of(records)):
        assert (code, rows) == (1, None)
        assert "chats.jsonl:62: field `messages`: expected at least one message with role assistant" in error


def test_what_stands_before_damage_comes_first(outcomes):
    """Damage is found by the process that reads, while others still work on what it has read."""
    packed = gzip.compress(lines_of([chat(number, words=200) for number in range(400)]))
    for code, error, rows in outcomes(packed[: len(packed) // 2], name="good.gz"):
        assert (code, rows) == (1, None) and "good.gz" in error and "expected" in error
    bad = [BAD if number == 2 else chat(number, words=200) for number in range(100)]
    packed = gzip.compress(lines_of(bad) + os.urandom(500_000).hex().encode())
    for code, error, rows in outcomes(packed[:-100_000], name="bad.gz"):
        assert (code, rows) == (1, None) and "bad.gz:3: " in error


def test_what_stands_behind_the_limit_does_no_harm(outcomes):
    records = [BAD if number in (5, 80, 180) else chat(number) for number in range(200)]
    results = outcomes(lines_of(records), "--limit", "5")
    assert [(code, len(rows.splitlines())) for code, _, rows in results] == [(0, 5)] * 3
    packed = gzip.compress(lines_of([chat(number, words=200) for number in range(400)]))
    results = outcomes(packed[: len(packed) // 2], "--limit", "5", name="cut.gz")
    assert [code for code, _, _ in results] == [results[0][0]] * 3 and [rows for _, _, rows in results] == [results[0][2]] * 3


# ---- Processes that end ---------------------------------------------------------------------------------------------

ENDLESS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"
)


@pytest.fixture
def endless(tmp_path):
    """Starts `prepare` on chats that it renders for ever; returns the process and its two workers, once they work."""
    model = write_model(tmp_path / "model", "{% if messages[0]['content'] == 'loop' %}" + ENDLESS + "{% endif %}" + NO_CALLS)
    loop = {"messages": [{"role": "user", "content": "loop"}, {"role": "assistant", "content": "A"}]}
    (tmp_path / "chats.jsonl").write_bytes(lines_of([*(chat(number) for number in range(64)), *[loop] * 200]))
    processes = []

    def start():
        files = [tmp_path / "chats.jsonl", "-o", tmp_path / "rows.jsonl"]
        command = [sys.executable, "-m", "espalier", "prepare", "--model", model, *files,
                   "--template-timeout", "0", "--workers", "2"]  # fmt: skip
        process = subprocess.Popen(list(map(str, command)), env=os.environ | {"PYTHONPATH": str(PYTHON_FOLDER)},
                                   stderr=subprocess.PIPE, text=True, start_new_session=True)  # fmt: skip
        processes.append(process)

        def children():
            pids = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            return pids if len(pids) == 2 and list(tmp_path.glob(".espalier*")) else None

        pids = wait_for(children)
        processes.append(pids)
        return process, pids

    yield start
    process, pids = processes
    process.kill()
    for pid in running(pids or []):
        os.kill(int(pid), signal.SIGKILL)


@pytest.mark.parametrize("number, status, words", [
    (signal.SIGINT, 130, "espalier: error: interrupted"), (signal.SIGTERM, 143, "espalier: error: stopped by SIGTERM"),
    (signal.SIGKILL, -signal.SIGKILL, None)], ids=["Ctrl-C", "SIGTERM", "SIGKILL"])  # fmt: skip
def test_signals_leave_no_process_and_no_half_written_file(endless, tmp_path, number, status, words):
    process, pids = endless()
    assert running(pids) == pids
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does, to all of them
    else:
        process.send_signal(number)
    _, error = process.communicate(timeout=LIMIT)
    assert process.returncode == status and "Traceback" not in error
    assert wait_for(lambda: not running(pids)), "workers end when nobody waits for them"
    assert not (tmp_path / "rows.jsonl").exists()
    if words:
        assert error.splitlines()[-1] == words and not list(tmp_path.glob(".espalier*"))


def test_a_worker_that_is_killed_is_one_error(endless, tmp_path):
    process, pids = endless()
    os.kill(int(pids[1]), signal.SIGKILL)
    _, error = process.communicate(timeout=LIMIT)
    assert process.returncode == 1 and "Traceback" not in error
    assert error.splitlines()[-1] == (
        "espalier: error: a worker process ended before its work was done, perhaps for lack of memory; "
        "--workers 1 needs the least"
    )
    assert wait_for(lambda: not running(pids)) and not list(tmp_path.glob("*rows*")) and not list(tmp_path.glob(".espalier*"))


KILLED = """
import os, signal
from multiprocessing import connection
from espalier.chats.workers import in_order
from espalier.errors import InputError

def work(number):
    if number == 5:  # it dies in the middle of what it writes
        def half(self, buffer, *others):
            size = len(buffer) if len(buffer) < 1000 else len(buffer) // 2
            os.write(self.fileno(), bytes(buffer[:size]))
            if size < len(buffer):
                os.kill(os.getpid(), signal.SIGKILL)
        connection.Connection._send = half
    return "x" * 100_000

results = []
try:
    for result in in_order(work, iter(range(20)), 2):
        results.append(result)
except InputError as error:
    print(len(results), error)
"""


def test_a_worker_that_is_killed_while_it_writes_is_one_error(python):
    (line,) = python(KILLED)
    assert line.startswith("5 a worker process ended before its work was done")


STOPS = """
import sys, time
from espalier.chats.workers import in_order

for delay in (0, 0.001, 0.002, 0.005, 0.01) * 4:
    results = in_order(lambda number: "x" * 3_000_000, iter(range(30)), 2)
    try:
        for number, _ in enumerate(results):
            if number == 3:
                time.sleep(delay)
                raise KeyError
    except KeyError:
        results.close()
print("all stopped")
"""


def test_work_that_is_stopped_while_workers_write_does_not_wait_for_them(python):
    """As for a bad row, or Ctrl-C, while large results are on their way."""
    assert python(STOPS) == ["all stopped"]


ERRORS = """
from espalier.chats.workers import in_order
from espalier.errors import InputError

def work(number):
    if number == 3:
        raise InputError("three")
    return number

def chunks():
    yield from range(2)
    raise InputError("damage")

for function, numbers in ((work, lambda: iter(range(9))), (work, chunks)):
    for workers in (1, 2, 3):
        results = []
        try:
            for result in in_order(function, numbers(), workers):
                results.append(result)
        except InputError as error:
            print(results, error)
"""


def test_errors_of_workers_and_of_reading_stand_behind_what_came_before(python):
    assert python(ERRORS) == ["[0, 1, 2] three"] * 3 + ["[0, 1] damage"] * 3


def test_memory_does_not_grow_with_the_input():
    """No more chunks are read than the workers need."""
    read = []

    def chunks():
        for number in range(100):
            read.append(number)
            yield number

    for number, result in enumerate(workers.in_order(lambda number: -number, chunks(), 2)):
        assert result == -number and len(read) <= number + 5
    assert len(read) == 100


def test_control_results_in_another_order_would_be_seen(prepare, monkeypatch):
    from espalier.chats import prepare as module

    monkeypatch.setattr(module, "in_order", lambda function, chunks, count: map(function, reversed(list(chunks))))
    _, rows = prepare("native", [chat(number) for number in range(200)], "--workers", "3")
    assert [row["trajectory_id"] for row in rows] != [f"c{number}" for number in range(200)]
