# SPDX-License-Identifier: Apache-2.0
"""espalier import: each format's fields become the right fields of a row, token by token."""

import copy
import json
import math

import pytest

from espalier.errors import InputError
from espalier.io import atif
from espalier.__main__ import run as main
from espalier.io.fields import Tally
from espalier.io.formats import format_of

NAN = math.nan


@pytest.fixture
def imported(tmp_path, capsys):
    """Runs `import` on records (or raw bytes) in this process; returns (exit code, rows, what it printed)."""
    def run(records, *flags, name="records.jsonl", out="rows.jsonl"):
        path, output = tmp_path / name, tmp_path / out
        text = records if isinstance(records, bytes) else "".join(json.dumps(record) + "\n"
                                                                  for record in records).encode()
        path.write_bytes(text)
        output.unlink(missing_ok=True)
        code = main(["import", str(path), "-o", str(output), *flags])
        error = capsys.readouterr().err
        assert "Traceback" not in error
        assert not list(tmp_path.glob(".*")), "a temporary file was left behind"
        rows = [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else None
        return code, rows, error
    return run


def node(parent, ids, sampled=0, **fields):
    """A message node whose last `sampled` tokens the model sampled."""
    mask = [False] * (len(ids) - sampled) + [True] * sampled
    return {
        "parent": parent, "sampled": sampled > 0, "token_ids": ids, "mask": mask,
        "message": {"role": "user", "content": "ü"}
    } | fields


def episode(nodes, **fields):
    trace = {
        "version": 1, "id": "t1", "ok": True, "agent": {"config": {}, "name": "agent", "trainable": True},
        "nodes": nodes, "rewards": {"right": {"score": 3.0, "weight": 0.5}, "style": {"score": -1.0}, "unscored": None}
    }
    return {"id": "e1", "group": {"id": "g1"}, "task": {"type": "T", "data": {}, "hash": "h"}, "ok": True,
            "traces": [trace | fields]}


# Two branches that part after a sampled message: 1 2 | 3 4 5 | 6 7 and 1 2 | 3 4 5 | 8 9.
NODES = [node(None, [1, 2]),
         node(0, [3, 4, 5], 2, logprobs=[-0.5, -0.25], advantages=[1.0, 2.0], reference_logprobs=[-3.0, -4.0]),
         node(1, [6, 7], 1, logprobs=[-1.5], advantages=[3.0]),
         node(1, [8, 9], 1, logprobs=[-2.5], advantages=[4.0])]
BRANCHES = [
    {"trajectory_id": "t1/branch-0", "group_id": "g1", "reward": 0.5, "input_ids": [1, 2, 3, 4, 5, 6, 7],
     "loss_mask": [0, 0, 0, 1, 1, 0, 1], "logprobs": [None, None, None, -0.5, -0.25, None, -1.5],
     "ref_logprobs": [None, None, None, -3.0, -4.0, None, -5.0], "advantages": [0, 0, 0, 1, 2, 0, 3]},
    {"trajectory_id": "t1/branch-1", "group_id": "g1", "reward": 0.5, "input_ids": [1, 2, 3, 4, 5, 8, 9],
     "loss_mask": [0, 0, 0, 0, 0, 0, 1], "logprobs": [None, None, None, -0.5, -0.25, None, -2.5],
     "ref_logprobs": [None, None, None, -3.0, -4.0, None, -6.0], "advantages": [0, 0, 0, 1, 2, 0, 4]}]


def nodes_with(changes):
    nodes = copy.deepcopy(NODES)
    nodes[2]["reference_logprobs"], nodes[3]["reference_logprobs"] = [-5.0], [-6.0]
    for number, fields in changes.items():
        nodes[number] |= fields
    return nodes


def test_every_leaf_of_a_trace_is_a_row_and_shared_messages_carry_loss_once(imported):
    code, rows, error = imported([episode(nodes_with({}))])
    assert code == 0 and rows == BRANCHES
    assert "2 rows, 14 tokens, 4 with loss" in error
    used, ignored = error.split("used: ")[1].split("; ignored: ")
    for name in ("group.id", "traces[].rewards", "traces[].nodes[].parent", "traces[].nodes[].reference_logprobs"):
        assert name in used.split(", ") and name not in ignored
    assert "traces[].nodes[].message" in ignored and "traces[].nodes[].message" not in used
    assert error.count("at most 4 decimals") == 1
    # Control: with `sum` the shared message carries loss in both.
    _, both, _ = imported([episode(nodes_with({}))], "--shared-targets", "sum")
    assert [row["loss_mask"] for row in both] == [[0, 0, 0, 1, 1, 0, 1]] * 2
    assert both[1] | {"loss_mask": rows[1]["loss_mask"]} == rows[1]


def test_the_warning_about_rounding_is_about_rounded_numbers(imported):
    _, _, error = imported([episode(nodes_with({2: {"logprobs": [-1.50001]}}))])
    assert "decimals" not in error


def test_a_trace_alone_and_several_traces(imported):
    trace = episode(nodes_with({}))["traces"][0]
    _, rows, _ = imported([trace])
    assert rows == [{name: value for name, value in row.items() if name != "group_id"} for row in BRANCHES]
    pair = episode(nodes_with({}))
    pair["traces"].append({**trace, "id": 7, "nodes": nodes_with({})[:2], "rewards": {}})
    del pair["group"]
    _, rows, _ = imported([pair])
    assert [(row["trajectory_id"], row["group_id"]) for row in rows] == [("t1/branch-0", "h"), ("t1/branch-1", "h"),
                                                                         ("7", "h")]
    assert "reward" not in rows[2] and rows[2]["input_ids"] == [1, 2, 3, 4, 5]


def test_traces_that_are_no_training_data_are_left_out_and_counted(imported):
    good = episode(nodes_with({}))
    failed, judge, silent = (copy.deepcopy(good) for _ in range(3))
    failed["traces"][0]["ok"] = False
    judge["traces"][0]["agent"]["trainable"] = False
    for each in silent["traces"][0]["nodes"]:
        each.update(token_ids=[], mask=[], logprobs=[], advantages=None, reference_logprobs=None)
    code, rows, error = imported([good, failed, judge, silent])
    assert code == 0 and rows == BRANCHES
    assert "1 traces that failed left out (--include-failed includes them)" in error
    assert "1 traces of agents that are not trained left out" in error
    assert "1 traces without token ids left out" in error
    _, rows, _ = imported([good, failed], "--include-failed")
    assert rows == BRANCHES * 2


def test_an_attempt_at_compaction_is_a_row_only_if_it_was_accepted(imported):
    attempt = nodes_with({3: {"semantic_parents": [{"node": 1, "type": "compaction_attempt"}]}})
    _, rows, error = imported([episode(attempt)])
    assert rows == BRANCHES[:1] and "1 branches that were attempts at compaction left out" in error
    attempt[2]["semantic_parents"] = [{"node": 3, "type": "compaction"}]
    assert imported([episode(attempt)])[1] == BRANCHES


def test_streams_of_weights_of_a_trace(imported):
    weights = {1: {"loss_weights": {"rl": [9.0, 0.5, 2.0]}}}
    _, rows, _ = imported([episode(nodes_with(weights))])
    assert [row["loss_weights"] for row in rows] == [[0, 0, 0, 0.5, 2, 0, 0]]  # the others have none in this stream
    weights[0] = {"loss_weights": {"ce": [0.0, 0.25]}}
    code, _, error = imported([episode(nodes_with(weights))])
    assert code == 1
    assert "expected one stream of weights, or --loss-weights to name one of them, received ce, rl" in error
    _, rows, _ = imported([episode(nodes_with(weights))], "--loss-weights", "ce")
    assert [row["loss_weights"] for row in rows] == [[0, 0.25, 0, 0, 0, 0, 0]] and "logprobs" not in rows[0]


def test_what_traces_cannot_say_in_rows_is_refused(imported):
    images = episode(nodes_with({}), mm_token_type_id_map={"5": 1})
    code, _, error = imported([images])
    assert code == 1 and "expected text alone, since rows have tokens only, received token 5, a placeholder" in error
    assert imported([episode(nodes_with({}), mm_token_type_id_map={"50": 1})])[0] == 0  # a model that could see
    code, _, error = imported([episode(nodes_with({}), version=2)])
    assert code == 1 and "field `version`: expected traces of version 1, received 2" in error
    code, _, error = imported([episode(nodes_with({1: {"loss_weights": {"ref_kl": [0.0, 1.0, 1.0]}}}))])
    assert code == 1 and "expected weights of rl or ce, or --loss-weights ref_kl, received ref_kl alone" in error


BAD_NODES = {
    "a parent that comes later": ({1: {"parent": 3}},
                                  "field `nodes[1].parent`: expected null or the index of an earlier node (0 to 0), "
                                  "received 3"),
    "a mask of another length": (
        {1: {"mask": [True]}}, "field `nodes[1].mask`: expected 3 entries, one for each token of the node, received 1"),
    "log-probabilities of all tokens": ({1: {"logprobs": [-1] * 3}},
                                        "field `nodes[1].logprobs`: expected 2 entries"),
    "no log-probabilities of one node": ({2: {"logprobs": []}},
                                         "field `logprobs`: expected numbers (null only for tokens without loss), "
                                         "received null at index 6"),
    "NaN": ({2: {"logprobs": [NAN]}}, "received NaN at index 6"),
    "a probability": ({2: {"logprobs": [0.5]}}, "expected finite log-probabilities <= 0, received 0.5 at index 6"),
    "ids as text": ({0: {"token_ids": ["a", "b"]}},
                    'field `nodes[0].token_ids`: expected token ids from 0 to 2147483647, received "a" at index 0'),
    "an id below 0": ({0: {"token_ids": [1, -2]}}, "received -2 at index 1"),
    "an id beyond 32 bits": ({0: {"token_ids": [1, 2**31]}}, "received 2147483648 at index 1"),
    "a sampled message without tokens": (
        {2: {"token_ids": [], "mask": [], "logprobs": [], "advantages": None, "reference_logprobs": None}
         }, "field `nodes[2].token_ids`: expected the tokens of a sampled message, received none"),
}


@pytest.mark.parametrize("name", BAD_NODES)
def test_bad_traces_are_named_with_file_line_and_field(imported, tmp_path, name):
    changes, expected = BAD_NODES[name]
    good, bad = episode(nodes_with({})), episode(nodes_with(changes))
    code, rows, error = imported([good, bad])
    assert code == 1 and rows is None
    assert f"{tmp_path}/records.jsonl:2: traces[0]: " in error and expected in error, error
    code, rows, error = imported([good, bad, good], "--skip-bad-rows")
    assert code == 0 and rows == BRANCHES * 2 and "1 bad record skipped" in error and expected in error


SAMPLE = {
    "token_ids": [5, 6, 7, 8], "mask": [False, True, False, True], "logprobs": [0.0, -1.0, NAN, -2.0],
    "temperatures": [1.0] * 4, "env_name": "math", "ref_logprobs": [0.0, -1.5, 0.0, -2.5],
    "advantages": [0.0, 0.5, None, -0.5], "routed_experts": [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]
}


def test_samples_of_prime_rl(imported):
    code, rows, error = imported([SAMPLE])
    assert code == 0 and rows == [{
        "input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 0, 1], "logprobs": [None, -1.0, None, -2.0],
        "ref_logprobs": [None, -1.5, 0.0, -2.5], "advantages": [0.0, 0.5, 0.0, -0.5],
        "routed_experts": [[0, 1], [2, 3], [4, 5], [6, 7]]
    }]
    assert "ignored: env_name" in error and "temperature" not in error.split("used")[0]
    assert imported([SAMPLE | {"temperatures": [1.0, 0.7, 1.0, 0.7]}])[1] == [rows[0] | {"temperature": 0.7}]
    code, _, error = imported([SAMPLE | {"temperatures": [0.7, 0.7, 0.7, 0.8]}])
    assert code == 1 and "field `temperatures`: expected one temperature of all tokens with loss, received 0.7, 0.8" in error
    assert imported([SAMPLE | {"mm_token_type_ids": [0] * 4}])[1] == rows
    code, _, error = imported([SAMPLE | {"mm_token_type_ids": [0, 1, 1, 0]}])
    assert code == 1 and "field `mm_token_type_ids`: expected text alone" in error


def test_token_exports_of_prime_rl_and_their_weights(imported):
    nothing = [None] * 3
    export = {
        "schema_version": 1, "step": 3, "token_ids": [5, 6, 7], "loss_mask": [False, True, True],
        "inference_logprobs": [None, -1.0, -2.0], "trainer_logprobs": [-9.0] * 3, "advantages": [0.0, 1.0, 2.0],
        "rl_weights": nothing, "ce_weights": nothing, "ref_kl_weights": nothing
    }
    _, rows, error = imported([export])
    assert rows == [{
        "input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "logprobs": [None, -1.0, -2.0], "advantages": [0.0, 1.0, 2.0]
    }]
    assert "trainer_logprobs" in error.split("ignored: ")[1]
    _, rows, _ = imported([export | {"rl_weights": [3.0, 0.5, 0.0]}])
    assert rows[0]["loss_weights"] == [0, 0.5, 0] and "loss_mask" not in rows[0]
    _, rows, _ = imported([export | {"ce_weights": [3.0, 0.5, 0.0], "rl_weights": [1.0] * 3}], "--loss-weights", "ce")
    assert rows[0]["loss_weights"] == [0, 0.5, 0] and "logprobs" not in rows[0] and "advantages" not in rows[0]


def agent_step(number, prompt, completion, logprobs):
    metrics = {"prompt_token_ids": prompt, "completion_token_ids": completion, "logprobs": logprobs}
    return {"step_id": number, "source": "agent", "message": "m", "metrics": metrics}


STEPS = [{"step_id": 1, "source": "user", "message": "a"},
         agent_step(2, [1, 2], [3], [-0.1]),
         agent_step(3, [1, 2, 3, 4], [5, 6], [-0.2, -0.3]),
         agent_step(4, [1, 9], [7], [-0.4]),
         {"step_id": 5, "source": "agent", "message": "no call of a model"}]
TRAJECTORY = {"schema_version": "ATIF-v1.7", "session_id": "s", "agent": {"name": "x", "version": "1"}, "steps": STEPS}


def test_an_atif_trajectory_is_one_row_for_each_run_that_only_grows(imported):
    pretty = json.dumps(TRAJECTORY, indent=2).encode()
    code, rows, error = imported(pretty, name="trajectory.json")
    assert code == 0 and rows == [
        {"trajectory_id": "s/run-0", "input_ids": [1, 2, 3, 4, 5, 6], "loss_mask": [0, 0, 1, 0, 1, 1],
         "logprobs": [None, None, -0.1, None, -0.2, -0.3]},
        {"trajectory_id": "s/run-1", "input_ids": [1, 9, 7], "loss_mask": [0, 0, 1], "logprobs": [None, None, -0.4]}]
    assert "1 agent steps without token ids left out" in error
    _, rows, _ = imported(pretty, "--per-turn", name="trajectory.json")
    assert [(row["trajectory_id"], row["input_ids"], row["loss_mask"])
            for row in rows] == [("s/turn-0", [1, 2, 3], [0, 0, 1]), ("s/turn-1", [1, 2, 3, 4, 5,
                                                                                   6], [0, 0, 0, 0, 1, 1]),
                                 ("s/turn-2", [1, 9, 7], [0, 0, 1])]


def test_atif_steps_that_no_model_wrote_here_are_never_trained(imported):
    """Harbor's RFC 0001, 1.5 and later: copied context, and dispatch without a call of a model."""
    copied = agent_step(2, [1, 2], [3], [-0.1])
    later = agent_step(3, [1, 2, 3, 4], [5, 6], [-0.2, -0.3])
    expected = [{"trajectory_id": "s", "input_ids": [1, 2, 3, 4, 5, 6], "loss_mask": [0, 0, 0, 0, 1, 1],
                 "logprobs": [None, None, None, None, -0.2, -0.3]}]
    for mark in ({"is_copied_context": True}, {"llm_call_count": 0}):
        code, rows, error = imported([TRAJECTORY | {"steps": [STEPS[0], copied | mark, later]}])
        assert code == 0 and rows == expected
        assert "import: 1 agent steps without loss: copied from another trajectory (is_copied_context), or written" in error
    for mark in ({"is_copied_context": False}, {"llm_call_count": 1}, {}):  # control
        _, (row,), error = imported([TRAJECTORY | {"steps": [STEPS[0], copied | mark, later]}])
        assert row["loss_mask"] == [0, 0, 1, 0, 1, 1] and "without loss" not in error


def test_atif_steps_need_token_ids_of_prompt_and_completion(imported, models, tokenizer):
    """ATIF 1.3 has completions alone, which are no rows; beside steps that have both they are left out."""
    alone = {"source": "agent", "message": "b", "metrics": {"completion_token_ids": [5, 6]}}
    code, (row,), _ = imported([TRAJECTORY | {"steps": [STEPS[0], alone]}], "--model", str(models["native"]))
    assert code == 0 and tokenizer.decode(row["input_ids"]).endswith("assistant\nb<|im_end|>")
    code, (row,), error = imported([TRAJECTORY | {"steps": [*STEPS[:2], alone]}])
    assert code == 0 and row["input_ids"] == [1, 2, 3] and "1 agent steps without token ids left out" in error


def test_a_trajectory_has_the_name_of_its_document(imported):
    _, (row,), _ = imported([TRAJECTORY | {"steps": STEPS[:2], "trajectory_id": "document", "session_id": "run"}])
    assert row["trajectory_id"] == "document"


def test_what_the_chat_of_a_trajectory_has():
    parts = [{"type": "text", "text": "a"}]
    schema = {"type": "function", "function": {"name": "f"}}
    steps = [{"step_id": 1, "source": "user", "message": parts, "timestamp": "t"},
             {"source": "agent", "message": "old", "is_copied_context": True, "reasoning_content": "why"},
             {"source": "agent", "message": "", "reasoning_content": None, "llm_call_count": 2,
              "tool_calls": [{"tool_call_id": "c", "function_name": "f", "arguments": {"x": 1}, "extra": {}},
                             {"function_name": "g"}],
              "observation": {"results": [{"source_call_id": "c", "content": parts}, {"subagent_trajectory_ref": []}]}}]
    record = {"schema_version": "ATIF-v1.7", "session_id": 5, "agent": {"name": "n", "tool_definitions": [schema]},
              "steps": steps}  # fmt: skip
    tally = Tally()
    assert atif.chat_of(record, tally) == {
        "trajectory_id": 5, "tools": [schema], "messages": [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": "old", "reasoning_content": "why", "weight": 0},
            {"role": "assistant", "content": "", "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
                {"id": None, "type": "function", "function": {"name": "g", "arguments": {}}}]},
            {"role": "tool", "tool_call_id": "c", "content": parts},
            {"role": "tool", "tool_call_id": None, "content": None}]}  # fmt: skip
    assert set(tally.ignored()) == {"schema_version", "agent.name", "steps[].step_id", "steps[].timestamp",
                                    "steps[].tool_calls[].extra",
                                    "steps[].observation.results[].subagent_trajectory_ref"}  # fmt: skip
    assert list(tally.notes.values()) == [1]


