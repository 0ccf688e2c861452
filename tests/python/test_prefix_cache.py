# SPDX-License-Identifier: Apache-2.0
"""Prefixes that an Engine keeps between calls of sample, and prompts that join while others are sampled, in float64."""

import numpy as np
import pytest

import espalier as package
from conftest import seed_of
from engines import EXACT, engine_of, init_model
from small_models import random_rows

WORDS = 61


@pytest.fixture(scope="module")
def folder(tmp_path_factory, espalier):
    return init_model(espalier, tmp_path_factory.mktemp("qwen3"))


def prompts_of(draw, known):
    """Some that go on from what was sampled, whole or cut, and some that are new."""
    prompts = []
    for _ in range(draw.integers(1, 4)):
        prompt = list(known[draw.integers(len(known))]) if known and draw.random() < 0.8 else []
        if prompt and draw.random() < 0.3:
            prompt = prompt[: draw.integers(1, len(prompt) + 1)]
        prompts.append(prompt + draw.integers(0, WORDS, draw.integers(0 if prompt else 1, 6)).tolist())
    return prompts


def assert_same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert a["input_ids"].tolist() == b["input_ids"].tolist() and a["trajectory_id"] == b["trajectory_id"]
        assert np.abs(a["logprobs"] - b["logprobs"]).max() < EXACT


@pytest.mark.parametrize("kind", ["qwen3", "ministral", "qwen3_5", "mamba2", "granitemoehybrid"])
@pytest.mark.parametrize("size", ["1GiB", "100kB"])
def test_trees_of_conversations(espalier, tmp_path, kind, size):
    """Tokens and log-probabilities are those without a cache; those of rows, and of prompts where they are asked for, are those
    of training."""
    model = init_model(espalier, tmp_path, kind)
    kept, plain = engine_of(model, prefix_cache=size), engine_of(model)
    draw, known = np.random.default_rng(seed_of(71)), []
    for call in range(8):
        prompts = prompts_of(draw, known)
        scored = bool(draw.random() < 0.5)
        options = {"samples": int(draw.integers(1, 4)), "max_new_tokens": int(draw.integers(1, 9)), "stop_ids": [7], "seed": call,
                   "prompt_logprobs": scored, "token_budget": int(draw.choice([6, 1000]))}  # fmt: skip
        rows = kept.sample(prompts, **options)
        assert_same(rows, plain.sample(prompts, **options))
        for row, logprobs in zip(rows, plain.logprobs(rows)):
            assert np.abs(row["logprobs"] - logprobs * (row["loss_mask"] | scored)).max() < EXACT
        known += [row["input_ids"].tolist()[:60] for row in rows]
    ours, theirs = kept.sampling_counts, plain.sampling_counts
    assert ours["prompt_tokens"] == theirs["prompt_tokens"] and ours["sampled_tokens"] == theirs["sampled_tokens"]
    assert ours["kept_prompt_tokens"] > 0 == theirs["kept_prompt_tokens"] == theirs["prefix_cache_bytes"]
    assert 0 < ours["prefix_cache_bytes"] <= (1 << 30 if size == "1GiB" else 100_000)
    if size == "1GiB":
        assert ours["encoded_prompt_tokens"] < theirs["encoded_prompt_tokens"]


def test_a_conversation_encodes_what_is_new(folder):
    engine, tokens = engine_of(folder, prefix_cache="1GiB"), [1, 2, 3]
    for _ in range(4):
        before = engine.sampling_counts["encoded_prompt_tokens"]
        [row] = engine.sample([tokens], max_new_tokens=4, stop_ids=[])
        encoded = engine.sampling_counts["encoded_prompt_tokens"] - before
        assert encoded == (3 if len(tokens) == 3 else 4)  # the last token of the answer, and three new ones
        tokens = [*row["input_ids"].tolist(), 4, 5, 6]


def test_a_conversation_scores_what_is_new(folder):
    """At temperature 1 samples are scored as they are made, so only what is new is encoded: their last token, and what follows."""
    engine, plain, tokens = engine_of(folder, prefix_cache="1GiB"), engine_of(folder), [1, 2, 3]
    for temperature, expected in ((1.0, 3), (1.0, 4), (0.5, 4), (1.0, 7), (1.0, 4)):
        before = engine.sampling_counts["encoded_prompt_tokens"]
        [row] = engine.sample([tokens], max_new_tokens=4, stop_ids=[], prompt_logprobs=True, temperature=temperature)
        assert np.abs((row["logprobs"] - plain.logprobs([row["input_ids"]])[0])[: len(tokens)]).max() < EXACT
        # After temperature 0.5 those of the answer are unknown, so all of it is encoded.
        assert engine.sampling_counts["encoded_prompt_tokens"] - before == expected
        tokens = [*row["input_ids"].tolist(), 4, 5, 6]
    before = engine.sampling_counts["encoded_prompt_tokens"]
    again, unscored = (engine.sample([tokens[:-3]], max_new_tokens=1, prompt_logprobs=each)[0] for each in (True, False))
    assert engine.sampling_counts["encoded_prompt_tokens"] - before == 1
    assert (again["logprobs"][1:-1] < 0).all() and (unscored["logprobs"][:-1] == 0).all()


