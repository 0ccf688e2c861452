# SPDX-License-Identifier: Apache-2.0
"""--profile: the trace of a step and the table of where its time went."""

import json
import re

import pytest

from espalier.printed.profile import profile_text
from small_models import MODELS, random_rows, write_rows


@pytest.fixture(scope="module")
def flags(tmp_path_factory, model):
    data = write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", random_rows(7, "grpo"))
    return ["--model", model, "--data", data, "--token-budget", 20, "--strategy", "partition"]


def events_of(trace):
    return [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"]


def named(events, pattern):
    return [event for event in events if re.fullmatch(pattern, event["name"])]


def inside(event, outer):
    # Kineto writes microseconds to three decimals.
    return (outer["ts"] - 0.002 <= event["ts"]
            and event["ts"] + event["dur"] <= outer["ts"] + outer["dur"] + 0.002)  # fmt: skip


def table_of(text):
    """Of each kind of work: seconds, share and, where FLOPs are known, GFLOP/s and the fraction of the product's."""
    line = r"^(\S[\w ]*(?:, [\w ]+)?) +(\d+\.\d+) +(\d\.\d+)(?: +([\d.e+-]+) +(\d+\.\d+))?$"
    return {name.strip(): tuple(float(x) for x in rest if x)
            for name, *rest in re.findall(line, text, flags=re.MULTILINE)}  # fmt: skip


def check_trace(events):
    (step,) = named(events, "step")
    assert named(events, "plan") and named(events, "batch")
    forwards = named(events, r"micro-batch \d+ forward")
    backwards = named(events, r"micro-batch \d+ backward")
    layers = named(events, r"layer \d+")
    assert len(forwards) == len(backwards) > 1
    num_layers = MODELS["qwen3"]["num_hidden_layers"]
    assert len(layers) == num_layers * len(forwards)
    for event in [*forwards, *backwards, *named(events, "optimizer")]:
        assert inside(event, step)
    for forward in forwards:
        mine = [event for event in layers if inside(event, forward)]
        assert {event["name"] for event in mine} == {f"layer {i}" for i in range(num_layers)}
        for part in ["attention", "mlp"]:
            assert all(any(inside(event, layer) for event in named(events, part)) for layer in mine), part
    attentions = named(events, "espalier::tree_attention")
    assert all(any(inside(op, layer) for op in attentions) for layer in layers)
    attentions = named(events, "espalier::tree_attention_backward")
    assert len(attentions) == len(layers)
    assert all(any(inside(op, backward) for backward in backwards) for op in attentions)
    heads = named(events, "espalier::edge_logprobs")
    assert heads and all(any(inside(op, head) for head in named(events, "head")) for op in heads)
    assert named(events, r"espalier::edge_logprobs_backward_?")


def check_table(text, kinds):
    table = table_of(text)
    seconds = float(re.search(r"It took (\d+\.\d+) s", text)[1])
    assert sum(row[1] for row in table.values()) == pytest.approx(1, abs=0.5e-4 * len(table))
    assert sum(row[0] for row in table.values()) == pytest.approx(seconds, abs=1e-4)
    assert kinds <= set(table), table
    counted = {name for name, row in table.items() if len(row) == 4}
    assert counted == {"linear, forward", "linear, gradient of input", "linear, gradient of weight",
                       "attention, forward", "attention, backward", "head, forward", "head, backward"}  # fmt: skip
    return table


KINDS = {f"{work}, {part}" for work in ["attention", "head", "norm", "rotary", "SwiGLU", "embedding"]
         for part in ["forward", "backward"]} | {
             "linear, forward", "linear, gradient of input", "linear, gradient of weight", "residual, forward",
             "residual, backward", "batch", "objective"}  # fmt: skip


def test_training_profiles_its_second_step(espalier, flags, tmp_path):
    done = espalier("train", *flags, "--out", tmp_path / "run", "--steps", 3, "--profile", tmp_path / "trace.json")
    events = events_of(tmp_path / "trace.json")
    check_trace(events)
    assert named(events, "optimizer")
    check_table(done.stderr, KINDS | {"plan", "optimizer"})
    log = done.stderr.splitlines()
    first_line = next(i for i, line in enumerate(log) if line.startswith("profile of a step"))
    assert sum("step 1/3" in line for line in log[:first_line]) == 1
    assert not any("step 2/3  loss" in line for line in log[:first_line])


def test_the_profile_changes_nothing(espalier, flags, tmp_path):
    for name, more in {"plain": [], "profiled": ["--profile", tmp_path / "trace.json"]}.items():
        espalier("train", *flags, "--out", tmp_path / name, "--steps", 2, "--learning-rate", 1e-3, *more)
    weights = [(tmp_path / f"{name}/checkpoints/step_2/model.safetensors").read_bytes()
               for name in ["plain", "profiled"]]  # fmt: skip
    assert weights[0] == weights[1]


@pytest.mark.parametrize("checkpoint", ["layer", "piece"])
def test_what_is_computed_again_counts_as_forward(espalier, model, flags, tmp_path, checkpoint):
    def profile(how):
        trace = tmp_path / f"{how}.json"
        done = espalier("train", *flags, "--out", tmp_path / how, "--steps", 1, "--checkpoint-activations", how,
                        "--profile", trace)  # fmt: skip
        return check_table(done.stderr, KINDS), events_of(trace)

    table, events = profile(checkpoint)
    _, plain_events = profile("none")
    for op in ["espalier::tree_attention", r"layer \d+"]:
        assert len(named(events, op)) > len(named(plain_events, op))
    (metrics,) = map(json.loads, (tmp_path / checkpoint / "metrics.jsonl").read_text().splitlines())
    flops = {name: row[0] * row[2] * 1e9 for name, row in table.items() if len(row) == 4}
    config = json.loads((model / "config.json").read_text())
    logit_rows = flops["head, forward"] / (2 * config["hidden_size"] * config["vocab_size"])
    once = layer_tokens(config, metrics["encoded_tokens"], logit_rows)
    # A piece that is only to make its context has no rows at the head.
    again = layer_tokens(config, metrics["recomputed_tokens"], logit_rows if checkpoint == "layer" else 0)
    expected = (once + again) / once
    assert flops["linear, forward"] / flops["linear, gradient of input"] == pytest.approx(expected, rel=0.02)


def layer_tokens(config, tokens, logit_rows):
    """Tokens times layers, less what the last layer leaves out after its attention."""
    attention = config["head_dim"] * (config["num_attention_heads"] + 2 * config["num_key_value_heads"])
    after_attention = config["head_dim"] * config["num_attention_heads"] + 3 * config["intermediate_size"]
    return config["num_hidden_layers"] * tokens - after_attention / (attention + after_attention) * (tokens - logit_rows)


def test_a_benchmark_profiles_its_first_side(espalier, model, tmp_path):
    trace = tmp_path / "trace.json"
    done = espalier("bench", "--model", model, "--ratios", "2,4", "--tree-tokens", 100, "--repeats", 1, "--profile",
                    trace, "--json")  # fmt: skip
    assert len(json.loads(done.stdout)["rows"]) == 2
    events = events_of(trace)
    assert len(named(events, "step")) == 1 and not named(events, "optimizer")
    check_table(done.stderr, KINDS)
    assert "ERROR" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


@pytest.mark.parametrize("command", ["train", "bench"])
def test_a_missing_folder_is_told_before_the_run(espalier, model, flags, tmp_path, command):
    more = [*flags, "--out", tmp_path / "run"] if command == "train" else ["--model", model]
    done = espalier(command, *more, "--profile", tmp_path / "none/trace.json", check=False)
    assert done.returncode == 1
    assert str(tmp_path / "none/trace.json") in done.stderr and "No such file" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "run").exists()


