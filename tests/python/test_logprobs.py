# SPDX-License-Identifier: Apache-2.0
"""What `espalier logprobs` writes beside log-probabilities."""

import json
import math

import pytest

from engines import init_model
from small_models import random_rows, write_rows

VOCABULARY = 61


@pytest.fixture(scope="module")
def rows():
    return random_rows(3, "sft")


@pytest.fixture(scope="module")
def data(tmp_path_factory, rows):
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", rows)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])  # the latter with a softcap of logits
@pytest.mark.parametrize("temperature", [1, 0.6])
def test_all_of_them_agree_where_top_k_is_the_vocabulary(espalier, data, rows, tmp_path, temperature, kind):
    model, out = init_model(espalier, tmp_path / kind, kind), tmp_path / "out.jsonl"
    command = ["logprobs", "--model", model, "--data", data, "--dtype", "float64", "--temperature", temperature]
    espalier(*command, "--entropies", "--top-k", VOCABULARY, "-o", out)
    espalier(*command, "-o", tmp_path / "plain.jsonl")
    assert len(lines(out)) == len(rows)
    for line, plain, row in zip(lines(out), lines(tmp_path / "plain.jsonl"), rows):
        assert list(line) == ["trajectory_id", "logprobs", "entropies", "topk_ids", "topk_logprobs"]
        assert list(plain) == ["trajectory_id", "logprobs"]
        assert len({len(line[name]) for name in list(line)[1:]} | {len(row["input_ids"])}) == 1
        assert line["logprobs"][0] is None and line["entropies"][0] is None
        assert line["topk_ids"][0] == line["topk_logprobs"][0] == []
        for t in range(1, len(row["input_ids"])):
            ids, values = line["topk_ids"][t], line["topk_logprobs"][t]
            assert sorted(ids) == list(range(VOCABULARY)) and values == sorted(values, reverse=True)
            assert math.isclose(sum(map(math.exp, values)), 1, rel_tol=1e-12)
            assert math.isclose(values[ids.index(row["input_ids"][t])], line["logprobs"][t], rel_tol=1e-11, abs_tol=1e-12)
            assert math.isclose(plain["logprobs"][t], line["logprobs"][t], rel_tol=1e-11, abs_tol=1e-12)
            entropy = -sum(math.exp(value) * value for value in values)
            assert math.isclose(entropy, line["entropies"][t], rel_tol=1e-11, abs_tol=1e-12)


def test_fewer_are_the_first_of_all(espalier, model, data, tmp_path):
    for k in (3, VOCABULARY):
        espalier("logprobs", "--model", model, "--data", data, "--top-k", k, "-o", tmp_path / f"{k}.jsonl", variables={})
    for few, every in zip(lines(tmp_path / "3.jsonl"), lines(tmp_path / f"{VOCABULARY}.jsonl")):
        assert few["topk_ids"] == [ids[:3] for ids in every["topk_ids"]]
        assert few["topk_logprobs"] == [values[:3] for values in every["topk_logprobs"]]
        assert few["logprobs"] == every["logprobs"] and "entropies" not in few


@pytest.mark.parametrize(("k", "status", "words"), [
    (VOCABULARY + 1, 1, f"--top-k {VOCABULARY + 1}: expected at most the model's vocab_size, {VOCABULARY}"),
    (-1, 2, "--top-k"),
    ("many", 2, "--top-k"),
])  # fmt: skip
def test_a_number_that_cannot_be_is_refused(espalier, model, data, tmp_path, k, status, words):
    failed = espalier("logprobs", "--model", model, "--data", data, "--top-k", k, "-o", tmp_path / "out", check=False)
    assert failed.returncode == status and words in failed.stderr and not (tmp_path / "out").exists()


def test_flags_come_from_a_file_too(espalier, model, data, tmp_path):
    """Those of the command line count more; a key that is no flag, a value of another kind and a flag given twice are refused."""
    config = tmp_path / "flags.toml"
    config.write_text(f'model = "{model}"\ndata = ["{data}"]\ntop_k = 3\nentropies = true\nlimit = 2\n')
    espalier("logprobs", "--config", config, "--limit", 1, "-o", tmp_path / "out.jsonl")
    (line,) = lines(tmp_path / "out.jsonl")
    assert len(line["topk_ids"][1]) == 3 and len(line["entropies"]) == len(line["logprobs"])
    refused = {"topk = 3\n": (1, "unknown key `topk`: expected a flag of `espalier logprobs` (see --help); did you mean --top-k?"),
               "top_k = [3]\n": (1, "key `top_k`: expected one value, received a list"),
               'top_k = "many"\n': (2, "--top-k: expected a whole number of at least 0, received many"),
               "top_k = \n": (1, "flags.toml:1: "),
               'entropies = "yes"\n': (1, "expected true or false, received yes"),
               "limit = 1979-05-27\n": (1, "key `limit`: expected text, a number, true, false or a list")}  # fmt: skip
    for text, (status, words) in refused.items():
        config.write_text(text)
        failed = espalier("logprobs", "--config", config, "--model", model, "--data", data, "-o", tmp_path / "none", check=False)
        assert failed.returncode == status and words in failed.stderr, failed.stderr
    twice = espalier("logprobs", "--limit", 1, "--limit", 2, check=False)
    assert twice.returncode == 2 and "--limit was given twice: 1 and 2" in twice.stderr