def test_atif_without_token_ids_goes_through_prepare(imported, models, tokenizer):
    calls = {"tool_calls": [{"tool_call_id": "c1", "function_name": "f", "arguments": {"x": 1}}],
             "observation": {"results": [{"source_call_id": "c1", "content": "r"}]}}
    steps = [{"source": "system", "message": "s"}, {"source": "user", "message": "a"},
             {"source": "agent", "message": "b"} | calls, {"source": "agent", "message": "d"}]
    record = TRAJECTORY | {"steps": steps}
    code, rows, error = imported([record])
    assert code == 1 and rows is None and "expected --model DIR, whose tokenizer" in error
    code, (row,), _ = imported([record], "--model", str(models["native"]))
    assert code == 0 and row["trajectory_id"] == "s"
    assert tokenizer.decode(row["input_ids"]) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na<|im_end|>\n"
        '<|im_start|>assistant\nb<call>f {"x": 1}</call><|im_end|>\n'
        "<|im_start|>tool\nr<|im_end|>\n<|im_start|>assistant\nd<|im_end|>")


TEXTS = {
    "messages": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    "sharegpt": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    "prompt-completion": {"prompt": "a", "completion": "b"},
}


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("container", ["jsonl", "parquet"])
def test_text_goes_through_prepare(imported, tmp_path, models, tokenizer, kind, container):
    data = [TEXTS[kind]]
    if container == "parquet":
        data = parquet(tmp_path, data)
    for flags in ([], ["--from", kind]):
        code, (row,), _ = imported(data, "--model", str(models["native"]), *flags)
        assert code == 0
        assert tokenizer.decode(row["input_ids"]).endswith("<|im_start|>assistant\nb<|im_end|>")


