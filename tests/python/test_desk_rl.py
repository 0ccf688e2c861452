# SPDX-License-Identifier: Apache-2.0
"""examples/desk_rl: the environment, the loop that learns, and the picture of its curve."""

import importlib
import json
import os
import random
import re
import subprocess
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
from safetensors.numpy import load_file

from conftest import REPOSITORY, seed_of
from rank_processes import ENVIRONMENT

TINY = ["--iterations", "2", "--sft-steps", "2", "--sft-batch", "4", "--hidden-size", "16", "--layers", "1", "--questions", "2",
        "--branches", "2", "2", "--eval-questions", "3", "--eval-every", "1", "--dtype", "float64", "--seed", str(seed_of(3))]  # fmt: skip


@pytest.fixture(scope="module")
def programs():
    """The modules of the example, by name."""
    folder = str(REPOSITORY / "examples/desk_rl")
    sys.path.insert(0, folder)
    try:
        yield {name: importlib.import_module(name) for name in ("desk", "train", "curve")}
    finally:
        sys.path.remove(folder)
        for name in ("desk", "train", "curve"):
            sys.modules.pop(name, None)


def test_the_desk(programs):
    desk = programs["desk"]
    question = desk.Question("q", (3, 2), ("pen", "cup"), dict.fromkeys(desk.ITEMS, 4) | {"pen": 5})
    assert question.total == 23 and desk.words_of(desk.ids_of(question.prompt())) == question.prompt()
    assert question.prompt()[-7:] == ["3", "pen", "and", "2", "cup", "?", "<turn>"]
    assert question.reply("look pen <end>".split()) == (["result", "5", "<turn>"], None)
    assert question.reply("times 3 5 <end>".split()) == (["result", "15", "<turn>"], None)
    assert question.reply("plus 15 8 <end>".split()) == (["result", "23", "<turn>"], None)
    assert question.reply("answer 23 <end>".split()) == (None, 1.0)
    for wrong in ("answer 22 <end>", "answer pen <end>", "look 3 <end>", "look pen", "times 3 pen <end>", "times 50 50 <end>",
                  "plus 3 <end>", "answer 23 23 <end>", "pen <end>", ""):  # fmt: skip
        assert question.reply(wrong.split()) == (None, 0.0)


def test_the_teacher_is_right_but_for_mistakes(programs):
    desk, rng = programs["desk"], random.Random(seed_of(1))
    for number in range(50):
        question = desk.make_question(f"q{number}", seed_of(2))
        talk = desk.teach(question, 0.0, rng)
        assert question.reply(talk[-1][0]) == (None, 1.0) and sum(is_teacher for _, is_teacher in talk) == 6
        assert all(word in desk.IDS for words, _ in talk for word in words)
        spoiled = desk.teach(question, 1.0, rng)
        assert spoiled != talk and len(spoiled) <= len(talk) and all(word in desk.IDS for words, _ in spoiled for word in words)


class Player:
    """Stands for an engine: makes the right calls, but for the second of several samples of a turn, which is `answer 1`."""

    def __init__(self, desk, questions):
        self._desk = desk
        self._talks = {question.name: desk.teach(question, 0.0, random.Random(0)) for question in questions}
        self.asked = []  # samples, prompts, seed of each call

    def sample(self, prompts, *, samples, max_new_tokens, seed, batch_size, whole_rows):
        assert whole_rows == bool(self.asked)
        self.asked.append((samples, len(prompts), seed))
        rows = []
        for prompt in prompts:
            ids = list(prompt["input_ids"])
            turn = ids.count(self._desk.IDS[self._desk.TURN])
            right = self._talks[prompt["group_id"]][2 * turn - 1][0]
            for sample in range(samples):
                call = self._desk.ids_of(["answer", "1", "<end>"] if sample == 1 else right)
                assert len(call) <= max_new_tokens
                row = {name: prompt.get(name, [0] * len(ids)) for name in ("loss_mask", "logprobs")}
                rows.append({"input_ids": np.array(ids + call), "loss_mask": np.array([*row["loss_mask"], *[1] * len(call)]),
                             "logprobs": np.array([*row["logprobs"], *[-1.0] * len(call)]), "group_id": prompt["group_id"]})
        return rows


