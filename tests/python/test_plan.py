# SPDX-License-Identifier: Apache-2.0
"""What `espalier plan` shows: a summary, the strategies beside one another, and the micro-batches on request."""

import json
import math
import re
import sys

import pytest
from safetensors.numpy import load_file

from small_models import random_rows, write_rows

STRATEGIES = ["tree-packing", "partition", "sequence-packing"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", random_rows(7, "grpo"))


def planned(espalier, *flags):
    """The JSON and the text of `espalier plan`."""
    return json.loads(espalier("plan", *flags, "--json").stdout), espalier("plan", *flags).stdout


def value_of(text, name):
    (value,) = re.findall(rf"^{name}  +(.+)$", text, re.MULTILINE)
    return value


def strategies_in(text):
    """The lines of the table of strategies, split into columns, the mark first."""
    header, *lines = text[text.index("\nstrategies ") :].splitlines()[2:]
    assert header.startswith("  strategy ")
    return [[line[0], *re.split(r" {2,}", line[2:].strip())] for line in lines if line[:2] in ("  ", "* ")]


def micro_batches_in(text):
    """Parent, tokens, pairs, trajectories and runs of each micro-batch of the table."""
    rows = re.findall(r"^ *\d+ +(-|\d+) +([\d,]+) +([\d,]+) +([\d,]+) +([\d,]+)(?: |$)", text, re.MULTILINE)
    return [(-1 if parent == "-" else int(parent), *(int(each.replace(",", "")) for each in rest)) for parent, *rest in rows]


def micro_batches_of(plan):
    return [(each["parent"], each["tokens"], each["visible_pairs"], len(each["trajectories"]), len(each["runs"]))
            for each in plan["micro_batches"]]


def test_the_summary_comes_first_and_micro_batches_on_request(espalier, model, data):
    rows = data.read_text().splitlines()
    different = len({tuple(json.loads(row)["input_ids"]) for row in rows})
    trees = len({json.loads(row)["input_ids"][0] for row in rows})
    for flags in (["--data", data], ["--data", data, "--model", model, "--token-budget", 20]):
        plan, text = planned(espalier, *flags)
        assert re.fullmatch(rf"{len(rows)}: {different} different traject\w+ in {trees} trees?", value_of(text, "rows"))
        for name in ("flat tokens", "tree tokens", "encoded tokens"):
            assert value_of(text, name) == f"{plan[name.replace(' ', '_')]:,}"
        assert value_of(text, "strategy") == f"{plan['strategy']}, chosen by auto"
        assert value_of(text, "micro-batches") == str(len(plan["micro_batches"]))
        assert value_of(text, "checkpointing") == "none"
        assert f"{plan['predicted_speedup_over_sequence_packing']:.2f}x over sequence packing" in text
        assert ("predicted time" in text) == ("predicted memory" in text) == ("--model" in flags)
        assert text.index("rows ") == 0 and micro_batches_in(text) == []
        longer = espalier("plan", *flags, "--micro-batches").stdout
        assert longer.startswith(text) and micro_batches_in(longer) == micro_batches_of(plan) != []


def test_all_strategies_stand_in_one_table(espalier, model, data):
    without, text = planned(espalier, "--data", data)
    assert [row[1:] for row in strategies_in(text)] == [
        [row["strategy"], f"{row['micro_batches']:,}", f"{row['encoded_tokens']:,}", "yes"] for row in without["comparison"]]
    assert [row["strategy"] for row in without["comparison"]] == STRATEGIES
    assert not any("predicted_seconds" in row for row in without["comparison"])
    # Under a memory budget the ways of checkpointing differ, and each has its own token budget.
    for strategy in ("auto", *STRATEGIES):
        plan, text = planned(espalier, "--data", data, "--model", model, "--memory-budget", "1200kB", "--strategy", strategy)
        rows, shown = plan["comparison"], strategies_in(text)
        assert len(rows) == len(shown) == 7
        assert [row[1:3] for row in shown] == [[row["strategy"], row["checkpoint_activations"]] for row in rows]
        for row, columns in zip(rows, shown):
            assert (columns[0] == "*") == row["chosen"] and row["fits"] == (columns[-1] == "yes") == ("micro_batches" in row)
            if row["fits"]:
                assert columns[3:6] == [f"{row[name]:,}" for name in ("token_budget", "micro_batches", "encoded_tokens")]
                assert row["compared_peak_bytes"] <= 1_200_000
        (chosen,) = (row for row in rows if row["chosen"])
        assert strategy in ("auto", chosen["strategy"])
        rivals = [row for row in rows if row["fits"] and strategy in ("auto", row["strategy"])]
        assert chosen["compared_seconds"] == min(row["compared_seconds"] for row in rivals)
        for name in ("strategy", "checkpoint_activations", "token_budget", "encoded_tokens", "predicted_seconds",
                     "predicted_peak_bytes"):  # fmt: skip
            assert chosen[name] == plan[name], name
        assert chosen["micro_batches"] == len(plan["micro_batches"])


def least_bytes(espalier, *flags):
    """The smallest memory budgets of the seven ways of planning, ascending."""
    ways = [(strategy, way) for strategy in STRATEGIES for way in ("none", "layer", "piece")
            if way != "piece" or strategy == "partition"]  # fmt: skip
    failed = [espalier("plan", *flags, "--strategy", strategy, "--checkpoint-activations", way, "--memory-budget", "1kB",
                       check=False) for strategy, way in ways]  # fmt: skip
    return sorted(int(re.search(r"the smallest plan found needs [^(]*\((\d+) bytes\)", each.stderr)[1]) for each in failed)


def test_what_does_not_fit_names_the_smallest_budget_that_does(espalier, model, data):
    flags = ["--data", data, "--model", model, "--optimizer", "sgd", "--no-calibration"]
    least = least_bytes(espalier, *flags)
    assert len(least) == 7 and least[0] < least[-1] - 1
    checked = []
    for budget in (["--token-budget", 5], ["--memory-budget", least[0] + 1], ["--memory-budget", least[-1] - 1]):
        for _, strategy, *columns in strategies_in(espalier("plan", *flags, *budget).stdout):
            needs = re.fullmatch(r"no: needs (--(?:token|memory)-budget) (\S+)", columns[-1])
            assert (needs is None) == (columns[-1] == "yes"), columns
            if needs is None:
                continue
            of_memory = budget[0] == "--memory-budget"
            assert needs[1] == budget[0] and columns[-6 if of_memory else -5 : -1] == ["-"] * (5 if of_memory else 4)
            way = ["--checkpoint-activations", columns[0]] if of_memory else []
            alone = ["plan", *flags, "--strategy", strategy, *way]
            assert espalier(*alone, *budget, check=False).returncode == 1
            assert espalier(*alone, needs[1], needs[2]).returncode == 0
            checked.append((budget[0], strategy))
    assert [strategy for flag, strategy in checked if flag == "--token-budget"] == ["tree-packing", "sequence-packing"]
    assert any(flag == "--memory-budget" for flag, _ in checked)


@pytest.mark.parametrize("flags", [
    [], ["--token-budget", 20], ["--token-budget", 5], ["--memory-budget", "700kB"], ["--memory-budget", "1200kB"],
    ["--strategy", "sequence-packing", "--token-budget", 40], ["--strategy", "partition", "--memory-budget", "700kB"],
    ["--strategy", "partition", "--token-budget", 7, "--checkpoint-activations", "piece", "--offload-context"]])  # fmt: skip
def test_train_takes_the_plan_that_is_shown(espalier, model, data, tmp_path, flags):
    flags = ["--model", model, "--data", data, "--no-calibration", *flags]
    plan, text = planned(espalier, *flags)
    espalier("train", *flags, "--out", tmp_path / "run", "--steps", 1)
    dry = espalier("train", *flags, "--out", tmp_path / "other", "--dry-run").stdout
    for table in ((tmp_path / "run/plan.txt").read_text(), dry):
        assert micro_batches_in(table)[:20] == micro_batches_of(plan)[:20]
        assert re.search(rf"^{plan['strategy']} with {len(plan['micro_batches'])} micro-batch", table, re.MULTILINE)
    assert len(micro_batches_in((tmp_path / "run/plan.txt").read_text())) == len(plan["micro_batches"])
    (marked,) = (row for row in strategies_in(text) if row[0] == "*")
    assert marked[1] == plan["strategy"]


def test_counts_of_one_are_singular(espalier, model, tmp_path):
    one = tmp_path / "one.jsonl"
    one.write_text(json.dumps({"input_ids": [3, 4, 5], "loss_mask": [0, 1, 1]}) + "\n")
    on_one = ["--model", model, "--data", one]
    outputs = [espalier(*command) for command in [
        ["synth", "-o", tmp_path / "tree.jsonl", "--trees", 1, "--depth", 1, "--node-length", 1],
        ["inspect", *on_one], ["plan", *on_one, "--micro-batches", "--no-calibration", "--token-budget", 3],
        ["train", *on_one, "--out", tmp_path / "run", "--steps", 1, "--warmup-steps", 3, "--dry-run", "--no-calibration"],
        ["train", *on_one, "--out", tmp_path / "run", "--steps", 1, "--no-calibration"],
        ["logprobs", *on_one, "-o", tmp_path / "logprobs.jsonl"], ["verify", *on_one, "--threads", 1],
        ["bench", *on_one, "--threads", 1, "--repeats", 1, "--warmup", 0]]]  # fmt: skip
    one.write_text(one.read_text() + "not a row\n" + json.dumps({"input_ids": [3]}) + "\n")
    outputs.append(espalier("plan", *on_one, "--skip-bad-rows", "--no-calibration"))
    said = "\n".join(done.stdout + done.stderr for done in outputs) + (tmp_path / "run/plan.txt").read_text()
    for phrase in ("1 trajectory", "1 different trajectory in 1 tree", "1 micro-batch", "1 tree token,", "1 step of 1 trajectory",
                   "less than the 1 step of", "1 row, ", "1 bad row of 3", "1 of 2 trajectories has no loss_mask", "1 thread,"):
        assert phrase in said, phrase
    several = r"(?:\w+ )?(?:rows|tokens|trajectories|trees|micro-batches|steps|places|threads|trials|parameters)\b(?! has)"
    assert re.findall(rf"(?<![\d,.])1 {several}", said.replace("1 of ", "")) == []


def test_names_and_values_of_a_report_stand_apart(espalier, model, data):
    shown = espalier("verify", "--model", model, "--data", data, "--dtype", "float32", check=False).stdout
    report = shown.splitlines()[:-1]
    assert len(report) == 8 and all(re.match(r"\S+( \S+)*  +\S", line) for line in report), shown
    starts = {re.match(r".*?  +(?=\S)", line).end() for line in report}
    assert len(starts) == 1 and "error ratio, tree over per-trajectory  worst " in shown


def test_ranks_get_whole_trees_or_branches(espalier, model, data):
    rows = len(data.read_text().splitlines())
    for flags in (["--data", data], ["--data", data, "--model", model]):
        plan, text = planned(espalier, *flags, "--ranks", 3)
        distribution = plan["distribution"]
        ranks = distribution["ranks"]
        assert sorted(row for rank in ranks for row in rank["trajectories"]) == list(range(rows))
        repeated = distribution["repeated_tokens"]
        assert sum(rank["tree_tokens"] for rank in ranks) == plan["tree_tokens"] + repeated
        assert max(rank["predicted_seconds"] for rank in ranks) == pytest.approx(distribution["seconds"])
        if "--model" not in flags:  # the same rates in both runs
            assert value_of(text, "slowest rank") == f"{100 * distribution['imbalance']:.1f}% over the mean"
            assert f"which repeat {repeated:,} tokens" in value_of(text, "split trees")
        table = text[text.index("rank  trajectories  tree tokens") :].splitlines()[1:]
        assert len(table) == 3 and sum(int(line.split()[1]) for line in table) == rows
    assert "distribution" not in planned(espalier, "--data", data)[0]


def test_ranks_that_compute_trees_together(espalier, model, tmp_path):
    import espalier as package

    data = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [1] * 3000}, *({"input_ids": [row] * 90} for row in range(2, 20))])
    flags = ["--data", data, "--model", model, "--no-calibration", "--ranks", 8, "--link-bandwidth", 50]
    alone = planned(espalier, *flags)[0]["distribution"]
    plan, text = planned(espalier, *flags, "--context-parallel", 4)
    found = plan["distribution"]
    assert alone["imbalance"] > 1 and len(found["ranks"]) == 2 and found["context_parallel"] == 4
    assert found["seconds"] < 0.6 * alone["seconds"] and found["efficiency"] > 1.5 * alone["efficiency"]
    assert value_of(text, "ranks") == "8 in 2 groups of 4, which compute each tree together"
    peaks = [max(rank["predicted_peak_bytes"] for rank in of["ranks"]) for of in (alone, found)]
    assert peaks[1] < 0.5 * peaks[0] and "memory" in text
    assert "slowest group" in text and "of 8 times one process" in value_of(text, "efficiency")
    fastest = planned(espalier, *flags, "--context-parallel", 0)[0]["distribution"]
    assert fastest["seconds"] <= found["seconds"]
    forest = package.build([[1] * 3000, *([row] * 90 for row in range(2, 20))])
    ours = package.distribute(forest, 8, context_parallel=4, link_bandwidth=50)
    assert ours.context_parallel == 4 and [len(share.trajectories) for share in ours] == [len(each["trajectories"]) for each in found["ranks"]]
    assert "8 ranks" in repr(ours)
    for wrong, message in ((["--context-parallel", 3], "a divisor of --ranks 8"), (["--context-parallel", -1], "--context-parallel")):
        assert message in espalier("plan", *flags, *wrong, check=False).stderr
    for wrong in (["--context-parallel", 2], ["--ranks", 8, "--context-parallel", 0]):
        assert "--context-parallel" in espalier("plan", "--data", data, *wrong, check=False).stderr
    for wrong in ({"context_parallel": 3}, {"context_parallel": 0}, {"context_parallel": 2, "link_bandwidth": 0}, {"context_parallel": -1}):
        with pytest.raises(package.InputError, match="context.parallel|link_bandwidth"):
            package.distribute(forest, 8, **wrong)


