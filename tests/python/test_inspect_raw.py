# SPDX-License-Identifier: Apache-2.0
"""`espalier inspect` of files that are no rows: the report of the rows that `prepare` writes, and nothing is left of them."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from conftest import PROGRAM, REPOSITORY, seed_of, write_model
from espalier.commands import prepare

CHATS = [{"id": f"c{n}", "messages": [
    {"role": "system", "content": "You are a clerk."}, {"role": "user", "content": "Where is my parcel?"},
    {"role": "assistant", "content": f"In town {n}."}, {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "Bye."}]} for n in range(3)]  # fmt: skip
PAIRS = [{"prompt": "Name a prime.", "chosen": "Seven is one.", "rejected": "Eight is one."},
         {"prompt": "Name a colour.", "chosen": "Green.", "rejected": "Seven."}]  # fmt: skip
SHAREGPT = [{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": f"Hello {n}"}]} for n in range(2)]
VERL = [{"prompts": [0, 5, 6], "responses": [7 + n, 0], "attention_mask": [0, 1, 1, 1, 0], "input_ids": [0, 5, 6, 7 + n, 0],
         "uid": "q"} for n in range(2)]  # fmt: skip
SKYRL = [{"prompt_token_ids": [5, 6], "response_ids": [7, 8 + n], "loss_masks": [1, 1], "rewards": 0.5} for n in range(2)]
TRL = [{"prompt_ids": [5, 6], "chosen_ids": [7, 8], "rejected_ids": [7, 9]}]
AREAL = [{"input_ids": [[5, 6, 7], [5, 6, 0]], "attention_mask": [[1, 1, 1], [1, 1, 0]], "loss_mask": [[0, 0, 1], [0, 1, 0]],
          "versions": [[0, 0, 1], [0, 1, 0]]}]  # fmt: skip
STEP = {"source": "agent", "message": "b"}
ATIF = {"schema_version": "ATIF-v1.7", "session_id": "s", "agent": {"name": "x", "version": "1"}, "steps": [
    {"source": "user", "message": "a"}, {**STEP, "metrics": {"prompt_token_ids": [5], "completion_token_ids": [6]}},
    {**STEP, "metrics": {"prompt_token_ids": [5, 6, 7], "completion_token_ids": [8]}}]}  # fmt: skip
TEXT_ATIF = {**ATIF, "steps": [{"source": "user", "message": "a"}, STEP, {"source": "user", "message": "c"}, STEP]}
ROWS = [{"input_ids": [5, 6, 7 + n], "loss_mask": [0, 1, 1], "group_id": "g"} for n in range(2)]


def trace(answer):
    prompt = {"parent": None, "sampled": False, "token_ids": [5, 6], "mask": [False] * 2, "message": {"content": "..."}}
    sampled = {"parent": 0, "sampled": True, "token_ids": [7, 8 + answer], "mask": [True] * 2, "logprobs": [-0.5, -0.7],
               "message": {"role": "assistant", "content": "..."}}  # fmt: skip
    return {"id": f"q-{answer}", "group": {"id": "q"}, "ok": True, "task": {"type": "t", "data": {}, "hash": "q"}, "traces": [
        {"version": 1, "id": f"q-{answer}", "ok": True, "nodes": [prompt, sampled], "rewards": {},
         "agent": {"config": {}, "name": "agent", "trainable": True}}]}  # fmt: skip


TRACES = [trace(answer) for answer in range(3)]


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records)


def write(path, content):
    """Records as the name says: Parquet, one JSON document, or lines, which may be compressed. Text as it is."""
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(content), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(content, indent=2))
    else:
        text = content if isinstance(content, str) else lines(content)
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory, espalier):
    folder = tmp_path_factory.mktemp("raw") / "model"
    config = REPOSITORY / "examples/tiny_llama.json"
    espalier("init", "--config", config, "--out", folder, "--seed", seed_of(1), "--tokenizer", "bytes")
    return folder


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """The folder of temporary files, in which nothing may be left."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


def notes_of(text):
    return [line for line in text.splitlines() if not line.startswith("prepare: wrote ")]