def test_preference_pairs_in_text_are_two_rows(imported, models, tokenizer):
    pairs = [{"prompt": "a", "chosen": "good", "rejected": "bad"},
             {"id": 5, "chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "good"}],
              "rejected": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bad"}]}]
    code, rows, _ = imported(pairs, "--model", str(models["native"]))
    assert code == 0
    assert [(row["pair_id"], row["chosen"]) for row in rows] == [("records.jsonl:1", True), ("records.jsonl:1", False),
                                                                 ("5", True), ("5", False)]
    _, again, _ = imported(pairs[1:] * 2, "--model", str(models["native"]))
    assert [row["pair_id"] for row in again] == ["5", "5", "5~2", "5~2"]
    texts = [
        tokenizer.decode([token for token, loss in zip(row["input_ids"], row["loss_mask"]) if loss]) for row in rows
    ]
    assert texts == ["good<|im_end|>", "bad<|im_end|>"] * 2
    code, _, error = imported(pairs, "--model", str(models["native"]), "--per-turn")
    assert code == 1 and "expected a chat (--per-turn), received a preference pair" in error


def parquet(folder, records):
    """The bytes of a Parquet file."""
    import pyarrow
    from pyarrow import parquet as format

    path = folder / "made.parquet"
    format.write_table(pyarrow.Table.from_pylist(records), path)
    return path.read_bytes()


ROW = {
    "input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "logprobs": [None, -1.0, -2.0], "reward": 1.0, "group_id": "ü",
    "trajectory_id": "z"
}


def test_parquet_of_rows_and_of_other_formats(imported, tmp_path):
    code, rows, error = imported(parquet(tmp_path, [ROW, {"input_ids": [4, 5], "loss_mask": None}]),
                                 name="rows.parquet")
    assert code == 0 and rows == [ROW, {"input_ids": [4, 5]}]
    assert "ignored" not in error
    skyrl = {"prompt_token_ids": [1], "response_ids": [2, 3], "loss_masks": [1, 0], "rewards": 0.5}
    _, rows, _ = imported(parquet(tmp_path, [skyrl]), "--from", "parquet", name="x.parquet")
    assert rows == [{"reward": 0.5, "input_ids": [1, 2, 3], "loss_mask": [0, 1, 0]}]
    code, _, error = imported([ROW], "--from", "parquet")
    assert code == 1 and "expected a Parquet file" in error


def test_sft_data_of_trl_and_skyrl_are_rows(imported):
    labels = {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "attention_mask": [1, 1, 1]}
    expected = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}
    for record in (labels, {"input_ids": [1, 2, 3],
                            "completion_mask": [0, 1, 1]}, {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}):
        for flags in ([], ["--from", "trl"], ["--from", "skyrl"]):
            assert imported([record], *flags)[1] == [expected]
    code, _, error = imported([labels | {"labels": [2, 3, -100]}])
    assert code == 1 and "(the next token: give unshifted labels)" in error


PACKED = {"input_ids": [1, 2, 3, 4, 5], "labels": [-100, 2, 3, 4, 5]}
TWO = [{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}, {"input_ids": [4, 5], "loss_mask": [0, 1]}]
DOCUMENTS = {
    "seq_lengths": [3, 2], "attention_mask": [1, 1, 1, 2, 2], "position_ids": [0, 1, 2, 0, 1], "seq_idx": [0, 0, 0, 1, 1],
    "document_ids": [7, 7, 7, 9, 9], "cu_seq_lens_q": [0, 3, 5], "cu_seq_lens_k": [0, 3, 5], "cu_seqlens": [0, 3, 3, 5],
}  # fmt: skip


@pytest.mark.parametrize("name", [*DOCUMENTS, "all of them"])
def test_packed_rows_become_a_row_for_each_document(imported, name):
    fields = DOCUMENTS if name == "all of them" else {name: DOCUMENTS[name]}
    code, rows, error = imported([PACKED | fields])
    assert code == 0 and rows == TWO and "ignored" not in error
    assert all(field in error.split("used: ")[1] for field in fields)
    _, rows, _ = imported([PACKED])  # control
    assert rows == [{"input_ids": [1, 2, 3, 4, 5], "loss_mask": [0, 1, 1, 1, 1]}]


def test_all_lists_of_tokens_are_divided_with_a_packed_row(imported):
    per_token = {"logprobs": [0, -1, -2, None, -4], "advantages": [0, 1, 2, 3, 4], "ref_log_prob": [0, -5, -6, -7, -8],
                 "routed_experts": [[0], [1], [2], [3], [4]], "ref_topk_ids": [[], [1], [2], [], [4]],
                 "ref_topk_logprobs": [[], [-1], [-2], [], [-4]]}  # fmt: skip
    _, rows, _ = imported([PACKED | per_token | {"seq_lengths": [3, 2], "trajectory_id": "t", "group_id": 1}])
    assert rows == [
        {"trajectory_id": "t/document-0", "group_id": "1", **TWO[0], "logprobs": [None, -1, -2], "ref_logprobs": [None, -5, -6],
         "advantages": [0, 1, 2], "ref_topk_ids": [[], [1], [2]], "ref_topk_logprobs": [[], [-1], [-2]],
         "routed_experts": [[0], [1], [2]]},
        {"trajectory_id": "t/document-1", "group_id": "1", **TWO[1], "logprobs": [None, -4], "ref_logprobs": [None, -8],
         "advantages": [3, 4], "ref_topk_ids": [[], [4]], "ref_topk_logprobs": [[], [-4]], "routed_experts": [[3], [4]]}]
    _, rows, _ = imported([{"input_ids": [1, 2, 3], "loss_weights": [1, 0.5, 2], "seq_lengths": [1, 2]}])
    assert [row["loss_weights"] for row in rows] == [[0], [0, 2]]


@pytest.mark.parametrize("mask, lengths", [
    ([0, 0, 1, 1, 1, 2, 2, 0], [3, 2]), ([0, 0, 1, 1, 1, 2, 2, 0], [5, 3]), ([False, False, *[True] * 5, False], [3, 2]),
    ([0, 0, 1, 1, 1, 1, 1, 0], [1, 4, 2, 1])])  # fmt: skip
def test_padding_is_cut_at_both_ends(imported, mask, lengths):
    padded = {"input_ids": [0, 0, 1, 2, 3, 4, 5, 0], "completion_mask": [0, 0, 0, 1, 1, 1, 1, 0], "attention_mask": mask,
              "labels": [-100, -100, -100, 2, 3, 4, 5, 0]}  # fmt: skip
    code, rows, error = imported([padded | {"seq_lengths": lengths}])
    assert code == 0 and rows == TWO and "ignored" not in error
    plain = [int(bool(value)) for value in mask]
    reward = {"attention_mask": plain, "reward": 1.0, "position_ids": [0, 0, 0, 1, 2, 3, 4, 0]}
    code, rows, error = imported([padded | reward])
    assert code == 0 and "ignored" not in error
    assert rows == [{"reward": 1.0, "input_ids": [1, 2, 3, 4, 5], "loss_mask": [0, 1, 1, 1, 1]}]


def test_fields_that_name_no_documents_do_no_harm(imported):
    whole = [{"input_ids": [1, 2, 3, 4, 5], "loss_mask": [0, 1, 1, 1, 1], "reward": 1.0}]
    for fields in ({"attention_mask": [1] * 5}, {"position_ids": [0, 1, 2, 3, 4]}, {"seq_lengths": [5]}, {"seq_idx": [0] * 5}):
        code, rows, error = imported([PACKED | {"reward": 1.0} | fields])
        assert code == 0 and "ignored" not in error and rows == whole
    for fields in ({"position_ids": [3, 4, 5, 6, 7]}, {"position_ids": [[0, 1, 0, 1, 2]]}, {"document_ids": ["a", "b"]},
                   {"seq_lengths": 5}, {"position_ids": [0, 0, 2, 0, 1]}):  # fmt: skip
        code, rows, error = imported([PACKED | {"reward": 1.0} | fields])
        assert code == 0 and f"ignored: {next(iter(fields))}" in error and rows == whole


def test_packed_rows_in_parquet_and_safetensors(imported, tmp_path):
    import numpy as np
    from safetensors.numpy import save_file

    data = parquet(tmp_path, [PACKED | {"attention_mask": [1, 1, 1, 2, 2]}])
    assert imported(data, name="rows.parquet")[1] == TWO
    save_file({"offsets": np.array([0, 5]), "input_ids": np.arange(1, 6, dtype=np.int32),
               "attention_mask": np.array([1, 1, 1, 2, 2])}, tmp_path / "made.safetensors")  # fmt: skip
    _, rows, error = imported((tmp_path / "made.safetensors").read_bytes(), name="rows.safetensors")
    assert rows == [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}] and "ignored" not in error