def test_what_several_processes_take(espalier, model, data):
    """Gradients and weights of all parameters in float32 are exchanged; with adapters only theirs are."""
    flags = ["--data", data, "--model", model, "--no-calibration"]
    parameters = sum(math.prod(tensor.shape) for tensor in load_file(model / "model.safetensors").values())
    alone = planned(espalier, *flags, "--ranks", 1, "--link-bandwidth", 2)[0]["distribution"]
    assert alone["communication_seconds"] == 0 and alone["efficiency"] == pytest.approx(1)
    plan, text = planned(espalier, *flags, "--ranks", 4, "--link-bandwidth", 2)
    found = plan["distribution"]
    assert found["reduced_bytes"] == 4 * parameters
    assert found["communication_seconds"] == pytest.approx(2 * 3 / 4 * 4 * parameters / 2e9)
    assert found["efficiency"] == pytest.approx(alone["seconds"] / (4 * (found["seconds"] + found["communication_seconds"])))
    assert value_of(text, "efficiency").startswith(f"{100 * found['efficiency']:.1f}% of 4 times one process")
    peaks = [rank["predicted_peak_bytes"] for rank in found["ranks"]]
    assert len(peaks) == 4 and "with the optimiser state divided" in value_of(text, "memory")
    # Undivided but for the two moments, of which a process has one of four parts.
    assert max(peaks) + 6 * parameters == pytest.approx(alone["ranks"][0]["predicted_peak_bytes"], rel=0.5)
    assert min(peaks) >= (4 + 4 + 2) * parameters - 1
    sgd = planned(espalier, *flags, "--ranks", 4, "--optimizer", "sgd")[0]["distribution"]
    assert [rank["predicted_peak_bytes"] + 2 * parameters for rank in sgd["ranks"]] == pytest.approx(peaks)
    adapters = planned(espalier, *flags, "--ranks", 4, "--link-bandwidth", 2, "--lora-rank", 1)[0]["distribution"]
    assert 0 < adapters["reduced_bytes"] < found["reduced_bytes"] / 2
    for wrong in (["--ranks", 4, "--link-bandwidth", 0], ["--link-bandwidth", 2]):
        failed = espalier("plan", "--data", data, "--model", model, *wrong, check=False)
        assert failed.returncode != 0 and "--link-bandwidth" in failed.stderr


