# SPDX-License-Identifier: Apache-2.0
"""espalier.Engine.sample: against `espalier sample` and Engine.logprobs, and what a loop of reinforcement learning needs of it."""

import json
import threading

import numpy as np
import pytest

import espalier as package
import transformers_reference as reference
from conftest import seed_of
from engines import EXACT, engine_of, init_model
from small_models import MODELS, random_rows

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [5, 6, 7], [5, 6, 7, 12, 13], [14], [5, 6, 7], [15, 16, 17, 18, 19, 20, 21, 22]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, espalier):
    return init_model(espalier, tmp_path_factory.mktemp("qwen3"))


def plain(rows):
    """Rows as what JSON makes of them."""
    return [{name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in row.items()} for row in rows]


def logprobs_of(rows):
    """Of the tokens with loss."""
    return np.concatenate([row["logprobs"][row["loss_mask"] == 1] for row in rows])


def training_logprobs_of(engine, rows):
    return np.concatenate([array[row["loss_mask"] == 1] for row, array in zip(rows, engine.logprobs(rows), strict=True)])


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_the_rows_are_those_of_the_command(espalier, folder, tmp_path, dtype):
    """By the weights after updates, which the command reads from a checkpoint."""
    engine = engine_of(folder, dtype=dtype, learning_rate=0.05)
    first = engine.sample(PROMPTS, samples=2, max_new_tokens=20)
    for _ in range(2):
        engine.forward_backward(random_rows(61, "sft"))
        engine.optim_step()
    engine.save(tmp_path / "saved")
    package.write(tmp_path / "prompts.jsonl", [{"input_ids": ids, "trajectory_id": f"p{ids[-1]}", "group_id": "g" if k else None}
                                               for k, ids in enumerate(PROMPTS)])  # fmt: skip

    def command(*flags):
        espalier("sample", "--model", tmp_path / "saved", "--data", tmp_path / "prompts.jsonl", "--dtype", dtype, "-o",
                 tmp_path / "out.jsonl", *flags)  # fmt: skip
        rows = reference.read_rows(tmp_path / "out.jsonl")
        return [row | {"logprobs": [value or 0.0 for value in row["logprobs"]]} for row in rows]

    prompts = package.read(tmp_path / "prompts.jsonl")
    ours = plain(engine.sample(prompts, seed=0))
    assert ours == command() and ours[1]["trajectory_id"] == "p7/sample-0" and ours[0]["group_id"] == "p11"
    given = {"samples": 3, "max_new_tokens": 12, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": seed_of(62), "batch_size": 5,
             "token_budget": 9}  # fmt: skip
    flags = [text for name, value in given.items() for text in ("--" + name.replace("_", "-"), value)]
    assert plain(engine.sample(prompts, stop_ids=[3, 4], **given)) == command(*flags, "--stop-id", 3, 4)
    assert plain(engine.sample(prompts, stop_ids=[], **given)) == command(*flags, "--ignore-stop-ids")
    # Negative control: the weights before the updates.
    assert plain(first) != plain(engine.sample(PROMPTS, samples=2, max_new_tokens=20, seed=0))


@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "gpt_oss", "gemma2", "mamba2"])
def test_logprobs_are_those_of_the_weights_as_they_are(espalier, tmp_path, kind):
    """Before and after an update, of which nothing that was made ready for sampling may be left."""
    engine = engine_of(init_model(espalier, tmp_path, kind), learning_rate=0.05)
    for _ in range(3):
        rows = engine.sample(PROMPTS, samples=2, max_new_tokens=9, stop_ids=[])
        difference = np.abs(logprobs_of(rows) - training_logprobs_of(engine, rows))
        assert difference.max() <= EXACT * max(1, np.abs(logprobs_of(rows)).max())
        for index, row in enumerate(rows):
            row["reward"] = float(index % 2)
        assert engine.forward_backward(rows, "grpo")["ratio_mean"] == pytest.approx(1, abs=1e-9)
        engine.optim_step()
        # Negative control: by the weights after the update they are others.
        assert np.abs(logprobs_of(rows) - training_logprobs_of(engine, rows)).max() > 1e-3


