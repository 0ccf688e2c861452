# SPDX-License-Identifier: Apache-2.0
"""What a user of bin/espalier sees: runs, files, errors."""

import json
import re
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from conftest import REPOSITORY, seed_of
from small_models import MODELS, random_rows, write_rows


@pytest.fixture
def data(tmp_path):
    return write_rows(tmp_path / "rows.jsonl", random_rows(7, "grpo"))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def weights(run, step):
    return load_file(run / f"checkpoints/step_{step}/model.safetensors")


def test_every_command_explains_itself(espalier):
    overview = espalier("--help").stdout
    for command in ["prepare", "import", "inspect", "plan", "export", "train", "rerun", "launch", "serve", "logprobs", "merge", "sample", "verify", "bench", "device", "synth", "init",
                    "completion", "man"]:  # fmt: skip
        assert re.search(rf"^  {command} +[A-Z]", overview, re.MULTILINE), command
        text = espalier(command, "--help").stdout
        assert "--" in text, command
        # What a person reads: no types of the parser, no lines beyond the width but commands to copy.
        assert not re.search(r"\bTEXT\b|\bINT\b|\bFLOAT\b|\bOPTIONS\b|REQUIRED|:\{", text), command
        wide = [line for line in text.splitlines() if len(line) > 100 and not line.startswith("  ")]
        assert not wide, wide
    groups = re.findall(r"^(\S.*):$", espalier("train", "--help").stdout, re.MULTILINE)
    assert groups[:2] == ["Model and data", "Run"] and len(groups) == len(set(groups))


def test_version_says_what_the_program_was_built_from(espalier):
    import torch

    first, *rest = espalier("--version").stdout.splitlines()
    project = re.search(r"project\(espalier VERSION (\S+)", (REPOSITORY / "CMakeLists.txt").read_text())
    assert first == f"espalier {project[1]}"
    items = dict(line.split(": ") for line in rest)
    assert list(items) == ["commit", "compiler", "build type", "LibTorch", "CUDA", "instruction set"]
    assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?|unknown", items["commit"])
    assert re.fullmatch(r"(GNU|Clang|AppleClang) [\d.]+", items["compiler"])
    assert items["build type"] == "Release"
    assert torch.__version__.startswith(items["LibTorch"])
    assert re.fullmatch(r"built with [\d.]+|built without", items["CUDA"])
    default = espalier("--version", variables={"ESPALIER_CPU": "default"}).stdout
    assert default.endswith("instruction set: default\n")
    unknown = espalier("--version", variables={"ESPALIER_CPU": "sse9"}, check=False)
    assert unknown.returncode == 1 and "received `sse9`" in unknown.stderr


def write_commit(source, output):
    """What cmake/WriteCommit.cmake finds out about a folder."""
    script = REPOSITORY / "cmake/WriteCommit.cmake"
    subprocess.run(["cmake", f"-DSOURCE={source}", f"-DOUTPUT={output}", "-P", script], check=True)
    return re.search(r'kCommit = "(.*)"', output.read_text())[1]


def test_the_commit_is_that_of_the_tree_and_its_source_changes_only_with_it(tmp_path):
    tree, output = tmp_path / "tree", tmp_path / "commit.cpp"
    tree.mkdir()
    assert write_commit(tree, output) == "unknown"

    def git(*arguments):
        identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org", "-c", "init.defaultBranch=main"]
        return subprocess.run(["git", *identity, *arguments], cwd=tree, check=True, capture_output=True, text=True).stdout

    git("init")
    (tree / "file").write_text("one")
    git("add", "file")
    git("commit", "--message", "one")
    git("tag", "v1")
    commit = git("rev-parse", "HEAD")[:12]
    assert write_commit(tree, output) == commit
    written = output.stat().st_mtime_ns
    (tree / "file").touch()
    (tree / "untracked").write_text("of no interest")
    assert write_commit(tree, output) == commit
    assert output.stat().st_mtime_ns == written
    (tree / "file").write_text("two")
    assert write_commit(tree, output) == commit + "-dirty"
    # Sources that lie inside some other repository are not that repository's.
    (tree / "inside").mkdir()
    assert write_commit(tree / "inside", output) == "unknown"