@pytest.mark.parametrize("name, content, flags", [
    ("chats.jsonl", CHATS, ["--model"]), ("chats.jsonl", CHATS, ["--model", "--per-turn"]),
    ("chats.jsonl", CHATS, ["--model", "--limit", 2]), ("chats.parquet", CHATS, ["--model", "--per-turn"]),
    ("sharegpt.jsonl.gz", SHAREGPT, ["--model"]), ("list.json", CHATS, ["--model"]), ("pairs.jsonl", PAIRS, ["--model"]),
    ("text.json", TEXT_ATIF, ["--model", "--per-turn"]), ("traces.jsonl", TRACES, []), ("traces.jsonl", TRACES, ["--limit", 2]),
    ("verl.parquet", VERL, []), ("verl.jsonl", VERL, []), ("skyrl.jsonl", SKYRL, []), ("trl.parquet", TRL, []),
    ("areal.jsonl", AREAL, []), ("trajectory.json", ATIF, []), ("trajectory.json", ATIF, ["--per-turn"]),
    ("rows.parquet", ROWS, []), ("rows.json", ROWS, []),
    ("some.jsonl", '{"messages": 1}\n' + lines(CHATS), ["--model", "--skip-bad-rows"]),
    ("first.jsonl", "{bad\n" + lines(TRACES), ["--skip-bad-rows"]),
    ("long.jsonl", lines(TRACES[:1]) + '{"x": "' + "y" * 2000 + '"}\n' + lines(TRACES[1:]),
     ["--skip-bad-rows", "--max-row-bytes", 1000])])  # fmt: skip
def test_the_report_is_that_of_the_rows_which_prepare_writes(espalier, model, tmp_path, scratch, capsys, name, content, flags):
    raw, rows = write(tmp_path / name, content), tmp_path / "rows.safetensors"
    flags = [word for flag in flags for word in ([flag, model] if flag == "--model" else [flag])]
    assert prepare.main([*map(str, flags), str(raw), "-o", str(rows)]) == 0
    prepared = notes_of(capsys.readouterr().err)
    with_model = [word for word in flags if word in ("--model", model)]
    expected = espalier("inspect", *with_model, "--data", rows, "--json")
    shown = espalier("inspect", *flags, "--data", raw, "--json")
    assert json.loads(shown.stdout) == json.loads(expected.stdout)
    *notes, summary = shown.stderr.splitlines()
    assert notes_of("\n".join(notes)) == prepared != []
    assert summary == expected.stderr.splitlines()[-1].replace(str(rows), str(raw))
    # Control: without a conversion these files are refused, or are other rows.
    unconverted = espalier("plan", "--data", raw, check=False)
    assert unconverted.returncode == 1 or json.loads(expected.stdout)["flat_tokens"] != json.loads(
        espalier("plan", "--data", raw, "--json").stdout)["flat_tokens"]  # fmt: skip


def test_flags_of_the_conversion_matter(espalier, model, tmp_path, scratch):
    """Control: conversations, turns and a limit give three reports."""
    raw = write(tmp_path / "chats.jsonl", CHATS)
    counts = [json.loads(espalier("inspect", "--model", model, "--data", raw, "--json", *flags).stdout)["trajectories"]
              for flags in ([], ["--per-turn"], ["--per-turn", "--limit", 2])]  # fmt: skip
    assert counts == [3, 6, 4]


def test_several_files_are_read_one_after_another(espalier, tmp_path, scratch):
    one, two = write(tmp_path / "one.jsonl", TRACES[:2]), write(tmp_path / "-two.jsonl", SKYRL)
    page = tmp_path / "page.html"
    done = espalier("inspect", f"--data={one}", two, "--html", page)
    assert "\ntrajectories                         4\n" in "\n" + done.stdout and done.stdout.endswith(f"wrote {page}\n")
    assert "one.jsonl, -two.jsonl: 4 trajectories" in done.stderr
    assert "one.jsonl, -two.jsonl" in page.read_text() and "rows.safetensors" not in page.read_text()