def test_a_conversation_goes_on_turn_by_turn(folder):
    """A tree of turns: two first turns, each with two second turns after a tool's result."""
    engine = engine_of(folder)
    first = engine.sample([{"input_ids": PROMPTS[0], "trajectory_id": "question"}], samples=2, max_new_tokens=4, stop_ids=[])
    for row in first:
        row["input_ids"] = np.append(row["input_ids"], [30, 31])  # what the tool says
        row["loss_mask"] = np.append(row["loss_mask"], [0, 0])
        row["logprobs"] = np.append(row["logprobs"], [0, 0])
    second = engine.sample(first, samples=2, max_new_tokens=3, stop_ids=[], whole_rows=True)
    assert [row["trajectory_id"] for row in second] == [f"question/sample-{a}/sample-{b}" for a in range(2) for b in range(2)]
    assert {row["group_id"] for row in second} == {"question"}
    for index, row in enumerate(second):
        before = first[index // 2]
        assert row["input_ids"][:13].tolist() == before["input_ids"].tolist() and len(row["input_ids"]) == 16
        assert row["loss_mask"].tolist() == [0] * 7 + [1] * 4 + [0] * 2 + [1] * 3
        assert row["logprobs"][:13].tolist() == before["logprobs"].tolist()
    assert np.abs(logprobs_of(second) - training_logprobs_of(engine, second)).max() <= EXACT * 10
    for index, row in enumerate(second):
        row["reward"] = float(index == 0)
    metrics = engine.forward_backward(second, "grpo")
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-9) and metrics["loss_terms"] == 28
    prefixes = {tuple(row["input_ids"][:size]) for row in second for size in range(1, 17)}
    assert metrics["tree_tokens"] == len(prefixes) <= 7 + 2 * (4 + 2) + 4 * 3
    # Without whole_rows the prompt ends where the first turn begins.
    (row, *_) = engine.sample(first, max_new_tokens=3, stop_ids=[])
    assert row["loss_mask"].tolist() == [0] * 7 + [1] * 3
    # Weights of the loss stay as well, and rows without loss have none on their prompts.
    weighted = [{"input_ids": [1, 2, 3], "loss_weights": [0, 0.5, 0.25], "logprobs": [0, -1, -2]}, {"input_ids": [4, 5]}]
    weighted = engine.sample(weighted, max_new_tokens=1, stop_ids=[], whole_rows=True)
    assert [row["loss_weights"].tolist() for row in weighted] == [[0, 0.5, 0.25, 1], [0, 0, 1]]
    assert weighted[0]["logprobs"][:3].tolist() == [0, -1, -2] and weighted[1]["logprobs"][:2].tolist() == [0, 0]
    with pytest.raises(package.InputError, match="trajectory 0: field `logprobs`: expected log-probabilities of its tokens with loss"):
        engine.sample([{"input_ids": [1, 2], "loss_mask": [0, 1]}], whole_rows=True)


