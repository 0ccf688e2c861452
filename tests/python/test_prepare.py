# SPDX-License-Identifier: Apache-2.0
"""espalier prepare: rows are what the template renders, and loss lies on what the assistant writes."""

import gzip
import io
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard

from espalier.commands.prepare import main

PYTHON_FOLDER = Path(__file__).resolve().parents[2] / "python"


def call(name, arguments, identity="call_1"):
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


CALLS = {
    "task_id": 7, "trial": 2, "reward": 0.5, "info": {"split": "dev"},
    "messages": [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call("weather", {"city": "Paris"})]},
        {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "sunny"},
        {"role": "assistant", "content": "Sunny.", "tool_calls": [call("log", {"text": "é"}, "call_2")]},
        {"role": "tool", "tool_call_id": "call_2", "name": "log", "content": "ok"},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "Thanks"}]}

THINKING = {
    "id": "t", "messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>1</think>A"},
        {"role": "assistant", "content": "<think>2</think>B"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "<think>3</think>C"}]}


def written(row, tokenizer):
    """Decoded stretches of tokens that carry loss."""
    stretches, current = [], []
    for token, mask in zip(row["input_ids"] + [0], row["loss_mask"] + [0], strict=True):
        if mask:
            current.append(token)
        elif current:
            stretches.append(tokenizer.decode(current))
            current = []
    return stretches


def test_conversation_has_loss_on_all_assistant_tokens_and_no_others(prepare, tokenizer):
    code, rows = prepare("native", [CALLS])
    assert code == 0 and len(rows) == 1
    assert written(rows[0], tokenizer) == [
        '<call>weather {"city": "Paris"}</call><|im_end|>',
        'Sunny.<call>log {"text": "\\u00e9"}</call><|im_end|>',
        "Done.<|im_end|>"]
    text = tokenizer.decode(rows[0]["input_ids"])
    assert text.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nWeather")
    assert text.endswith("Done.<|im_end|>")
    assert "<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>assistant\n" in text
    assert rows[0]["reward"] == 0.5 and rows[0]["trajectory_id"] == "7/2" and "group_id" not in rows[0]


def test_per_turn_rows_are_prefixes_of_the_next_with_loss_on_their_own_tokens(prepare, tokenizer):
    _, (whole,) = prepare("native", [CALLS])
    code, rows = prepare("native", [CALLS], "--per-turn", "--group-by", "info.split")
    assert code == 0
    assert [row["trajectory_id"] for row in rows] == ["7/2/turn-0", "7/2/turn-1", "7/2/turn-2"]
    assert {row["group_id"] for row in rows} == {"dev"} and {row["reward"] for row in rows} == {0.5}
    for row, later in itertools.pairwise(rows):
        assert later["input_ids"][:len(row["input_ids"])] == row["input_ids"]
        assert len(later["input_ids"]) > len(row["input_ids"])
    assert rows[-1]["input_ids"] == whole["input_ids"]
    assert [written(row, tokenizer) for row in rows] == [[text] for text in written(whole, tokenizer)]
    for row in rows:
        prompt = tokenizer.decode(row["input_ids"][:row["loss_mask"].index(1)])
        assert prompt.endswith("<|im_start|>assistant\n")


def test_a_mask_that_is_one_token_off_would_be_seen(prepare, tokenizer):
    _, (row,) = prepare("native", [CALLS])
    right = written(row, tokenizer)
    for shifted in (row["loss_mask"][1:] + [0], [0] + row["loss_mask"][:-1]):
        assert written({**row, "loss_mask": shifted}, tokenizer) != right


def test_template_without_tool_calls_gets_them_in_the_content(prepare, tokenizer, capsys):
    code, (row,) = prepare("no_calls", [CALLS])
    assert code == 0
    assert written(row, tokenizer)[:2] == [
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>',
        'Sunny.\n<tool_call>\n{"name": "log", "arguments": {"text": "é"}}\n</tool_call><|im_end|>']
    assert "<|im_start|>tool\nsunny" in tokenizer.decode(row["input_ids"])
    assert "written into the content" in capsys.readouterr().err