def test_a_file_of_settings_and_a_relative_name(tmp_path, scratch):
    write(tmp_path / "-chats.jsonl", TRACES)
    (tmp_path / "run.toml").write_text('data = ["-chats.jsonl"]\njson = true\nhtml = "page.html"\n')
    done = subprocess.run([PROGRAM, "inspect", "--config", "run.toml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and json.loads(done.stdout)["trajectories"] == 3, done.stderr
    assert done.stderr.splitlines()[-1].startswith("-chats.jsonl: 3 trajectories") and (tmp_path / "page.html").exists()


def refusal(espalier, *arguments):
    failed = espalier("inspect", *arguments, check=False)
    assert failed.returncode == 1 and failed.stdout == "", failed
    return failed.stderr.splitlines()[-1]


def test_text_needs_a_model(espalier, tmp_path, scratch):
    for name, content in (("chats.jsonl", CHATS), ("pairs.jsonl", PAIRS), ("text.json", TEXT_ATIF)):
        raw = write(tmp_path / name, content)
        assert re.fullmatch(rf"espalier: error: {raw}: expected `espalier inspect --model DIR`, whose tokenizer and chat template "
                            r"convert text \([a-z]+\) to tokens, received no model", refusal(espalier, "--data", raw))  # fmt: skip


def test_rows_and_others_together_are_refused(espalier, model, tmp_path, scratch):
    raw, rows = write(tmp_path / "chats.jsonl", CHATS), write(tmp_path / "rows.jsonl", ROWS)
    message = refusal(espalier, "--model", model, "--data", raw, rows)
    assert f"received both: {raw} is converted, {rows} is not; convert the former with `espalier prepare`" in message


def test_turns_are_of_chats(espalier, tmp_path, scratch):
    rows, traces = write(tmp_path / "rows.jsonl", ROWS), write(tmp_path / "traces.jsonl", TRACES)
    assert refusal(espalier, "--data", rows, "--per-turn") == (
        f"espalier: error: --per-turn: expected chats, received rows ({rows})")
    assert refusal(espalier, "--data", traces, "--per-turn") == (
        f"espalier: error: --per-turn: expected chats, received traces ({traces})")
    with open(rows) as file:
        done = subprocess.run([PROGRAM, "inspect", "--data", "-", "--per-turn"], stdin=file, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.endswith("--per-turn: expected chats, received rows (/dev/stdin)\n")


def test_messages_name_the_files_and_flags_of_the_user(espalier, model, tmp_path, scratch):
    beyond = write(tmp_path / "beyond.jsonl", [{**SKYRL[0], "response_ids": [7, 10**6]}])
    message = refusal(espalier, "--model", model, "--data", beyond)
    assert f"{beyond}: row 0: field `input_ids`: expected" in message and "1000000" in message and str(scratch) not in message
    unclear = write(tmp_path / "unclear.jsonl", [{**CHATS[0], **SKYRL[0]}])
    message = refusal(espalier, "--model", model, "--data", unclear)
    assert "--from skyrl or --from messages" in message
    assert message.endswith(" (`espalier prepare` has --from, and `inspect` reads the rows that it writes)")
    bad = write(tmp_path / "bad.jsonl", [CHATS[0], {"messages": 1}])
    message = refusal(espalier, "--model", model, "--data", bad)
    assert message.startswith(f"espalier: error: {bad}:2: field `messages`: expected") and "`espalier prepare` has" not in message


@pytest.mark.parametrize("content", ["{bad\n", "[1, 2]\n", '{"input_ids": null}\n', '{"input_ids": [1, NaN]}\n', "", "a,b\n1,2\n", "\x80\x04"])
def test_what_nothing_reads_is_refused_as_before(espalier, tmp_path, scratch, content):
    path = tmp_path / "rows.jsonl"
    path.write_text(content, encoding="latin-1")
    assert refusal(espalier, "--data", path) == espalier("plan", "--data", path, check=False).stderr.strip()


def test_standard_input_has_rows_only(tmp_path, scratch):
    raw = write(tmp_path / "traces.jsonl", TRACES)
    with open(raw) as file:
        done = subprocess.run([PROGRAM, "inspect", "--data", "-"], stdin=file, capture_output=True, text=True)
    assert done.returncode == 1 and "run `espalier import /dev/stdin -o rows.jsonl` first" in done.stderr, done


# Ends of the process.


def wait_for(condition, process):
    until = time.monotonic() + 60
    while not condition():
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.02)


def ended_by(process, number):
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    return process.returncode, error.splitlines()[-1]


ENDS = [(signal.SIGTERM, 143, "espalier: error: stopped by SIGTERM"), (signal.SIGINT, 130, "espalier: error: interrupted")]


@pytest.mark.parametrize("number, code, message", ENDS)
def test_a_signal_during_the_conversion_leaves_nothing(tmp_path, scratch, number, code, message):
    endless = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    folder = write_model(tmp_path / "model", endless)
    (folder / "config.json").write_bytes((REPOSITORY / "examples/tiny_llama.json").read_bytes())
    raw = write(tmp_path / "chats.jsonl", CHATS)
    process = subprocess.Popen([PROGRAM, "inspect", "--model", folder, "--data", raw], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)  # fmt: skip
    wait_for(lambda: list(scratch.iterdir()), process)
    assert ended_by(process, number) == (code, message)


WAITING = """
import sys, time
from pathlib import Path
from espalier.commands import inspect

def run_and_wait(*arguments):
    Path(sys.argv[1]).touch()
    time.sleep(1000)

inspect.run_native = run_and_wait
sys.exit(inspect.main(["--data", sys.argv[2]]))
"""


@pytest.mark.parametrize("number, code, message", ENDS)
def test_a_signal_after_it_removes_its_rows_too(tmp_path, scratch, number, code, message):
    ready = tmp_path / "ready"
    raw = write(tmp_path / "traces.jsonl", TRACES)
    process = subprocess.Popen([sys.executable, "-c", WAITING, ready, raw], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "PYTHONPATH": str(REPOSITORY / "python")})  # fmt: skip
    wait_for(ready.exists, process)
    assert [path.name for path in scratch.glob("*/*")] == ["rows.safetensors"]  # control: it was there
    assert ended_by(process, number) == (code, message)
