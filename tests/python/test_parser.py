# SPDX-License-Identifier: Apache-2.0
"""Arguments of commands and their TOML files: what the library gets, and what is refused, where."""

import argparse
import json
import re

import pytest

from espalier.commands import plan, train
from espalier.commands.command_line import byte_count, nearest_word
from espalier.commands.native import texts_of
from espalier.commands.parser import CommandParser
from espalier.commands.toml import TomlFile, read_tables
from espalier.errors import InputError, UsageError
from espalier.native import core


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "run.toml"
        path.write_text(text)
        return str(path)

    return write


def texts(words, command=train):
    """What the library gets, lists as lists."""
    found = {}
    for name, text in texts_of(command.parser().parse(words)):
        found.setdefault(name, []).append(text.decode())
    return {name: each if len(each) > 1 else each[0] for name, each in found.items()}


def refused(capsys, words, command=train):
    """The message of wrong usage."""
    with pytest.raises(SystemExit) as stopped:
        command.parser().parse(words)
    assert stopped.value.code == 2
    found = re.fullmatch(r"espalier: error: (.*) \(see `espalier \w+ --help`\)\n", capsys.readouterr().err)
    return found[1]


def test_a_file_has_flags_and_the_command_line_wins(file):
    config = file('model = "some folder/x"\nlearning-rate = 0.5\nsteps = 7\nresume = true\n')
    for words in (["--config", config, "--steps", "9"], ["--steps", "9", "--config", config], ["--steps=9", f"--config={config}"]):
        assert texts(words) == {"model": "some folder/x", "learning-rate": "0.5", "steps": "9", "resume": "true"}


def test_underscores_stand_for_dashes(file):
    assert texts(["--config", file("model = 'm'\nlearning_rate = 2\n")]) == {"model": "m", "learning-rate": "2"}


def test_booleans_turn_flags_on_and_off(file):
    config = file("model = 'm'\nresume = false\n")
    assert "resume" not in texts(["--config", config])
    assert texts(["--resume", "--config", config])["resume"] == "true"


def test_lists_of_the_command_line_replace_those_of_the_file(file):
    config = file("model = 'm'\ndata = ['a, b.jsonl', '-', 'c.jsonl']\n")
    assert texts(["--config", config])["data"] == ["a, b.jsonl", "-", "c.jsonl"]
    for words in (["--config", config, "--data", "x", "y"], ["--data", "x", "--data", "y", "--config", config],
                  ["--data=x", f"--config={config}", "--data=y"], [f"--config={config}", "--data=x", "y"]):  # fmt: skip
        assert texts(words)["data"] == ["x", "y"], words
    with pytest.raises(InputError, match=r"run\.toml:1: key `steps`: expected one value, received a list"):
        texts(["--config", file("steps = [1, 2]\n")])


def test_repeated_flags_are_refused(file, capsys):
    assert refused(capsys, ["--model", "m", "--learning-rate", "1e-5", "--learning-rate=1e-4"]) == (
        "--learning-rate was given twice: 1e-5 and 1e-4")  # fmt: skip
    assert refused(capsys, ["--model", "m", "--resume", "--resume"]) == "--resume was given twice"
    assert refused(capsys, ["--config", file("learning-rate = 1\nlearning_rate = 2\n")]) == (
        "--learning-rate was given twice: 1 and 2")  # fmt: skip
    config = file("model = 'm'\n")
    assert refused(capsys, ["--config", config, "--config=b.toml"]) == f"--config was given twice: {config} and b.toml"


def test_numbers_keep_their_value(file):
    found = texts(["--config", file("learning-rate = 1.2345678901234567e-7\nseed = 9007199254740993\n")])
    assert float(found["learning-rate"]) == 1.2345678901234567e-7 and found["seed"] == "9007199254740993"


@pytest.mark.parametrize("text, message", [
    ("steps = 1\n\nlerning-rate = 2\n", ":3: unknown key `lerning-rate`: expected a flag of `espalier train` (see --help); did you "
     "mean --learning-rate?"),
    ("help = true\n", ":1: unknown key `help`"),
    ('config = "other.toml"\n', ":1: unknown key `config`"),
    ("steps = 1\n[model]\nname = 2\n", ":2: key `model`: expected a value, received a table"),
    ("data = [[1], [2]]\n", ":1: key `data`: expected text, a number, true, false or a list"),
    ("model = 2020-01-01\n", ":1: key `model`: expected text"),
    ("steps = 1\nresume = yes\n", ":2: "), ('steps = 1\nmodel = "x\n', ":2: "), ("steps = 1\nsteps = 2\n", ":2: "),
    ("steps = 1\nmodel = 1979-05-27TW\n", ":2: "), ("steps = 1\n\u00e9 = 1\n", ":2: "), ("steps = 1\nresume = 3\n", ":2: key `resume`: "
     "expected true or false, received 3"),
    ("data = [\n  'a',\n  'b'\n]\nsteps = 1\nstep = 2\n", ":6: unknown key `step`")])  # fmt: skip