STEP = {"content": "x", "rewards": 1.0, "input_lengths": 3, "token_ids": [1, 2, 3, 0], "token_loss_mask": [0, 0, 1, 0],
        "sample_loss_mask": 1.0, "advantages": [0, 0, 0.5, 0], "generation_logprobs": [0, 0, -0.5, 0],
        "prev_logprobs": [0, 0, -0.4, 0], "idx": 0}  # fmt: skip
STEP_ROW = {"reward": 1.0, "input_ids": [1, 2, 3], "loss_mask": [0, 0, 1], "logprobs": [None, 0, -0.5],
            "advantages": [0, 0, 0.5]}  # fmt: skip


def test_steps_of_nemo_rl(imported):
    code, rows, error = imported([STEP])
    assert code == 0 and rows == [STEP_ROW] and "import: nemo-rl: 1 row, 3 tokens, 1 with loss" in error
    assert error.split("ignored: ")[1].splitlines()[0] == "content, prev_logprobs, idx"
    # As the trainer writes it: every field is a list of one.
    assert imported([{name: value if name == "idx" else [value] for name, value in STEP.items()}])[1] == rows
    batch = {name: value if name == "idx" else [value, value] for name, value in STEP.items()}
    assert imported([batch], "--from", "nemo-rl")[1] == rows * 2
    # With dynamic sampling, rewards are those of other samples.
    assert imported([STEP | {"filtered_rewards": 0.25}])[1] == [STEP_ROW | {"reward": 0.25}]
    _, rows, _ = imported([STEP | {"rewards": NAN, "generation_logprobs": None, "advantages": -2}])
    assert rows == [{"advantage": -2, "input_ids": [1, 2, 3], "loss_mask": [0, 0, 1], "logprobs": [None, 0, -0.4]}]