def changed_by_step(engine, tmp_path):
    engine.forward_backward(random_rows(61, "sft"))
    engine.optim_step(learning_rate=0.05)


def changed_by_load(engine, tmp_path):
    """To weights after a step, from those before it."""
    engine.save(tmp_path / "before")
    changed_by_step(engine, tmp_path)
    engine.sample([[5, 6, 7, 8]], max_new_tokens=6, seed=1)
    engine.load(tmp_path / "before")
    engine.sample([[5, 6, 7, 8]], max_new_tokens=6, seed=1)
    changed_by_step(engine, tmp_path)
    engine.save(tmp_path / "after")
    engine.load(tmp_path / "before")
    engine.sample([[5, 6, 7, 8]], max_new_tokens=6, seed=1)
    engine.load(tmp_path / "after", optimizer=False)


def changed_by_adapter(engine, tmp_path):
    """The base keeps its own; each adapter and each copy has others."""
    adapter = engine.new_adapter(lora_rank=2)
    engine.use(adapter)
    engine.sample([[5, 6, 7, 8]], max_new_tokens=6, seed=1)
    changed_by_step(engine, tmp_path)
    copy = adapter.copy()
    changed_by_step(engine, tmp_path)
    engine.sample([[5, 6, 7, 8]], max_new_tokens=6, seed=1)
    engine.use(copy)


def changed_below_an_adapter(engine, tmp_path):
    """The weights under an adapter are trained."""
    adapter = engine.new_adapter(lora_rank=2)
    engine.use(adapter)
    engine.sample([[5, 6, 7, 8]], max_new_tokens=6, seed=1)
    engine.use(None)
    changed_by_step(engine, tmp_path)
    engine.use(adapter)


@pytest.mark.parametrize("change", [changed_by_step, changed_by_load, changed_by_adapter, changed_below_an_adapter])
def test_other_weights_have_other_prefixes(folder, tmp_path, change):
    kept, plain = engine_of(folder, prefix_cache="1GiB"), engine_of(folder)
    for engine in (kept, plain):
        place = tmp_path / str(engine is kept)
        place.mkdir()
        before = engine.sample([[5, 6, 7, 8]], max_new_tokens=6, seed=1)
        change(engine, place)
        engine.after = engine.sample([[5, 6, 7, 8, 9], [5, 6, 7, 8]], samples=2, max_new_tokens=6, seed=1)
        assert np.abs(engine.after[2]["logprobs"][4:] - before[0]["logprobs"][4:]).max() > 1e-3
    assert_same(kept.after, plain.after)
    counts = kept.sampling_counts["kept_prompt_tokens"]
    assert_same(kept.sample([[5, 6, 7, 8]], seed=2), plain.sample([[5, 6, 7, 8]], seed=2))
    assert kept.sampling_counts["kept_prompt_tokens"] == counts + 4  # the same weights find theirs


def adapters_of(engine, folder):
    """No adapter; one of all maps with the head, and one of a few, both trained; and engines that have each alone."""
    alone, used = [engine_of(engine._path, dtype=engine._options["dtype"])], [None]
    for number, lora in enumerate([{"lora_rank": 2, "lora_targets": ["all-linear", "lm_head"]}, {"lora_rank": 3, "lora_targets": ["o_proj"]}]):
        used.append(engine.new_adapter(**lora, lora_alpha=16, seed=number))
        engine.use(used[-1])
        engine.forward_backward(random_rows(61 + number, "sft"))
        engine.optim_step(learning_rate=0.1)
        engine.save(folder / f"adapter-{number}")
        alone.append(engine_of(engine._path, adapter=folder / f"adapter-{number}", dtype=engine._options["dtype"]))
    return used, alone


@pytest.mark.parametrize("kind, dtype", [*((kind, "float64") for kind in ("qwen3", "qwen3_5", "phi3", "gemma2", "nemotron_h")),
                                         ("qwen3", "float32")])  # fmt: skip