def test_faults_of_a_file_are_named_with_their_line(file, text, message):
    path = file(text)
    with pytest.raises(InputError) as raised:
        texts(["--config", path])
    assert str(raised.value).startswith(path + message), raised.value


def test_files_that_are_not_there_or_no_text(tmp_path, capsys):
    with pytest.raises(InputError, match=r"^--config: cannot open none\.toml: No such file or directory$"):
        texts(["--config", "none.toml"])
    (tmp_path / "bytes.toml").write_bytes(b"model = '\xff'\n")
    with pytest.raises(InputError, match=r"bytes\.toml: expected UTF-8, received the byte 0xff"):
        texts(["--config", str(tmp_path / "bytes.toml")])
    assert refused(capsys, ["--config"]) == "--config: expected one argument"


@pytest.mark.parametrize("words, message", [
    (["--lr", "1"], "unknown flag --lr of `espalier train`; did you mean --learning-rate?"),
    (["--learning_rat=1"], "unknown flag --learning_rat of `espalier train`; did you mean --learning-rate?"),
    (["--output-dir", "x"], "unknown flag --output-dir of `espalier train`; did you mean --out?"),
    (["--qqqqqqqq"], "unknown flag --qqqqqqqq of `espalier train`"),
    (["--model"], "--model: expected one argument"),
    (["--model", "m", "-q"], "unrecognized arguments: -q")])  # fmt: skip
def test_wrong_usage_is_named(capsys, words, message):
    assert refused(capsys, words) == message


def test_values_may_look_like_flags():
    assert texts(["--out=--lr", "--learning-rate", "-1"]) == {"out": "--lr", "learning-rate": "-1"}


@pytest.mark.parametrize("words, message", [
    (["--limit", "x"], "limit: expected a whole number of at least 0, received x"),
    (["--limit", "010"], "limit: expected a whole number in plain decimal digits, received 010"),
    (["--max-row-bytes", "lots"], "max_row_bytes: expected a size such as 8GiB or 500MB, received lots"),
    (["--strategy", "none"], "strategy: expected auto, partition, tree-packing, append-only or sequence-packing, received `none`")])
def test_the_library_checks_values(words, message):
    with pytest.raises(UsageError) as raised:
        core.check_options("plan", texts_of(plan.parser().parse(words)))
    assert str(raised.value) == message
    with pytest.raises(RuntimeError, match="internal check failed"):
        core.check_options("plan", [("lr", b"1")])


def test_a_command_of_python_has_the_same_checks():
    made = CommandParser("some", "Something")
    made.group("Some")
    made.data()
    made.others()
    with pytest.raises(UsageError) as raised:
        made.parse(["--data", "x", "--limit", "-1"])
    assert str(raised.value) == "limit: expected a whole number of at least 0, received -1"


def test_sizes():
    assert [byte_count(text) for text in ("7", "2kB", "1.5 GiB", "8gib", 64)] == [7, 2000, 3 << 29, 8 << 30, 64]
    for text in ("0", "lots", "1" * 400, "9EiB", "-1", "1.5.2"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected a size such as 8GiB or 500MB"):
            byte_count(text)


def test_the_nearest_word_has_to_be_near():
    known = ["train", "plan", "prepare"]
    assert [nearest_word(word, known) for word in ("trian", "prepair", "xyz", "")] == ["train", "prepare", None, None]


def test_tables_have_their_lines(file):
    path = file("# mix\n[[mix]]\ndata = 'a'\nweight = 2\n\n[[mix]]\ndata = ['b', 'c']\n")
    assert json.loads(read_tables("--mix", path, "mix")) == [
        {"where": f"{path}:2", "values": {"data": "a", "weight": 2}}, {"where": f"{path}:6", "values": {"data": ["b", "c"]}}]  # fmt: skip


def test_a_line_of_text_that_looks_like_a_table_is_none(file):
    path = file("[[mix]]\ndata = '''\n[[mix]]\n'''\n")
    assert json.loads(read_tables("--mix", path, "mix")) == [{"where": path, "values": {"data": "[[mix]]\n"}}]


@pytest.mark.parametrize("text, message", [
    ("", ": expected tables [[mix]], received none"), ("a = 1\n", ":1: unknown key `a`: expected tables [[mix]]"),
    ("[mix]\na = 1\n", ":1: unknown key `mix`"), ("[[mix]]\na = 1\n[[mix]]\nb = 1979-05-27\n", ":4: key `b`: expected text"),
    ("[[mix]]\nweight = inf\n", ":2: key `weight`: expected a finite number, received inf")])  # fmt: skip
def test_faults_of_tables_are_named_with_their_line(file, text, message):
    path = file(text)
    with pytest.raises(InputError) as raised:
        read_tables("--mix", path, "mix")
    assert str(raised.value).startswith(path + message), raised.value


def test_a_place_is_that_of_the_statement(file):
    toml = TomlFile("--config", file("a = 1\nb = '''\nx = 2\n'''\nx = 3\n"))
    assert [toml.place(key).rsplit(":", 1)[1] for key in "abx"] == ["1", "4", "5"]