def test_a_run_leaves_metrics_events_config_and_a_checkpoint(espalier, model, data, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    espalier("train", "--model", model, "--data", data, "--out", tmp_path / "run", "--steps", 3)
    metrics = lines(tmp_path / "run/metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert {"loss", "grad_norm", "learning_rate", "tree_tokens_per_second", "flat_tokens_per_second"} <= set(metrics[0])
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3]
    assert events.Scalars("train/loss")[2].value == pytest.approx(metrics[2]["loss"], rel=1e-6)
    assert "steps = 3" in (tmp_path / "run/config.toml").read_text()
    assert (tmp_path / "run/checkpoints/step_3/config.json").exists()


def test_resume_continues_bit_for_bit(espalier, model, data, tmp_path):
    flags = ["--model", model, "--data", data, "--objective", "grpo", "--batch-size", 4, "--shuffle", "rows",
             "--seed", seed_of(9), "--learning-rate", 1e-3, "--dtype", "bfloat16", "--token-budget", 30]  # fmt: skip
    espalier("train", *flags, "--out", tmp_path / "whole", "--steps", 6)
    espalier("train", *flags, "--out", tmp_path / "parts", "--steps", 4, "--save-every", 2)
    espalier("train", *flags, "--out", tmp_path / "parts", "--steps", 6, "--resume")
    whole, parts = weights(tmp_path / "whole", 6), weights(tmp_path / "parts", 6)
    assert all(whole[name].equal(parts[name]) for name in whole)
    losses = lambda run: [line["loss"] for line in lines(tmp_path / run / "metrics.jsonl")]
    assert losses("whole") == losses("parts") and len(losses("whole")) == 6
    # Control: another seed gives other weights.
    other_seed = [seed_of(10) if each == seed_of(9) else each for each in flags]
    espalier("train", *other_seed, "--out", tmp_path / "other", "--steps", 6)
    other = weights(tmp_path / "other", 6)
    assert not all(whole[name].equal(other[name]) for name in whole)


def plant_calibrations(cache, factors):
    """Makes every kept calibration absurd, each kind of work by another factor."""
    kept = list((cache / "espalier").glob("calibration-*.json"))
    for file in kept:
        calibration = json.loads(file.read_text())
        scaled = [(seconds + 1e-6) * factor for seconds, factor in zip(calibration["seconds"], factors)]
        file.write_text(json.dumps({**calibration, "seconds": scaled}))
    return kept


def test_training_does_not_depend_on_what_was_measured(espalier, model, tmp_path):
    """Bitwise identical with any calibration, with none, and with one that changes before a run is resumed."""
    data = tmp_path / "rows.jsonl"
    espalier("synth", "-o", data, "--trees", 2, "--depth", 3, "--branching", 3, "--node-length", 9, "--vocab-size", 61,
             "--loss-rate", 0.5)  # fmt: skip
    common = ["--model", model, "--data", data, "--memory-budget", "700kB"]
    train = lambda out, cache, *more: espalier("train", *common, "--learning-rate", 1e-2, "--out", tmp_path / out, *more,
                                               cache=tmp_path / cache)  # fmt: skip
    train("measured", "a", "--steps", 3)
    # Rates by which tokens cost everything and micro-batches nothing, and the reverse. A planner that went by them would
    # choose different plans, or this test would show nothing.
    absurd = {"slow_tokens": (0, 0, 1e9, 1e9, 0, 1e9), "slow_batches": (1e9, 1e9, 0, 0, 1e9, 0)}
    plans = set()
    for name, factors in absurd.items():
        kept = json.loads((tmp_path / "measured/cost_model.json").read_text())
        rates = dict(zip(kept["seconds_per"], factors))
        (tmp_path / f"{name}.json").write_text(json.dumps({**kept, "seconds_per": rates}))
        plan = espalier("plan", *common, "--cost-model", tmp_path / f"{name}.json", "--json", "--no-calibration").stdout
        plans.add(len(json.loads(plan)["micro_batches"]))
    assert len(plans) == 2

    def plant(factors):
        # A run forgets a calibration that does not hold, as on a machine that was busy meanwhile. `plan` measures again.
        espalier("plan", *common, cache=tmp_path / "a")
        assert plant_calibrations(tmp_path / "a", factors)

    for name, factors in absurd.items():
        plant(factors)
        train(name, "a", "--steps", 3)
        plant(factors)
        train(f"{name}_parts", "b", "--steps", 1)
        train(f"{name}_parts", "a", "--steps", 3, "--resume")
    train("uncalibrated", "c", "--steps", 3, "--no-calibration")
    assert not (tmp_path / "c").exists()
    expected = weights(tmp_path / "measured", 3)
    for name in ("slow_tokens", "slow_tokens_parts", "slow_batches", "slow_batches_parts", "uncalibrated"):
        found = weights(tmp_path / name, 3)
        assert all(expected[each].equal(found[each]) for each in expected), name


def test_a_run_plans_by_the_cost_model_it_is_given_and_keeps(espalier, model, data, tmp_path):
    flags = ["--model", model, "--data", data, "--batch-size", 4, "--memory-budget", "1200kB"]
    espalier("plan", "--model", model, "--data", data, "--save-cost-model", tmp_path / "measured.json")
    measured = json.loads((tmp_path / "measured.json").read_text())
    assert measured["origin"] == "measured"
    espalier("train", *flags, "--out", tmp_path / "run", "--steps", 1, "--cost-model", tmp_path / "measured.json")
    kept = tmp_path / "run/cost_model.json"
    rates_in = lambda file: {name: value for name, value in json.loads(file.read_text()).items() if name != "matrix_products"}
    assert rates_in(kept) == measured
    # Resuming reads what the run has kept, whatever became of the file since.
    changed = {**measured, "seconds_per": dict.fromkeys(measured["seconds_per"], 1.0)}
    (tmp_path / "measured.json").write_text(json.dumps(changed))
    espalier("train", *flags, "--out", tmp_path / "run", "--steps", 2, "--resume", "--cost-model",
             tmp_path / "measured.json")  # fmt: skip
    assert rates_in(kept) == measured
    kept.write_text(json.dumps({**measured, "origin": "guessed"}))
    failed = espalier("train", *flags, "--out", tmp_path / "run", "--steps", 3, "--resume", "--cost-model",
                      tmp_path / "measured.json", check=False)  # fmt: skip
    assert failed.returncode == 1 and f"{kept}: origin: expected" in failed.stderr
    espalier("train", *flags, "--out", tmp_path / "built_in", "--steps", 1)
    assert json.loads((tmp_path / "built_in/cost_model.json").read_text())["origin"] == "built-in"


def test_a_resumed_run_multiplies_as_it_began(espalier, model, data, tmp_path):
    flags = ["--model", model, "--data", data, "--learning-rate", 1e-2, "--dtype", "bfloat16"]
    products = {"ESPALIER_FLOAT32_PRODUCTS": "library", "ESPALIER_BF16_PRODUCTS": "library"}
    # Whatever this machine would take, it is not what the run begins with.
    others = {"ESPALIER_FLOAT32_PRODUCTS": "panels", "ESPALIER_BF16_PRODUCTS": "upcast"}
    espalier("train", *flags, "--out", tmp_path / "whole", "--steps", 3, variables=products)
    espalier("train", *flags, "--out", tmp_path / "others", "--steps", 3, variables=others)
    espalier("train", *flags, "--out", tmp_path / "parts", "--steps", 1, variables=products)
    kept = json.loads((tmp_path / "parts/cost_model.json").read_text())
    assert kept["matrix_products"] == "float32=library,bfloat16=library"
    espalier("train", *flags, "--out", tmp_path / "parts", "--steps", 3, "--resume")
    whole, parts, other = (weights(tmp_path / run, 3) for run in ("whole", "parts", "others"))
    assert all(whole[name].equal(parts[name]) for name in whole)
    assert not all(whole[name].equal(other[name]) for name in whole)  # else this test would show nothing
    kept["matrix_products"] = "float32=fast"
    (tmp_path / "parts/cost_model.json").write_text(json.dumps(kept))
    failed = espalier("train", *flags, "--out", tmp_path / "parts", "--steps", 4, "--resume", check=False)
    assert failed.returncode == 1 and "cost_model.json: matrix products: expected float32=" in failed.stderr


@pytest.mark.parametrize("more", [
    [],
    ["--resume"],
    ["--memory-budget", "1GiB", "--strategy", "partition", "--checkpoint-activations", "piece", "--offload-context"],
    ["--normalize", "100", "--shuffle", "rows", "--batch-size", 3, "--dtype", "bfloat16", "--save-dtype", "float32",
     "--scheduler", "cosine", "--warmup-steps", 1, "--weight-decay", "0.1", "--learning-rate", "1.5e-3", "--threads", 2],
    ["--objective", "sft", "--optimizer", "sgd", "--limit", 5, "--skip-bad-rows", "--no-calibration"],
    ["--objective", "gspo", "--clip-high", 0.5, "--importance-weights", "truncate"],
])  # fmt: skip
def test_the_config_of_a_run_reproduces_it(espalier, model, data, tmp_path, more):
    objective = [] if "--objective" in more else ["--objective", "grpo"]
    espalier("train", "--model", model, "--data", data, *objective, "--steps", 2, *more, "--out", tmp_path / "run")
    espalier("train", "--config", tmp_path / "run/config.toml", "--out", tmp_path / "again")
    first, again = weights(tmp_path / "run", 2), weights(tmp_path / "again", 2)
    assert all(first[name].equal(again[name]) for name in first)
    config = (tmp_path / "run/config.toml").read_text()
    assert "resume" not in config and "by objective" not in config
    assert (tmp_path / "again/config.toml").read_text() == config.replace(str(tmp_path / "run"), str(tmp_path / "again"))


def test_a_cache_that_cannot_be_written_is_a_warning(espalier, model, data, tmp_path):
    (tmp_path / "cache").write_text("a file where a folder is wanted")
    done = espalier("train", "--model", model, "--data", data, "--steps", 1, "--out", tmp_path / "run",
                    cache=tmp_path / "cache")  # fmt: skip
    assert "warning: the measurement could not be saved" in done.stderr
    assert (tmp_path / "run/checkpoints/step_1/model.safetensors").exists()


def test_a_run_is_never_overwritten(espalier, model, data, tmp_path):
    command = ["train", "--model", model, "--data", data, "--out", tmp_path / "run", "--steps", 1]
    espalier(*command)
    again = espalier(*command, check=False)
    assert again.returncode == 1 and "--resume" in again.stderr


def test_one_row_at_a_time_equals_all_at_once(espalier, model, data, tmp_path):
    """Accumulation: micro-batches of one trajectory give the gradient of one micro-batch of all."""
    flags = ["--model", model, "--data", data, "--dtype", "float64", "--optimizer", "sgd", "--learning-rate", 1,
             "--max-grad-norm", 0, "--steps", 1]  # fmt: skip
    espalier("train", *flags, "--out", tmp_path / "one", "--strategy", "sequence-packing", "--token-budget", 18)
    espalier("train", *flags, "--out", tmp_path / "all", "--token-budget", 1000)
    one, everything = weights(tmp_path / "one", 1), weights(tmp_path / "all", 1)
    for name in one:
        assert (one[name] - everything[name]).norm() <= 1e-12 * everything[name].norm(), name


def test_flags_win_over_the_config_file_and_unknown_keys_fail(espalier, model, data, tmp_path):
    config = tmp_path / "run.toml"
    config.write_text(f'model = "{model}"\nsteps = 2\nlearning-rate = 0.25\n')
    espalier("train", "--config", config, "--data", data, "--out", tmp_path / "run", "--learning-rate", 0.125)
    assert lines(tmp_path / "run/metrics.jsonl")[1]["learning_rate"] == 0.125
    config.write_text("steps = 2\nlearning-rat = 1\n")
    failed = espalier("train", "--config", config, "--data", data, "--out", tmp_path / "other", check=False)
    assert failed.returncode == 1 and f"{config}:2" in failed.stderr
    assert "unknown key `learning-rat`" in failed.stderr and "did you mean --learning-rate?" in failed.stderr
    assert len(failed.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("line, words", [
    ('{"input_ids": [1, 2, 61]}', ["input_ids", "61"]),
    ('{"input_ids": [1, 2.5]}', ["input_ids", "2.5"]),
    ('{"input_ids": []}', ["input_ids"]),
    ('{"loss_mask": [1]}', ["input_ids"]),
    ('{"input_ids": [1, 2], "loss_mask": [1]}', ["loss_mask"]),
    ('{"input_ids": [1, 2], "logprobs": [null, NaN]}', ["logprobs", "NaN"]),
    ('{"input_ids": [1, 2', []),
])  # fmt: skip
def test_bad_rows(espalier, model, tmp_path, line, words):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"input_ids": [1, 2, 3]}\n' + line + "\n")
    failed = espalier("verify", "--model", model, "--data", data, check=False)
    assert failed.returncode == 1 and f"{data}:2" in failed.stderr
    assert len(failed.stderr.strip().splitlines()) == 1
    assert all(word in failed.stderr for word in words), failed.stderr
    skipped = espalier("verify", "--model", model, "--data", data, "--skip-bad-rows", "--json")
    assert json.loads(skipped.stdout)["flat_tokens"] == 3 and "skipped 1 bad row" in skipped.stderr


def test_nothing_replaces_an_output_when_a_command_fails(espalier, model, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text("precious")
    data = tmp_path / "rows.jsonl"
    data.write_text("not json\n")
    assert espalier("logprobs", "--model", model, "--data", data, "-o", out, check=False).returncode == 1
    assert out.read_text() == "precious"


def test_devices_that_are_not_there(espalier, model, data, tmp_path):
    """One line and status 1 for a GPU that is not there; a word that is no device is wrong usage."""
    commands = {"train": ["--out", tmp_path / "run"], "verify": [], "logprobs": ["-o", tmp_path / "out.jsonl"],
                "bench": [], "plan": []}  # fmt: skip
    for command, more in commands.items():
        flags = [command, "--model", model, "--data", data, *more]
        wrong = espalier(*flags, "--device", "tpu", check=False)
        assert wrong.returncode == 2 and "expected auto, cpu, cuda or cuda:N, received `tpu`" in wrong.stderr
        # More than any machine has, so that this holds on one with GPUs too.
        absent = espalier(*flags, "--device", "cuda:100", check=False)
        assert absent.returncode == 1 and absent.stdout == "" and len(absent.stderr.splitlines()) == 1, absent.stderr
        reasons = ("no CUDA device is visible", "there is no", "expected an index from 0 to")
        assert any(reason in absent.stderr for reason in reasons), absent.stderr
    assert not (tmp_path / "run").exists() and not (tmp_path / "out.jsonl").exists()


def test_device_says_what_there_is_and_what_auto_takes(espalier, model, data):
    """One line says why no GPU can be used, and a run with --device auto says what it takes."""
    report = json.loads(espalier("device", "--json").stdout)
    assert list(report) == ["cpu", "cuda", "auto"]
    assert report["cpu"]["name"] and report["cpu"]["threads"] >= 1 and "float32=" in report["cpu"]["matrix_products"]
    text = espalier("device").stdout
    assert report["cpu"]["name"] in text and report["cuda"]["libtorch"] in text
    assert re.search(rf"^--device auto +{report['auto']}$", text, re.MULTILINE)
    if report["cuda"]["fault"] is None:
        assert report["auto"] == "cuda:0" and report["cuda"]["devices"]
        return
    assert report["auto"] == "cpu" and text.count(report["cuda"]["fault"]) == 1
    run = espalier("verify", "--model", model, "--data", data, "--device", "auto", "--json")
    assert json.loads(run.stdout)["passed"]
    assert run.stderr.splitlines()[0] == f"espalier: --device auto: cpu ({report['cuda']['fault']})"


def test_device_prints_the_rates_that_are_kept(espalier, model, data, tmp_path):
    """Those that `plan` measures; before that, how to measure them."""
    cache = tmp_path / "cache"
    assert "none stored; `espalier plan --model DIR --data FILE --device cpu` measures them\n" in espalier("device", cache=cache).stdout
    espalier("plan", "--model", model, "--data", data, cache=cache)
    (kept,) = json.loads(espalier("device", "--json", cache=cache).stdout)["cpu"]["rates"]
    assert kept["dtype"] == "float32" and set(kept["flops_per_second"]) == {"layers", "attention", "head"}
    line = rf"^measured rates +float32, hidden size {kept['hidden_size']}: .*FLOP/s \({kept['threads']} threads, {kept['measured']}\)$"
    assert re.search(line, espalier("device", cache=cache).stdout, re.MULTILINE)


def test_kernels_can_be_checked_one_by_one(espalier):
    """As the judge does it on a GPU, here with the CPU's own; a name that is none is an error."""
    on_cpu = ["device", "--device", "cpu", "--check"]
    checks = re.fullmatch(r"cpu: passed ([\d,]+) checks\n", espalier(*on_cpu, "cpu").stdout)[1]
    assert int(checks.replace(",", "")) > 100
    assert re.fullmatch(r"head: passed ([\d,]+) checks\n", espalier(*on_cpu, "head").stdout)
    wrong = espalier(*on_cpu, "ampere", check=False)
    assert wrong.returncode == 1 and wrong.stdout == ""
    families = "cpu, head, distribution, products"
    assert wrong.stderr == f"espalier: error: expected a family of kernels of cpu: {families}; received ampere\n"
    # Without a GPU there is nothing to check again, and that is no error.
    assert json.loads(espalier("device", "--requalify", "--json").stdout)["cpu"]["name"]


def test_dry_run_writes_nothing(espalier, model, data, tmp_path):
    shown = espalier("train", "--model", model, "--data", data, "--out", tmp_path / "run", "--dry-run").stdout
    assert "predicted memory" in shown and "predicted speed-up" in shown and 'strategy = "auto"' in shown
    assert not (tmp_path / "run").exists()


def test_synth_inspect_and_plan_agree(espalier, tmp_path):
    rows = tmp_path / "rows.safetensors"
    espalier("synth", "-o", rows, "--depth", 3, "--branching", 4, "--target-por", 0.7, "--seed", seed_of(3))
    seen = json.loads(espalier("inspect", "--data", rows, "--json").stdout)
    assert seen["por"] == pytest.approx(0.7, abs=0.02)
    plan = json.loads(espalier("plan", "--data", rows, "--token-budget", 100000, "--json").stdout)
    assert plan["encoded_tokens"] == seen["tree_tokens"] and plan["flat_tokens"] == seen["flat_tokens"]
    packing = json.loads(espalier("plan", "--data", rows, "--strategy", "sequence-packing", "--json").stdout)
    assert packing["encoded_tokens"] == seen["flat_tokens"] and packing["effective_reuse_ratio"] == 0


def test_sizes_are_given_with_their_unit(espalier, model, data, tmp_path):
    plan = ["plan", "--model", model, "--data", data, "--memory-budget"]
    bare = espalier(*plan, "8", check=False)
    assert bare.returncode == 2 and "such as 8GiB or 8MB, received 8, which is 8 bytes" in bare.stderr
    unknown = espalier(*plan, "8 gigs", check=False)
    assert unknown.returncode == 2 and "expected a size such as 8GiB or 500MB, received 8 gigs" in unknown.stderr
    short = espalier(*plan, "10kB", check=False)
    assert short.returncode == 1 and "memory budget: 9.8 KiB is too little" in short.stderr
    budget = json.loads(espalier(*plan, "1.5GB", "--json").stdout)["memory_budget"]
    assert budget == 1_500_000_000


def test_names_of_the_hub_are_told_how_to_download(espalier, data, tmp_path):
    model = espalier("verify", "--model", "some-org/some-model", "--data", data, check=False)
    assert model.returncode == 1 and "`hf download some-org/some-model --local-dir some-model`" in model.stderr
    rows = espalier("inspect", "--data", "some-org/chats", check=False)
    assert rows.returncode == 1 and "`hf download some-org/chats --repo-type dataset --local-dir chats`" in rows.stderr
    missing = espalier("verify", "--model", tmp_path / "none", "--data", data, check=False)
    assert missing.stderr == (f"espalier: error: {tmp_path}/none: expected a Hugging Face model folder, received a name that "
                              "does not exist\n")  # fmt: skip


def test_budgets_that_are_too_small_name_the_smallest(espalier, model, data, tmp_path):
    flags = ["plan", "--data", data]
    packing = espalier(*flags, "--strategy", "tree-packing", "--token-budget", 2, check=False)
    assert packing.returncode == 1 and "expected a budget of at least" in packing.stderr
    flags += ["--model", model, "--optimizer", "sgd"]
    smallest = {}
    for checkpoint in ("none", "layer", "piece", "auto"):
        way = [*flags, "--checkpoint-activations", checkpoint]
        short = espalier(*way, "--memory-budget", "1kB", check=False)
        assert short.returncode == 1 and ("layer or piece needs less" in short.stderr) == (checkpoint == "none")
        smallest[checkpoint] = re.search(r"the smallest plan found needs [^(]*\((\d+) bytes\)", short.stderr).group(1)
        plan = json.loads(espalier(*way, "--memory-budget", smallest[checkpoint], "--json").stdout)
        assert plan["predicted_peak_bytes"] <= int(smallest[checkpoint])
        assert plan["encoded_tokens"] == plan["tree_tokens"] if plan["strategy"] == "partition" else True
        assert plan["checkpoint_activations"] in ("none", "layer", "piece")
    assert int(smallest["auto"]) == min(int(each) for each in smallest.values())
    without_model = espalier("plan", "--data", data, "--memory-budget", "1GB", check=False)
    assert without_model.returncode == 1 and "--model" in without_model.stderr


def test_pieces_of_a_tree_train_alike(espalier, model, data, tmp_path):
    """Whole, in pieces, and with activations computed again: the same weights after a step in float64."""
    flags = ["--model", model, "--data", data, "--steps", 1, "--dtype", "float64", "--optimizer", "sgd",
             "--learning-rate", 0.1, "--no-calibration"]  # fmt: skip
    ways = {"whole": [], "pieces": ["--token-budget", 5], "layer": ["--token-budget", 5, "--checkpoint-activations", "layer"],
            "host": ["--token-budget", 5, "--checkpoint-activations", "piece", "--offload-context"]}  # fmt: skip
    losses = {}
    for way, more in ways.items():
        out = tmp_path / way
        espalier("train", *flags, "--out", out, "--strategy", "partition", *more)
        losses[way] = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    whole = losses["whole"]
    assert whole["micro_batches"] == 1 and losses["pieces"]["micro_batches"] > 2
    for way in ways:
        assert losses[way]["encoded_tokens"] <= whole["encoded_tokens"]
        assert losses[way]["loss"] == pytest.approx(whole["loss"], rel=1e-12)
        assert losses[way]["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-12)
    assert losses["layer"]["recomputed_tokens"] > losses["host"]["recomputed_tokens"] > 0


def test_a_calibration_is_measured_once(espalier, model, data):
    # A number of threads that no machine has as its default: other tests calibrate with that one.
    first = espalier("plan", "--model", model, "--data", data, "--json", "--threads", 5)
    again = espalier("plan", "--model", model, "--data", data, "--json", "--threads", 5)
    assert "measuring how fast" in first.stderr and "measuring how fast" not in again.stderr
    predicted = [json.loads(done.stdout)["predicted_seconds"] for done in (first, again)]
    assert predicted[0] == predicted[1] > 0


def test_a_calibration_that_does_not_hold_is_measured_again(espalier, model, data, tmp_path):
    flags = ["--model", model, "--data", data, "--threads", 1]
    espalier("plan", *flags, cache=tmp_path)
    (kept,) = (tmp_path / "espalier").glob("calibration-*.json")
    calibration = json.loads(kept.read_text())
    train = ["train", *flags, "--steps", 2, "--learning-rate", 0.001]
    for factor in (1e5, 1):  # as of a busy machine; as measured, where steps are too short to be judged
        scaled = {**calibration, "seconds": [seconds * factor for seconds in calibration["seconds"]]}
        kept.write_text(json.dumps(scaled))
        run = tmp_path / f"run_{factor}"
        done = espalier(*train, "--out", run, cache=tmp_path)
        assert "measuring how fast" not in done.stderr
        judged = json.loads((run / "metrics.jsonl").read_text().splitlines()[1])
        again = factor > 1 or judged["micro_batch_seconds"] >= 0.25  # so long on a busy machine only
        assert ("the next run measures the machine again" in done.stderr) == again and kept.exists() != again


def test_verify_reports_by_its_exit_status(espalier, tmp_path):
    # The ratio of two rounding errors needs some hundred tokens to settle, and parameters of more than a few values.
    config, model, data = tmp_path / "config.json", tmp_path / "model", tmp_path / "rows.jsonl"
    config.write_text(json.dumps({**MODELS["qwen3"], "hidden_size": 64, "head_dim": 64}))
    espalier("init", "--config", config, "--out", model, "--seed", seed_of(5))
    espalier("synth", "-o", data, "--trees", 2, "--node-length", 30, "--vocab-size", 61, "--loss-rate", 0.5, "--seed", seed_of(0))
    for dtype in ["float64", "float32"]:
        report = json.loads(espalier("verify", "--model", model, "--data", data, "--dtype", dtype, "--json").stdout)
        assert report["passed"] and report["isolation_bitwise"] and ("error_ratio_max" in report) == (dtype != "float64")


def test_bench_of_matrix_products(espalier, model, tmp_path):
    flags = ["bench", "--model", model, "--gemm", "--tree-tokens", 16, "--repeats", 1]
    measured = json.loads(espalier(*flags, "--json").stdout)
    ways = {row["way"] for row in measured["rows"]}
    assert {"float32 library", "bfloat16 upcast (library)", "bfloat16 library"} <= ways
    assert {row["part"] for row in measured["rows"]} == {"forward", "gradient of input", "gradient of weight"}
    assert {row["rows"] for row in measured["rows"]} == {16}
    assert all(row["gflops_per_second"] > 0 for row in measured["rows"])
    assert re.fullmatch("float32=(library|panels),bfloat16=(upcast|native|library)", measured["products"])
    # Products that are not this machine's own choice, which differs from one processor to another.
    other = "upcast" if "bfloat16=library" in measured["products"] else "library"
    named = espalier(*flags, "--json", "-o", tmp_path / "table.md", variables={"ESPALIER_BF16_PRODUCTS": other})
    table = (tmp_path / "table.md").read_text()
    assert json.loads(named.stdout)["reason"] == "the environment"
    assert re.search(rf"bfloat16 {other}( \(\w+\))? \* \|", table) and "This machine's choice" in table
    wrong = espalier(*flags, check=False, variables={"ESPALIER_BF16_PRODUCTS": "fast"})
    assert wrong.returncode == 1
    assert "ESPALIER_BF16_PRODUCTS: expected upcast, native or library, received `fast`" in wrong.stderr


def test_bench_of_the_tree_alone(espalier, model, data, tmp_path):
    flags = ["bench", "--model", model, "--data", data, "--repeats", 1, "--warmup", 0]
    both = json.loads(espalier(*flags, "--json").stdout)["rows"][0]
    alone = json.loads(espalier(*flags, "--tree-only", "--json", "-o", tmp_path / "table.md").stdout)["rows"][0]
    assert {"tree_seconds", "bound", "loss", "grad_norm"} <= set(alone) and "packing_seconds" not in alone
    for key in ("flat_tokens", "tree_tokens", "bound", "loss", "grad_norm"):
        assert alone[key] == both[key], key
    verified = json.loads(espalier("verify", "--model", model, "--data", data, "--json").stdout)
    assert alone["loss"] == pytest.approx(verified["loss"], rel=1e-5)
    table = (tmp_path / "table.md").read_text()
    assert "| loss |" in table and f"{alone['loss']:.6f}" in table and "packing" not in table
    # In pieces: the same loss and gradients, and no token twice.
    pieces = espalier(*flags, "--tree-only", "--strategy", "partition", "--token-budget", 5, "--json").stdout
    pieces = json.loads(pieces)["rows"][0]
    assert pieces["micro_batches"] > alone["micro_batches"] == 1
    assert pieces["encoded_tokens"] <= alone["encoded_tokens"]
    assert pieces["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert pieces["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)
    for excluded in (["--tree-only"], ["--strategy", "partition"]):
        assert espalier(*flags, "--strategies", *excluded, check=False).returncode == 2


def test_the_ops_are_the_same_from_python():
    """torch.ops.espalier runs what the engine runs; a star of one prompt and two responses, against a dense mask."""
    script = """
import sys
import torch
torch.ops.load_library("build/release/src/espalier/ops/libespalier_ops.so")
torch.manual_seed(int(sys.argv[1]))
q, k, v = (torch.randn(7, h, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
ends = torch.tensor([7, 7, 7, 5, 5, 7, 7], dtype=torch.int32)
i, j = torch.arange(7), torch.arange(7)[:, None]
mask = (i <= j) & (j < ends[None, :])
out, _ = torch.ops.espalier.tree_attention(q, k, v, ends, 0.3, [], [], torch.empty(0, 5, dtype=torch.int64))
dense = torch.nn.functional.scaled_dot_product_attention(
    *(x.transpose(0, 1) for x in (q, k, v)), attn_mask=mask, scale=0.3, enable_gqa=True).transpose(0, 1)
assert (out - dense).abs().max() < 1e-12
seed = torch.randn_like(out)
for ours, theirs in zip(torch.autograd.grad(out, (q, k, v), seed), torch.autograd.grad(dense, (q, k, v), seed)):
    assert (ours - theirs).abs().max() < 1e-12
"""
    subprocess.run([sys.executable, "-c", script, str(seed_of(0))], check=True, cwd=REPOSITORY)


@pytest.mark.parametrize("arguments, words", [
    (["trian"], "unknown command trian; expected one of prepare, import, inspect,"),
    (["trian"], "did you mean train?"),
    (["train", "--lr", 1], "unknown flag --lr of `espalier train`; did you mean --learning-rate?"),
    (["train", "--model", "m", "--data", "d", "--out", "o", "--steps", -1],
     "--steps: expected a whole number of at least 0, received -1"),
    (["train", "--model", "m", "--data", "d", "--out", "o", "--epochs", 1.5],
     "--epochs: expected a whole number of at least 1, received 1.5"),
    (["train", "--model", "m", "--data", "d", "--out", "o", "--steps", "0100"],
     "--steps: expected a whole number in plain decimal digits, received 0100"),
    (["train", "--model", "m", "--data", "d", "--out", "o", "--batch-size", "020"],
     "--batch-size: expected a whole number in plain decimal digits, received 020"),
    (["train", "--model", "m", "--data", "d", "--out", "o", "--seed", 2**64],
     "--seed: expected a whole number of at most 18446744073709551615, received 18446744073709551616"),
    (["train", "--model", "m", "--data", "d", "--out", "o", "--threads", "01"],
     "--threads: expected a whole number in plain decimal digits, received 01"),
    (["init", "--config", "c", "--out", "o", "--seed", "0x10"],
     "--seed: expected a whole number in plain decimal digits, received 0x10"),
    (["synth", "-o", "o", "--trees", "010"], "--trees: expected a whole number in plain decimal digits, received 010"),
    (["plan", "--data", "d", "--token-budget", "0x10"],
     "--token-budget: expected a whole number in plain decimal digits, received 0x10")])
def test_wrong_usage_is_told_in_words(espalier, arguments, words):
    failed = espalier(*arguments, check=False)
    assert failed.returncode == 2 and words in failed.stderr, failed.stderr


def test_whole_numbers_of_a_config_are_decimal(espalier, tmp_path):
    """TOML has its own notation for others, and refuses leading zeros."""
    (tmp_path / "run.toml").write_text('model = "m"\ndata = "d"\nout = "o"\nsteps = "0100"\n')
    failed = espalier("train", "--config", tmp_path / "run.toml", check=False)
    assert failed.returncode == 2 and "--steps: expected a whole number in plain decimal digits, received 0100" in failed.stderr
    (tmp_path / "run.toml").write_text("steps = 0100\n")
    failed = espalier("train", "--config", tmp_path / "run.toml", check=False)
    assert failed.returncode == 1 and "run.toml:1: " in failed.stderr


def test_a_config_that_cannot_be_opened_is_named(espalier, tmp_path):
    failed = espalier("train", "--config", tmp_path / "none.toml", check=False)
    assert failed.returncode == 1
    assert failed.stderr == f"espalier: error: --config: cannot open {tmp_path}/none.toml: No such file or directory\n"


def test_values_that_no_option_can_have_are_wrong_usage(espalier, data, tmp_path):
    for command in (["inspect", "--data", data], ["plan", "--data", data]):
        wrong = espalier(*command, "--max-row-bytes", "abc", check=False)
        assert (wrong.returncode, wrong.stderr) == (2, "espalier: error: --max-row-bytes: expected a size such as 8GiB or 500MB, "
                                                    f"received abc (see `espalier {command[0]} --help`)\n")  # fmt: skip