def test_a_failing_run_leaves_the_old_trace(espalier, flags, tmp_path):
    trace = tmp_path / "trace.json"
    trace.write_text("old")
    done = espalier("train", *flags, "--out", tmp_path / "run", "--steps", 2, "--profile", trace, "--profile-step", 3,
                    check=False)  # fmt: skip
    assert done.returncode == 1 and "profile-step: expected one of the steps 1 to 2" in done.stderr
    assert trace.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_time_of_a_gpu_counts_where_it_was_launched(tmp_path):
    """A kernel runs later than the operator that launched it, on another line of the trace."""

    def event(name, begin, end, category="cpu_op", thread=1, launch=None):
        return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": end - begin, "tid": thread,
                "args": {} if launch is None else {"External id": launch}}  # fmt: skip

    events = [event("step", 0, 1000, "user_annotation", launch=1), event("layer 0", 10, 200, "user_annotation", launch=2),
              event("espalier::linear", 20, 60, launch=3), event("aten::mm", 30, 50, launch=4),
              event("espalier::rms_norm", 60, 80, launch=5), event("aten::add", 90, 100, launch=6),
              event("autograd::engine::evaluate_function: LinearBackward", 300, 400, thread=2, launch=7),
              event("LinearBackward", 310, 390, thread=2, launch=8),
              event("gradient of weight", 350, 390, "user_annotation", thread=2, launch=9),
              event("gemm", 100.5, 300.5, "kernel", 7, launch=4), event("norm", 300.5, 350.5, "kernel", 7, launch=5),
              event("add", 350.5, 375.5, "kernel", 7, launch=6), event("wgrad", 500, 625.25, "kernel", 7, launch=9),
              event("copy", 700, 710, "gpu_memcpy", 7, launch=99), event("late", 990, 1010, "kernel", 7, launch=4),
              event("step", 0, 1000, "gpu_user_annotation", 7, launch=1)]  # fmt: skip
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": events}))
    text = profile_text(str(trace), on_gpu=True, flops_per_second=1e12, flops={"linear, forward": 1e8})
    assert {name: row[0] for name, row in table_of(text).items()} == {
        "linear, forward": 0.0002, "norm, forward": 0.00005, "residual, forward": 0.000025,
        "linear, gradient of weight": pytest.approx(0.000125, abs=1e-6), "other": 0.00001, "idle": pytest.approx(0.00059, abs=1e-6)}  # fmt: skip
    assert table_of(text)["linear, forward"][2:] == (500, 0.5)