def test_whole_rows_of_the_command(espalier, folder, tmp_path):
    rows = [{"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 0], "logprobs": [0, -1.5, -2.5, 0], "group_id": "g"}]
    package.write(tmp_path / "turns.jsonl", rows)
    espalier("sample", "--model", folder, "--data", tmp_path / "turns.jsonl", "--whole-rows", "--dtype", "float64", "--samples", 2,
             "-o", tmp_path / "out.jsonl", "--max-new-tokens", 3, "--json")  # fmt: skip
    engine = engine_of(folder)
    ours = plain(engine.sample(rows, whole_rows=True, samples=2, max_new_tokens=3))
    theirs = reference.read_rows(tmp_path / "out.jsonl")
    assert [row["logprobs"][1:] for row in ours] == [row["logprobs"][1:] for row in theirs] and len(theirs) == 2
    assert [row["loss_mask"] for row in theirs] == [[0, 1, 1, 0, 1, 1, 1]] * 2 and theirs[0]["logprobs"][1:3] == [-1.5, -2.5]
    # The comparison with the forward pass of training is of what was sampled, not of the turns before.
    done = espalier("sample", "--model", folder, "--data", tmp_path / "turns.jsonl", "--whole-rows", "--dtype", "float64", "-o",
                    tmp_path / "again.jsonl", "--max-new-tokens", 3, "--json")  # fmt: skip
    mismatch = json.loads(done.stdout)["mismatch"]
    assert mismatch["tokens"] == 3 and mismatch["largest"] <= EXACT * 10


def test_equal_calls_sample_the_same(folder):
    engine = engine_of(folder)
    calls = [plain(engine.sample(PROMPTS, max_new_tokens=12)) for _ in range(3)]
    assert calls[0] != calls[1] != calls[2] != calls[0]  # each has its own seed, which is its number
    assert [plain(engine_of(folder).sample(PROMPTS, max_new_tokens=12, seed=k)) for k in range(3)] == calls
    assert plain(engine.sample(package.trajectories(PROMPTS), max_new_tokens=12, seed=1)) == calls[1]
    greedy = plain(engine.sample(PROMPTS, max_new_tokens=12, temperature=0))
    assert [row.pop("temperature") for row in greedy] == [0] * len(greedy)
    assert plain(engine.sample(PROMPTS, max_new_tokens=12, top_k=1)) == [row | {"top_k": 1} for row in greedy]


def test_stop_ids_are_those_of_the_model(espalier, tmp_path):
    model = init_model(espalier, tmp_path)
    without = engine_of(model).sample(PROMPTS, max_new_tokens=60)
    assert {int(row["loss_mask"].sum()) for row in without} == {60}
    (model / "generation_config.json").write_text('{"eos_token_id": [3, 4, 1000]}')
    engine = engine_of(model)
    (model / "generation_config.json").write_text('{"eos_token_id": "end"}')
    ends = engine.sample(PROMPTS, max_new_tokens=60)
    assert plain(ends) == plain(engine.sample(PROMPTS, max_new_tokens=60, stop_ids=np.array([3, 4]), seed=0))
    assert any(row["input_ids"][-1] in (3, 4) for row in ends) and plain(ends) != plain(without)
    broken = engine_of(model)
    with pytest.raises(package.InputError, match="eos_token_id: expected a token id or a list of them"):
        broken.sample(PROMPTS)
    assert len(broken.sample(PROMPTS, stop_ids=[3], max_new_tokens=2)) == len(PROMPTS)


PARAMS = [package.SamplingParams(samples=2, max_new_tokens=9, seed=seed_of(63), stop_ids=[]),
          package.SamplingParams(samples=1, max_new_tokens=14, temperature=0.6, seed=3, stop_ids=list(range(0, 60, 9))),
          package.SamplingParams(samples=3, max_new_tokens=5, top_k=4, seed=4, stop_ids=[]),
          package.SamplingParams(samples=1, max_new_tokens=1, seed=5),
          package.SamplingParams(samples=2, max_new_tokens=12, top_p=0.7, temperature=1.5, seed=4, stop_ids=[2]),
          package.SamplingParams(samples=2, max_new_tokens=7, temperature=0, seed=6, stop_ids=[])]  # fmt: skip


@pytest.mark.parametrize("sizes", [{}, {"batch_size": 3}, {"batch_size": 5, "token_budget": 8}])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
def test_params_of_each_prompt(espalier, tmp_path, kind, sizes):
    """Each prompt has the completions of a call with it alone, whatever else is sampled beside it."""
    engine = engine_of(init_model(espalier, tmp_path, kind))
    rows = engine.sample(PROMPTS, PARAMS, **sizes)
    assert [row["trajectory_id"] for row in rows] == [f"{r}/sample-{k}" for r, given in enumerate(PARAMS) for k in range(given.samples)]
    place = 0
    for prompt, given in zip(PROMPTS, PARAMS, strict=True):
        for alone in engine.sample([prompt], given):
            assert rows[place]["input_ids"].tolist() == alone["input_ids"].tolist()
            assert np.abs(rows[place]["logprobs"] - alone["logprobs"]).max() < EXACT
            place += 1
    lengths = {len(row["input_ids"]) - len(PROMPTS[int(row["group_id"])]) for row in rows}
    assert place == len(rows) and lengths >= {1, 5, 9}
    # Negative control: another prompt's seed.
    other = engine.sample(PROMPTS, [PARAMS[0].replace(seed=7), *PARAMS[1:]], **sizes)
    assert [plain([a]) == plain([b]) for a, b in zip(rows, other, strict=True)] == [False] * 2 + [True] * (len(rows) - 2)


def test_params_of_each_prompt_without_seeds(folder):
    params = [package.SamplingParams(max_new_tokens=8, stop_ids=[])] * 2
    engine, again = engine_of(folder), engine_of(folder)
    first, second = engine.sample([[1, 2, 3]] * 2, params), engine.sample([[1, 2, 3]] * 2, params)
    tokens = [tuple(row["input_ids"].tolist()) for row in first + second]
    assert len(set(tokens)) == 4
    assert plain(first) == plain(again.sample([[1, 2, 3]] * 2, params))
    assert {len(row["input_ids"]) for row in engine.sample([[1, 2, 3]] * 2, params, max_new_tokens=4)} == {7}


@pytest.mark.parametrize("params, options, fault", [
    (PARAMS[:2], {}, "params: expected one for each of 6 prompts, received 2"),
    ([PARAMS[0].replace(batch_size=2), *PARAMS[1:]], {}, "params: expected batch_size as an argument of sample"),
    (PARAMS, {"temperature": -1}, "temperature: expected"),
    ([*PARAMS[:5], PARAMS[5].replace(top_p=2.0)], {}, "top_p: expected"),
    ([*PARAMS[:5], PARAMS[5].replace(stop_ids=[61])], {}, "stop_id: expected ids below the vocabulary size 61"),
    ([*PARAMS[:5], "greedy"], {}, "params: expected SamplingParams, received str"),
])  # fmt: skip
def test_params_that_cannot_be_used(folder, params, options, fault):
    with pytest.raises(package.InputError, match=fault):
        engine_of(folder).sample(PROMPTS, params, **options)


def test_a_watcher_ends_completions(folder):
    """What it sees is what is sampled, and those that go on are as without it."""
    engine = engine_of(folder)
    given = {"samples": 3, "max_new_tokens": 15, "stop_ids": [], "seed": 8, "batch_size": 7}
    whole = engine.sample(PROMPTS, **given)
    seen = {}

    def watch(tokens):
        for row, sample, token in tokens.tolist():
            seen.setdefault(f"{row}/sample-{sample}", []).append(token)
        return tokens[:, 2] % 20 == 0

    ended = engine.sample(PROMPTS, **given, watch=watch)
    cut = 0
    for row, before in zip(ended, whole, strict=True):
        size = int((row["loss_mask"] == 0).sum())
        completion = before["input_ids"][size:].tolist()
        stops = [place for place, token in enumerate(completion) if token % 20 == 0]
        end = size + (stops[0] + 1 if stops else 15)
        cut += end < size + 15
        assert row["input_ids"].tolist() == before["input_ids"][:end].tolist() == [*before["input_ids"][:size], *seen[row["trajectory_id"]]]
        assert np.abs(row["logprobs"] - before["logprobs"][:end]).max() < EXACT
    assert 0 < cut < len(whole)
    assert plain(engine.sample(PROMPTS, **given, watch=lambda tokens: None)) == plain(whole)
    with pytest.raises(package.InputError, match="watch: expected None or a boolean for each of 7 tokens, received 1"):
        engine.sample(PROMPTS, **given, watch=lambda tokens: [True])
    with pytest.raises(ZeroDivisionError):
        engine.sample(PROMPTS, **given, watch=lambda tokens: 1 / 0)
    assert plain(engine.sample(PROMPTS, **given)) == plain(whole)


def test_progress_is_told_of_completions(folder):
    engine = engine_of(folder)
    told = []
    engine.sample(PROMPTS, samples=2, max_new_tokens=5, batch_size=4, progress=lambda *done: told.append(done))
    assert {total for _, total in told} == {12} and [done for done, _ in told] == sorted(done for done, _ in told)

    def stop(done, total):
        if done >= 4:
            raise KeyboardInterrupt

    engine.forward_backward(PROMPTS)
    before = engine.gradients()
    with pytest.raises(KeyboardInterrupt):
        engine.sample(PROMPTS, samples=2, max_new_tokens=5, batch_size=4, progress=stop)
    with pytest.raises(package.InputError, match="expected one call at a time, received one during another"):
        engine.sample(PROMPTS, progress=lambda done, total: engine.logprobs(PROMPTS))
    assert all(np.array_equal(before[name], gradient) for name, gradient in engine.gradients().items())
    expected = plain(engine_of(folder).sample(PROMPTS, max_new_tokens=5, seed=7))
    assert plain(engine.sample(PROMPTS, max_new_tokens=5, seed=7)) == expected


def test_one_engine_samples_while_another_trains(folder):
    """What is made ready for sampling belongs to the thread that samples."""
    rows = random_rows(63, "sft")
    expected = plain(engine_of(folder).sample(PROMPTS, samples=40, max_new_tokens=40, seed=1))
    trained = engine_of(folder)
    expected_loss = trained.forward_backward(rows)["loss"]
    sampler, found, done = engine_of(folder), [], threading.Event()

    def work():
        found.extend(plain(sampler.sample(PROMPTS, samples=40, max_new_tokens=40, seed=1)))
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    losses, rounds = set(), 0
    while not done.is_set() or rounds < 3:
        losses.add(trained.forward_backward(rows)["loss"])
        own = plain(trained.sample(PROMPTS, samples=40, max_new_tokens=40, seed=1))
        assert own == expected
        rounds += 1
    thread.join()
    assert losses == {expected_loss} and found == expected


@pytest.mark.parametrize(("prompts", "options", "fault"), [
    ([], {}, "expected at least one"),
    ([[1, 61]], {}, "row 0: field `input_ids`: expected token ids below 61, the model's vocab_size, received 61"),
    ([[1]], {"temperature": -1}, "temperature.*received -1"),
    ([[1]], {"temperature": float("nan")}, "temperature.*received nan"),
    ([[1]], {"top_p": 1.5}, "top_p.*received 1.5"),
    ([[1]], {"top_p": 0}, "top_p: expected above 0"),
    ([[1]], {"top_k": -2}, "top_k.*received -2"),
    ([[1]], {"samples": 0}, "samples.*received 0"),
    ([[1]], {"max_new_tokens": 0}, "max_new_tokens.*received 0"),
    ([[1]], {"max_new_tokens": 2.5}, "max_new_tokens.*2.5"),
    ([[1]], {"batch_size": 0}, "batch_size.*received 0"),
    ([[1]], {"token_budget": 0}, "token_budget.*received 0"),
    ([[1]], {"seed": -1}, "seed.*-1"),
    ([[1]], {"stop_ids": [61]}, "stop_id: expected ids below the vocabulary size 61, received 61"),
    ([[1]], {"stop_ids": ["end"]}, "stop_ids: expected token ids, received 'end'"),
    ([[1] * 2000], {}, "expected a prompt of fewer than"),
    ([{"input_ids": [1], "loss": 1}], {}, "field `loss`"),
])  # fmt: skip
def test_bad_input_is_one_clear_error(folder, prompts, options, fault):
    assert MODELS["qwen3"]["max_position_embeddings"] <= 2000
    engine = engine_of(folder)
    with pytest.raises(package.InputError, match=fault):
        engine.sample(prompts, **options)