def test_template_without_tool_role_gets_results_as_user_messages(prepare, tokenizer, capsys):
    row = json.loads(json.dumps(CALLS))
    row["messages"].insert(4, {"role": "tool", "tool_call_id": "call_9", "content": "windy"})
    _, (made,) = prepare("two_roles", [row])
    text = tokenizer.decode(made["input_ids"])
    assert ("<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n<tool_response>\nwindy\n</tool_response>"
            "<|im_end|>\n<|im_start|>assistant\nSunny.") in text
    assert "tool results: as user messages" in capsys.readouterr().err


@pytest.mark.parametrize("model, expected", [
    ("null_fails", '<call>weather {"city": "Paris"}</call><|im_end|>'),
    ("object_arguments", "<call>weather city=Paris;</call><|im_end|>")])
def test_the_form_of_a_call_that_the_template_takes_is_found(prepare, tokenizer, capsys, model, expected):
    _, (row,) = prepare(model, [CALLS])
    assert written(row, tokenizer)[0] == expected
    assert "rendered by the chat template" in capsys.readouterr().err


def test_forcing_a_template_that_cannot_is_refused(prepare, capsys):
    assert prepare("no_calls", [CALLS], "--tool-calls", "template") == (1, None)
    assert "drops them" in capsys.readouterr().err


def test_rewritten_history_is_reported_and_every_row_is_a_true_render(prepare, tokenizer, capsys):
    code, rows = prepare("rewrites", [THINKING, CALLS | {"messages": CALLS["messages"][:2] + CALLS["messages"][6:7]}])
    error = capsys.readouterr().err
    assert code == 0 and "1 of 2 conversations: template rewrites history at turn 2" in error
    assert [row["trajectory_id"] for row in rows] == ["t/run-0", "t/run-1", "7/2"]
    assert written(rows[0], tokenizer) == ["<think>1</think>A<|im_end|>", "<think>2</think>B<|im_end|>"]
    assert written(rows[1], tokenizer) == ["<think>3</think>C<|im_end|>"]
    history = tokenizer.decode(rows[1]["input_ids"])
    assert history.startswith("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n")

    _, turns = prepare("rewrites", [THINKING], "--per-turn")
    assert [len(written(row, tokenizer)) for row in turns] == [1, 1, 1]
    assert turns[1]["input_ids"][:len(turns[0]["input_ids"])] == turns[0]["input_ids"]
    assert turns[2]["input_ids"][:len(turns[1]["input_ids"])] != turns[1]["input_ids"]
    assert turns[2]["input_ids"] == rows[1]["input_ids"]


def test_a_thought_that_the_prompt_opens_and_the_turn_lacks_costs_no_loss(prepare, tokenizer, capsys):
    code, (row,) = prepare("unlocatable", [CALLS])
    assert code == 0 and "3 turns that the template writes in another way than its generation prompt" in capsys.readouterr().err
    _, (plain,) = prepare("no_calls", [CALLS])
    assert row == plain, "the row is the template's rendering of the turns, with loss on all of each"


def test_turns_that_cannot_be_located_are_left_out(prepare, capsys):
    assert prepare("prompt_apart", [CALLS | {"messages": CALLS["messages"][1:]}]) == (1, None)
    error = capsys.readouterr().err
    assert "3 turns left out" in error and "expected at least one trajectory" in error


def test_a_first_message_by_the_assistant_has_no_prompt_and_no_loss(prepare, tokenizer, capsys):
    _, (row,) = prepare("native", [{"messages": [ANSWER, USER, {"role": "assistant", "content": "c"}]}])
    assert written(row, tokenizer) == ["c<|im_end|>"]
    assert tokenizer.decode(row["input_ids"]).startswith("<|im_start|>assistant\nb<|im_end|>\n")
    assert "1 turn left out" in capsys.readouterr().err