def test_what_a_process_of_several_takes_is_at_most_the_plan_of_its_rank(espalier, tmp_path, model):
    """The control is the plan of one process, whose optimiser state is not divided."""
    data, out = tmp_path / "rows.jsonl", tmp_path / "run"
    espalier("synth", "--out", data, "--trees", 6, "--depth", 4, "--branching", 3, "--vocab-size", 60, "--node-length", 12)
    flags = ["--data", data, "--model", model, "--no-calibration", "--token-budget", 500]
    peaks = [[rank["predicted_peak_bytes"] for rank in planned(espalier, *flags, "--ranks", ranks)[0]["distribution"]["ranks"]]
             for ranks in (1, 2)]  # fmt: skip
    variables = {"ESPALIER_PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    espalier("train", *flags, "--out", out, "--steps", 2, "--processes", 2, variables=variables)
    measured = [json.loads(line)["peak_tensor_bytes"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(measured) == 2 and 0.7 * peaks[1][0] < max(measured) <= peaks[1][0] < peaks[0][0], (measured, peaks)


def test_ranks_have_to_be_a_number_of_processes(espalier, data):
    for wrong in ("0", "-2", "two", "10000000"):
        failed = espalier("plan", "--data", data, "--ranks", wrong, check=False)
        assert failed.returncode != 0 and "ranks" in failed.stderr and wrong in failed.stderr