def test_samples_of_nemo_rl_without_loss_are_left_out(imported):
    code, rows, error = imported([STEP | {"sample_loss_mask": 0.0}, STEP])
    assert code == 0 and rows == [STEP_ROW] and "1 samples left out whose sample_loss_mask is 0" in error
    _, (row,), _ = imported([STEP | {"sample_loss_mask": 0.5}])
    assert row["loss_weights"] == [0, 0, 0.5] and "loss_mask" not in row
    for fields, expected in (({"input_lengths": 5}, "field `input_lengths`: expected a number from 1 to 4"),
                             ({"input_lengths": 0}, "received 0"), ({"token_loss_mask": [0, 1]}, "expected 4 entries"),
                             ({"generation_logprobs": [0] * 3}, "field `generation_logprobs`: expected 4 entries"),
                             ({"sample_loss_mask": "x"}, "field `sample_loss_mask`: expected a finite number")):  # fmt: skip
        code, _, error = imported([STEP | fields])
        assert code == 1 and expected in error, error


USER = {"role": "user", "content": "a"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("good", "bad"))
DETECTED = {
    "prompt-completion": [
        {"query": "a", "response": "good"}, {"question": "a", "answer": "good"}, {"input": [USER], "output": [GOOD]},
        {"question": "a", "answer": "good", "id": 4, "source": "x"}],
    "preference": [
        {"question": "a", "chosen": "good", "rejected": "bad"}, {"query": "a", "chosen": [GOOD], "rejected": [BAD]},
        {"instruction": "a", "input": "", "chosen": "good", "rejected": "bad"},
        {"input": {"messages": [USER]}, "preferred_output": [GOOD], "non_preferred_output": [BAD]},
        {"question": "a", "answer": "b", "chosen": "good", "rejected": "bad"}],
    "messages": [
        {"messages": [USER, GOOD], "rejected_response": "bad"}, {"messages": [USER], "response": "good"},
        {"messages": [USER, GOOD], "question": "a", "answer": "b"},
        {"messages": [USER, GOOD], "chosen": None, "rejected": None}],
    "rows": [{"input_ids": [1, 2], "question": "a", "answer": "b"}, {"input_ids": [1, 2], "query": "a", "response": "b"}],
    "nemo-rl": [STEP],
    "samples": [{"token_ids": [1], "mask": [1]}],
}  # fmt: skip