def test_ids_that_depend_on_segments_are_counted(prepare, tokenizer, capsys):
    """Content that begins with a newline would merge with the newline of the prompt if tokenised at once."""
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\nx"}]}
    _, (made,) = prepare("no_calls", [row])
    assert "1 of 1 conversation: tokenising the whole text at once" in capsys.readouterr().err
    assert written(made, tokenizer) == ["\nx<|im_end|>"]
    prepare("no_calls", [CALLS])
    assert "tokenising the whole text" not in capsys.readouterr().err


def test_packed_rows_equal_jsonl_rows(prepare):
    from safetensors.numpy import load_file

    chats = [CALLS, {key: value for key, value in CALLS.items() if key != "reward"}]
    flags = ("--per-turn", "--group-by", "task_id")
    _, rows = prepare("native", chats, *flags)
    _, packed = prepare("native", chats, *flags, name="rows.safetensors")
    columns = load_file(packed)
    assert {name: str(values.dtype) for name, values in columns.items()} == {
        "offsets": "int64", "input_ids": "int32", "loss_mask": "uint8", "reward": "float64", "reward.present": "uint8",
        "trajectory_id": "uint8", "trajectory_id.offsets": "int64", "group_id": "uint8", "group_id.offsets": "int64"}
    for index, row in enumerate(rows):
        begin, end = columns["offsets"][index:index + 2]
        assert columns["input_ids"][begin:end].tolist() == row["input_ids"]
        assert columns["loss_mask"][begin:end].tolist() == row["loss_mask"]
        assert bool(columns["reward.present"][index]) == ("reward" in row)
        assert columns["reward"][index] == row.get("reward", 0.0)
        for name in ("trajectory_id", "group_id"):
            begin, end = columns[f"{name}.offsets"][index:index + 2]
            assert columns[name][begin:end].tobytes().decode() == row[name]
    assert columns["offsets"][-1] == len(columns["input_ids"]) == sum(len(row["input_ids"]) for row in rows)


def test_columns_that_no_row_has_are_absent_from_the_packed_form(prepare):
    from safetensors.numpy import load_file

    _, packed = prepare("native", [THINKING], name="rows.safetensors")
    assert set(load_file(packed)) == {"offsets", "input_ids", "loss_mask", "trajectory_id", "trajectory_id.offsets"}


def test_names_are_unique_and_made_from_what_there_is(prepare, capsys):
    bare = {"messages": CALLS["messages"]}
    _, rows = prepare("native", [CALLS, CALLS, bare, bare | {"trajectory_id": "x"}])
    assert [row["trajectory_id"] for row in rows] == ["7/2", "7/2~2", "chats.jsonl:3", "x"]
    assert "1 conversation with the name of an earlier one" in capsys.readouterr().err


def test_limit_and_max_tokens(prepare, capsys):
    _, rows = prepare("native", [CALLS, THINKING], "--limit", "1")
    assert [row["trajectory_id"] for row in rows] == ["7/2"]
    _, turns = prepare("native", [CALLS], "--per-turn")
    longest = len(turns[1]["input_ids"])
    _, kept = prepare("native", [CALLS], "--per-turn", "--max-tokens", str(longest))
    assert kept == turns[:2]
    assert "1 trajectory dropped by --max-tokens" in capsys.readouterr().err


@pytest.mark.parametrize("suffix, inflate", [
    ("gz", gzip.decompress), ("zst", lambda data: zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)).read())])
def test_compressed_input_and_output(prepare, models, tmp_path, suffix, inflate):
    _, plain = prepare("native", [CALLS, THINKING])
    data = (tmp_path / "chats.jsonl").read_bytes()
    packed = tmp_path / f"chats.{suffix}"
    packed.write_bytes(gzip.compress(data) if suffix == "gz" else zstandard.compress(data))
    out = tmp_path / f"out.jsonl.{suffix}"
    assert main(["--model", str(models["native"]), str(packed), "-o", str(out)]) == 0
    assert [json.loads(line) for line in inflate(out.read_bytes()).splitlines()] == plain
    first = out.read_bytes()
    assert main(["--model", str(models["native"]), str(packed), "-o", str(out)]) == 0
    assert out.read_bytes() == first