def test_prompts_that_join_are_as_if_alone(espalier, tmp_path, kind, dtype):
    """Of several adapters, side by side. In float32, where products take weights in another form, errors against float64
    are at most twice those of each alone."""
    engine = engine_of(init_model(espalier, tmp_path, kind), prefix_cache="1MiB", adapters=True, dtype=dtype)
    used, alone = adapters_of(engine, tmp_path)
    draw = np.random.default_rng(seed_of(72))
    prompts = [[*([5, 6, 7, 8] if draw.random() < 0.7 else []), *draw.integers(0, WORDS, draw.integers(1, 9)).tolist()]
               for _ in range(10)]  # fmt: skip
    most = 3 if dtype == "float64" else 9  # samples: enough numbers for a ratio
    params = [package.SamplingParams(samples=int(draw.integers(most - 2, most)), max_new_tokens=int(draw.integers(1, 12)), seed=seed,
                                     stop_ids=[7], temperature=float(draw.choice([0.0, 1.0])), prompt_logprobs=bool(seed % 2))
              for seed in range(10)]  # fmt: skip
    weights = np.concatenate([[0, 1, 2], draw.permutation([0, 1, 1, 1, 2, 2, 2])])
    sampling, done, seen, waiting = engine.sampling(batch_size=3 * most), [], set(), list(range(10))
    while waiting or not sampling.is_idle:
        while waiting and (len(waiting) > 7 or draw.random() < 0.4):  # the first three at once
            number = waiting.pop(0)
            engine.use(used[weights[number]])
            assert sampling.add([prompts[number]], [params[number]]) == [number]
        together = set()
        done += sampling.step(lambda tokens: together.update(tokens[:, 0].tolist()))
        seen.add((len(together), len(set(weights[list(together)]))))
        engine.use(used[draw.integers(3)])  # each goes on with its own weights
    assert max(kinds for _, kinds in seen) == 3
    found = {(each.prompt, each.sample): each for each in done}
    ours, theirs, rows = [], [], []
    for number, (prompt, given) in enumerate(zip(prompts, params)):
        for sample, row in enumerate(alone[weights[number]].sample([prompt], given)):
            completion = found.pop((number, sample))
            assert completion.tokens.tolist() == row["input_ids"][len(prompt) :].tolist()
            assert len(completion.prompt_logprobs) == (len(prompt) if given.prompt_logprobs else 0)
            ours.append(np.concatenate([completion.prompt_logprobs, completion.logprobs]))
            theirs.append(row["logprobs"][0 if given.prompt_logprobs else len(prompt) :])
            rows.append((weights[number], row["input_ids"], len(row["input_ids"]) - len(ours[-1])))
            assert completion.is_stopped == (completion.tokens[-1] == 7)
            assert 0 <= completion.kept_tokens <= len(prompt)
    assert not found
    if dtype == "float64":
        assert np.abs(np.concatenate(ours) - np.concatenate(theirs)).max() < EXACT
        return
    in_float64 = [engine_of(engine._path, **({"adapter": tmp_path / f"adapter-{number - 1}"} if number else {})) for number in range(3)]
    exact = np.concatenate([in_float64[number].logprobs([tokens])[0][size:] for number, tokens, size in rows])
    floor = 0.5 * 2.0**-24 * np.linalg.norm(exact)
    assert len(exact) > 250
    assert np.linalg.norm(np.concatenate(ours) - exact) <= 2 * np.linalg.norm(np.concatenate(theirs) - exact) + floor


def test_a_sampling_whose_weights_change(folder, tmp_path):
    engine = engine_of(folder)
    sampling = engine.sampling()
    sampling.add([[5, 6]], [package.SamplingParams(max_new_tokens=9, stop_ids=[])])
    sampling.step()
    engine.forward_backward(random_rows(61, "sft"))
    sampling.step()  # gradients change nothing
    engine.optim_step()
    with pytest.raises(package.InputError, match="expected the weights that it began with, but they were trained or loaded"):
        sampling.step()
    with pytest.raises(package.InputError, match="expected token ids below 61"):
        engine.sampling().add([[61]], [package.SamplingParams()])
    with pytest.raises(package.InputError, match="params: expected one for each of 2 prompts, received 1"):
        engine.sampling().add([[6], [7]], [package.SamplingParams()])
    with pytest.raises(package.InputError, match="batch_size.*received 0"):
        engine.sampling(batch_size=0)


@pytest.mark.parametrize("adapters", [False, True])
def test_weights_made_ready_for_a_sampling_are_not_used_for_others(folder, adapters):
    """In float32, where products take weights in another form, while a sampling goes on."""
    engine = engine_of(folder, dtype="float32", adapters=adapters)
    if adapters:
        engine.use(engine.new_adapter(lora_rank=4))
    goes_on = engine.sampling()
    goes_on.add([[5, 6]], [package.SamplingParams(max_new_tokens=9, stop_ids=[])])
    goes_on.step()
    first = engine.sample([[5, 6, 7]], max_new_tokens=6, stop_ids=[], seed=1)
    for _ in range(3):
        changed_by_step(engine, None)
    rows = engine.sample([[5, 6, 7]], max_new_tokens=6, stop_ids=[], seed=1)
    difference = lambda rows: np.abs(rows[0]["logprobs"] - engine.logprobs(rows)[0])[3:].max()
    assert difference(rows) < 1e-3 < 1e-2 < difference(first)


def test_a_watch_that_fails_ends_a_sampling(folder):
    engine = engine_of(folder, prefix_cache="1MiB")
    sampling = engine.sampling()
    sampling.add([[5, 6], [5, 7]], [package.SamplingParams(seed=1)] * 2)
    with pytest.raises(ZeroDivisionError):
        sampling.step(lambda tokens: 1 / 0)
    assert sampling.is_idle and sampling.step() == []
    assert sampling.add([[5, 6]], [package.SamplingParams(max_new_tokens=3, stop_ids=[], seed=1)]) == [2]
    done = []
    while not sampling.is_idle:
        done += sampling.step()
    [row] = engine_of(folder).sample([[5, 6]], [package.SamplingParams(max_new_tokens=3, stop_ids=[], seed=1)])
    assert done[0].tokens.tolist() == row["input_ids"][2:].tolist()