def test_rollouts_branch_at_turns(programs):
    desk, train = programs["desk"], programs["train"]
    questions = [desk.make_question(f"q{number}", seed_of(4)) for number in range(3)]
    player = Player(desk, questions)
    rows = train.roll_out(player, questions, [2, 3, 1, 2], seed=5)
    # Each turn goes on from what did not end: 3 questions, 3 * (2 - 1), 3 * (3 - 1), 6 * 1, 6 * (2 - 1) conversations.
    assert [(samples, prompts) for samples, prompts, _ in player.asked] == [(2, 3), (3, 3), (1, 6), (2, 6), (1, 6), (1, 6)]
    assert len({seed for *_, seed in player.asked}) == 6
    # Those who ended early count as often as the branches that they would have had: 3 * 6, 3 * 2, 0, 6 * 1 rows.
    assert sorted(row["reward"] for row in rows) == [0.0] * 30 + [1.0] * 6 and len(rows) == 3 * 2 * 3 * 1 * 2
    for row in rows:
        words, question = desk.words_of(row["input_ids"]), next(each for each in questions if each.name == row["group_id"])
        assert len(words) == len(row["loss_mask"]) == len(row["logprobs"])
        assert [value == -1 for value in row["logprobs"]] == [loss == 1 for loss in row["loss_mask"]]
        begin = len(question.prompt())
        assert words[:begin] == question.prompt() and not any(row["loss_mask"][:begin])
        said = " ".join(word if loss else f"({word})" for word, loss in zip(words[begin:], row["loss_mask"][begin:]))
        first = question.items[0]
        ends = "answer 1 <end>" if row["reward"] == 0 else f"answer {question.total} <end>"
        assert said.endswith(ends) and said.startswith((f"look {first} <end> (result) ({question.prices[first]}) (<turn>)", ends))


def test_a_talk_without_an_end_has_no_reward(programs):
    desk, train = programs["desk"], programs["train"]
    question = desk.make_question("q", seed_of(5))

    class Looking(Player):
        def sample(self, prompts, **options):
            self._talks["q"] = [(["look", "pen", "<end>"], True)] * 20
            return super().sample(prompts, **options)

    player = Looking(desk, [question])
    (row,) = train.roll_out(player, [question], [1], seed=0)
    assert len(player.asked) == desk.MAX_TURNS and row["reward"] == 0


@pytest.fixture
def generous(programs, monkeypatch):
    """Rewards that a model without any training gets at times, so that there is something to learn from."""
    desk = programs["desk"]
    strict = desk.Question.reply

    def reply(question, call):
        result, reward = strict(question, call)
        return result, (sum(desk.ids_of(call)) % 3 / 2 if reward == 0 else reward)

    monkeypatch.setattr(desk.Question, "reply", reply)


def test_it_runs_and_the_same_seed_learns_the_same(programs, generous, tmp_path, capsys):
    """In float64 trees and packing sample the same to the last token, too, since rounding is far below what decides a token."""
    train = programs["train"]
    runs = []
    for name in ("first", "second"):
        curves = train.main([*TINY, "--out", str(tmp_path / f"{name}.jsonl"), "--save", str(tmp_path / name)])
        runs.append([[{key: value for key, value in point.items() if "seconds" not in key} for point in curve] for curve in curves])
        printed = capsys.readouterr().out
        assert re.search(r"^tree-packing trains [\d.]+ times as fast as sequence-packing$", printed, re.MULTILINE)
        assert "the curves are equal" in printed and "iteration 2, success" in printed
    assert runs[0] == runs[1]
    trees, packing = runs[0]
    assert [point["iteration"] for point in trees] == [0, 1, 2]
    assert [point["reward"] for point in trees] == [point["reward"] for point in packing]
    assert len({point["reward"] for point in trees}) > 1
    assert trees[-1]["encoded_tokens"] < packing[-1]["encoded_tokens"] == packing[-1]["flat_tokens"] == trees[-1]["flat_tokens"]
    assert len((tmp_path / "first.jsonl").read_text().splitlines()) == 6
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second")]
    assert weights[0] == weights[1]
    other = train.main([*TINY[:-1], str(seed_of(4)), "--strategy", "tree-packing", "--save", str(tmp_path / "other")])  # negative control
    assert len(other) == 1 and (tmp_path / "other/model.safetensors").read_bytes() != weights[0]