@pytest.mark.parametrize("cut", [10, -5])
@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_truncated_compressed_input_is_an_error(prepare, models, tmp_path, capsys, compress, cut):
    packed = tmp_path / "chats.bin"
    packed.write_bytes(compress(os.urandom(2000).hex().encode())[:cut])
    assert main(["--model", str(models["native"]), str(packed), "-o", str(tmp_path / "rows.jsonl")]) == 1
    assert "chats.bin" in capsys.readouterr().err and not (tmp_path / "rows.jsonl").exists()


USER = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}
BAD_LINES = {
    "truncated": (b'{"messages": [', "field `<line>`: expected one JSON object"),
    "not an object": (b"[1]", "field `<line>`: expected one JSON object, received [1]"),
    "not UTF-8": (b'{"id": "\xff"}', "expected UTF-8, received byte 0xff at column 9"),
    "infinity": (b'{"messages": [{"role": "assistant", "content": "a"}], "reward": Infinity}',
                 "field `reward`: expected a finite number, received Infinity"),
    "duplicate key": (b'{"id": 1, "id": 2}', "field `id`: expected each key once"),
    "deep": (b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "expected JSON of bounded depth"),
    "no messages": ({"messages": []}, "field `messages`: expected a non-empty list of chat messages, received []"),
    "text": ({"text": "x"}, "expected a non-empty list of chat messages, received text (`text`), which has no turns"),
    "rows": ({"input_ids": [1]}, "received token ids, which are rows already: pass them to `espalier train`"),
    "pair": ({"prompt": "a", "chosen": 1, "rejected": "c"}, "field `chosen`: expected a text, or a list of messages, received 1"),
    "other fields": ({"a": 1}, "received a line without `messages` (its fields: `a`)"),
    "list": (b'[{"messages": []}]', "received the start of a JSON list: write one chat per line with"),
    "several lines": (b"{", "received the start of an object of several lines"),
    "role of ShareGPT": ({"conversations": [{"from": "gtp", "value": "x"}]},
                         "field `messages[0].from`: expected one of user, assistant, system"),
    "half a prompt": ({"prompt": "a", "completion": 3}, "field `completion`: expected a text, or a list of messages, received 3"),
    "no assistant": ({"messages": [USER]}, "expected at least one message with role assistant"),
    "message": ({"messages": [ANSWER, 3]}, "field `messages[1]`: expected an object, received 3"),
    "role": ({"messages": [{"content": "a"}]}, "field `messages[0].role`: expected a non-empty string"),
    "content": ({"messages": [{"role": "user", "content": 3}]}, "field `messages[0].content`: expected a string"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "expected a part of type text"),
    "call": ({"messages": [{"role": "assistant", "tool_calls": [{}]}]},
             "field `messages[0].tool_calls[0].function`: expected an object"),
    "arguments": ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}]},
                  "function.arguments`: expected a JSON object, or a string"),
    "reward": ({"messages": [ANSWER], "reward": "high"}, 'field `reward`: expected a finite number, received "high"'),
    "surrogate": (b'{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": ""}]}',
                  "unpaired surrogate"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_bad_lines_stop_with_one_error_or_are_counted(prepare, tmp_path, capsys, name):
    line, expected = BAD_LINES[name]
    assert prepare("native", [CALLS, line, THINKING]) == (1, None)
    error = capsys.readouterr().err
    assert f"{tmp_path}/chats.jsonl:2: " in error and expected in error
    assert not list(tmp_path.glob(".espalier*")), "a temporary file was left behind"
    code, rows = prepare("native", [CALLS, line, THINKING], "--skip-bad-rows")
    assert code == 0 and len(rows) == 2
    assert "1 bad line skipped" in capsys.readouterr().err


def test_missing_group_field_is_a_bad_line(prepare, capsys):
    assert prepare("native", [CALLS], "--group-by", "info.fold") == (1, None)
    expected = "field `info.fold`: expected a string or a number to group by, received no such field"
    assert expected in capsys.readouterr().err


def test_conversations_that_a_template_refuses_are_bad_lines(prepare, capsys):
    odd = {"messages": [{"role": "critic", "content": "x"}, ANSWER]}
    assert prepare("two_roles", [odd]) == (1, None)
    expected = "chats.jsonl:1: field `messages`: expected a conversation that the chat template renders"
    assert expected in capsys.readouterr().err


SHAPES = {
    "ShareGPT": {"system": "s", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    "ShareGPT with roles": {"conversations": [{"from": "system", "value": "s"}, {"from": "user", "value": "a"},
                                              {"from": "assistant", "value": "b"}]},
    "messages as conversations": {"conversations": [{"role": "system", "content": "s"}, USER, ANSWER]},
    "texts": {"system": "s", "prompt": "a", "completion": "b"},
    "lists": {"prompt": [{"role": "system", "content": "s"}, USER], "completion": [ANSWER]},
    "response": {"system": "s", "prompt": "a", "response": "b"},
    "Alpaca": {"system": "s", "instruction": "a", "input": "", "output": "b"},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_other_shapes_of_chats_give_the_same_rows(prepare, shape):
    plain = {"messages": [{"role": "system", "content": "s"}, USER, ANSWER], "reward": 2}
    code, expected = prepare("native", [plain])
    assert code == 0 and expected[0]["reward"] == 2
    assert prepare("native", [{**SHAPES[shape], "reward": 2}]) == (0, expected)


@pytest.mark.parametrize("head, what", [(b"ARROW1", "an Arrow file; try `python3 -c "), (b"BZh", "a bzip2 file; try `bzip2 -dc ")])
def test_files_of_other_formats_are_told_by_their_first_bytes(prepare, tmp_path, capsys, head, what):
    assert prepare("native", [head + b"abc"]) == (1, None)
    assert f"{tmp_path}/chats.jsonl: expected JSON lines, received {what}" in capsys.readouterr().err


def test_older_forms_of_messages(prepare, tokenizer):
    row = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                        {"role": "assistant", "content": None, "tool_calls": None, "refusal": None,
                         "function_call": {"name": "f", "arguments": "{}"}},
                        {"role": "function", "name": "f", "content": "r"}, ANSWER]}
    _, (made,) = prepare("native", [row])
    assert tokenizer.decode(made["input_ids"]) == (
        "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n<call>f {}</call><|im_end|>\n"
        "<|im_start|>tool\nr<|im_end|>\n<|im_start|>assistant\nb<|im_end|>")


def test_a_failed_run_leaves_the_old_output_alone(prepare, models, tmp_path):
    prepare("native", [CALLS])
    before = (tmp_path / "rows.jsonl").read_bytes()
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps(CALLS) + "\n{\n")
    assert main(["--model", str(models["native"]), str(bad), "-o", str(tmp_path / "rows.jsonl")]) == 1
    assert (tmp_path / "rows.jsonl").read_bytes() == before


def test_command_line(models, tmp_path):
    """As `espalier prepare` runs it: a separate process, which does not import torch."""
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps(CALLS) + "\n\n")
    environment = os.environ | {"PYTHONPATH": str(PYTHON_FOLDER)}
    base = [sys.executable, "-X", "importtime", "-m", "espalier", "prepare"]
    done = subprocess.run([*base, "--model", models["native"], chats, "-o", tmp_path / "r.jsonl"],
                          env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1 conversation, 1 trajectory" in done.stderr
    assert " torch\n" not in done.stderr
    wrong = subprocess.run([*base, "--model", models["native"], chats, "-o", tmp_path / "r.csv"],
                           env=environment, capture_output=True, text=True)
    assert wrong.returncode == 2 and "espalier: error: argument -o: expected a name in .jsonl" in wrong.stderr