@pytest.mark.parametrize("name", DETECTED)
def test_formats_are_detected_by_fields(name):
    for record in DETECTED[name]:
        assert format_of(record, "here").name == name, record
        assert format_of(record, "here", "parquet").name == name, record


@pytest.mark.parametrize("record, fits", [
    ({"messages": [USER, GOOD], "chosen": [GOOD], "rejected": [BAD]}, "--from messages or --from preference"),
    ({"messages": [USER, GOOD], "prompt": "a", "completion": "b"}, "--from messages or --from prompt-completion"),
    ({"input_ids": [1], "messages": [USER]}, "--from rows or --from messages")])
def test_records_of_two_formats_ask_for_one(record, fits):
    with pytest.raises(InputError, match=fits):
        format_of(record, "here")


def test_pairs_of_token_ids(imported):
    _, rows, _ = imported([{"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4, 5]}])
    assert rows == [{"pair_id": "records.jsonl:1", "chosen": True, "input_ids": [1, 2, 3], "loss_mask": [0, 0, 1]}, {
        "pair_id": "records.jsonl:1", "chosen": False, "input_ids": [1, 2, 4, 5], "loss_mask": [0, 0, 1, 1]
    }]


def test_pairs_without_names_get_one_each(imported):
    _, rows, _ = imported([{"prompt_ids": [[1], [1]], "chosen_ids": [[2], [3]], "rejected_ids": [[4], [5]]}])
    assert [(row["pair_id"], row["input_ids"]) for row in rows] == [
        ("records.jsonl:1", [1, 2]), ("records.jsonl:1", [1, 4]), ("records.jsonl:1/1", [1, 3]),
        ("records.jsonl:1/1", [1, 5])]


def test_files_of_what_the_converters_take(imported):
    """The converters have their own tests; here is that files reach them."""
    tinker = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}, "loss_fn_inputs": {
            "target_tokens": {"data": [2, 3], "dtype": "int64", "shape": [2]}, "weights": {"data": [0.0, 1.0]}
        }
    }
    slime = {"tokens": [1, 2, 3], "response_length": 1, "group_index": 4, "index": 9, "reward": 2}
    verl = {"prompts": [[0, 1, 2]], "responses": [[3, 0]], "attention_mask": [[0, 1, 1, 1, 0]], "uid": ["u"]}
    areal = {
        "input_ids": [1, 2, 3], "loss_mask": [0, 0, 1], "versions": [-1, -1, 4], "logprobs": [0.0, 0.0, -1.0],
        "rewards": 1.0
    }
    base = {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1]}
    for name, record, more in (("tinker", tinker, {}), ("slime", slime,
                                                        {"group_id": "4", "trajectory_id": "9",
                                                         "reward": 2.0}), ("verl", verl, {"group_id": "u"}),
                               ("areal", areal, {"reward": 1.0, "logprobs": [None, 0.0, -1.0]})):
        for flags in ([], ["--from", name]):
            code, rows, error = imported([record], *flags)
            assert code == 0 and rows == [base | more], error
            assert f"import: {name}: 1 row" in error