PROGRAM = """
import sys

sys.path.insert(0, sys.argv[1])
import desk
import train

strict = desk.Question.reply
desk.Question.reply = lambda question, call: (
    lambda result, reward: (result, sum(desk.ids_of(call)) % 3 / 2 if reward == 0 else reward))(*strict(question, call))
train.main(sys.argv[2:])
"""


def test_processes_learn_what_one_learns(programs, generous, tmp_path):
    train = programs["train"]
    flags = [*TINY, "--strategy", "tree-packing"]
    (one,) = train.main([*flags, "--save", str(tmp_path / "one")])
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", tmp_path / "program.py",
         REPOSITORY / "examples/desk_rl", *flags, "--out", tmp_path / "two.jsonl", "--save", tmp_path / "two"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "python"), **ENVIRONMENT}, capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("iteration 2, success") == 1  # one of them tells of it
    two = [json.loads(line) for line in (tmp_path / "two.jsonl").read_text().splitlines()]
    assert len({point["reward"] for point in one}) > 1 and one[-1]["flat_tokens"] > 0
    for mine, its in zip(two, one, strict=True):
        for name in ("iteration", "success", "reward", "flat_tokens"):
            assert mine[name] == its[name], name
    ours, theirs = ({key: value for file in (tmp_path / name).glob("model*.safetensors") for key, value in load_file(file).items()}
                    for name in ("two", "one"))  # fmt: skip
    assert ours.keys() == theirs.keys()
    assert max(np.abs(ours[name] - value).max() for name, value in theirs.items()) < 1e-10


def test_the_picture(programs, tmp_path, capsys):
    points = [{"strategy": strategy, "seed": seed, "iteration": 10 * k, "success": 0.2 + 0.1 * seed + 0.2 * k,
               "training_seconds": 3.0 * k * (1 + 4 * (strategy != "tree-packing"))}
              for strategy in ("tree-packing", "sequence-packing") for k in range(3) for seed in (0,)]  # fmt: skip
    files = []
    for seed in range(3):
        files.append(tmp_path / f"{seed}.jsonl")
        rows = [{**point, "seed": seed, "success": point["success"] + 0.1 * seed} for point in points]
        files[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    programs["curve"].main([*map(str, files), "-o", str(tmp_path / "curve.svg")])
    printed = capsys.readouterr().out
    assert re.search(r"tree-packing +3 +0.300 \(0.200 to 0.400\) +0.700 \(0.600 to 0.800\) +6.0 \(6.0 to 6.0\)", printed)
    assert re.search(r"sequence-packing +3 .* 30.0 \(30.0 to 30.0\)", printed)
    root = ElementTree.parse(tmp_path / "curve.svg").getroot()
    lines = [each for each in root.iter() if each.tag.endswith("polyline")]
    assert len(lines) == 4 and all(len(line.get("points").split()) == 3 for line in lines)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(SystemExit, match="received no points"):
        programs["curve"].main([str(tmp_path / "empty.jsonl")])


@pytest.mark.parametrize(("flags", "words"), [
    (["--questions", "0"], "--questions: expected 1 or more, received 0"),
    (["--branches", "2", "0"], "--branches"),
    (["--mistakes", "2"], "--mistakes"),
    (["--hidden-size", "10"], "--hidden-size"),
])  # fmt: skip
def test_bad_flags_are_one_clear_error(programs, capsys, flags, words):
    with pytest.raises(SystemExit):
        programs["train"].main(flags)
    assert words in capsys.readouterr().err
