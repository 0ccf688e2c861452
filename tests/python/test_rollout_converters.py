# SPDX-License-Identifier: Apache-2.0
"""espalier.io: what trainers hold in memory becomes rows, whatever holds it and on whichever side it is padded."""

import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from conftest import seed_of
from espalier.io import InputError, from_areal, from_skyrl, from_slime, from_tinker, from_trl, from_verl, write_rows

NAN = math.nan
KINDS = {"lists": lambda value: value, "NumPy": np.array, "PyTorch": torch.tensor}


def held(kind, data):
    """The lists of a dict as arrays of one kind."""
    return {
        name: KINDS[kind](value) if isinstance(value, list) and not isinstance(value[0], str) else value
        for name, value in data.items()
    }


# Two samples: 1 2 | 3 4 (5 is what a tool answered) 6, and 7 | 8, padded with 0 as verl does.
VERL = {
    "prompts": [[1, 2], [0, 7]], "responses": [[3, 4, 5, 6], [8, 0, 0, 0]], "input_ids": [[1, 2, 3, 4, 5, 6],
                                                                                          [0, 7, 8, 0, 0, 0]],
    "attention_mask": [[1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 0, 0]], "position_ids": [[0, 1, 2, 3, 4, 5],
                                                                                 [0, 0, 1, 2, 3,
                                                                                  4]], "response_mask": [[1, 1, 0, 1],
                                                                                                         [1, 0, 0, 0]],
    "rollout_log_probs": [[-0.25, -0.5, 0.0, -1.0],
                          [-2.0, 0.0, 0.0,
                           0.0]], "old_log_probs": [[-9.0] * 4, [-9.0] * 4], "ref_log_prob": [[-0.75, -1.5, 0.0, -3.0],
                                                                                              [-4.0, 0.0, 0.0, 0.0]],
    "advantages": [[1.0, 2.0, 0.0, 3.0], [-1.0, 0.0, 0.0, 0.0]], "rm_scores": [[0.0, 0.0, 0.0, 1.5],
                                                                               [0.25, 0.0, 0.0,
                                                                                0.0]], "uid": ["a", "b"]
}
VERL_ROWS = [{
    "group_id": "a", "reward": 1.5, "input_ids": [1, 2, 3, 4, 5, 6], "loss_mask": [0, 0, 1, 1, 0, 1],
    "logprobs": [None, None, -0.25, -0.5, 0.0, -1.0], "ref_logprobs": [None, None, -0.75, -1.5, 0.0, -3.0],
    "advantages": [0.0, 0.0, 1.0, 2.0, 0.0, 3.0]
}, {
    "group_id": "b", "reward": 0.25, "input_ids": [7, 8], "loss_mask": [0, 1], "logprobs": [None, -2.0],
    "ref_logprobs": [None, -4.0], "advantages": [0.0, -1.0]
}]


class TensorDict(dict):
    """As the one of a DataProto in what matters here."""

    def __bool__(self):
        raise RuntimeError("Converting a tensordict to boolean value is not permitted")


@pytest.mark.parametrize("kind", KINDS)
def test_verl(kind):
    data = held(kind, VERL)
    assert from_verl(data) == VERL_ROWS
    assert from_verl({name: value for name, value in data.items() if name != "input_ids"}) == VERL_ROWS
    proto = SimpleNamespace(batch=TensorDict({name: value for name, value in data.items() if name != "uid"}),
                            non_tensor_batch={"uid": np.array(["a", "b"], dtype=object)}, meta_info={})
    assert from_verl(proto) == VERL_ROWS


def test_padding_on_the_left_must_go_by_the_mask_not_by_the_place():
    """Control: were the prompt taken to be padded on the right, tokens and log-probabilities would not fit."""
    wrong = {**VERL, "attention_mask": [[1] * 6, [1, 0, 1, 0, 0, 0]]}
    with pytest.raises(
            InputError,
            match="sample 1: field `attention_mask`: expected padding at the ends only, received a 0 at index 1"):
        from_verl(wrong)
    shifted = {**VERL, "attention_mask": [[1] * 6, [1, 1, 0, 0, 0, 0]]}
    with pytest.raises(InputError, match="field `response_mask`: expected 0 on padding, received 1 at index 0"):
        from_verl(shifted)


def without_reward(rows):
    return [{name: value for name, value in row.items() if name != "reward"} for row in rows]


@pytest.mark.parametrize("kind", KINDS)
def test_rewards_of_tokens_become_those_of_turns(kind):
    """Also one on what a tool answered (5), which counts for the turn before it, and one on padding, which counts for
    none."""
    scores = [[0.5, 0.25, 2.0, 1.5], [0.25, 9.0, 0.0, 0.0]]
    expected = [{**row, "turn_rewards": rewards} for row, rewards in zip(without_reward(VERL_ROWS), ([2.75, 1.5], [0.25]))]
    assert from_verl(held(kind, {**VERL, "rm_scores": scores}), turn_rewards=True) == expected
    assert [row["reward"] for row in from_verl(held(kind, {**VERL, "rm_scores": scores}))] == [4.25, 0.25]
    # 1 2 | 3 (4 is what a tool answered) 5, and 1 2 | 6.
    outputs = {**SKYRL, "rewards": [[0.5, 0.25, 2.0], [1.0]]}
    assert [row["turn_rewards"] for row in from_skyrl(outputs, turn_rewards=True)] == [[0.75, 2.0], [1.0]]
    assert [row["reward"] for row in from_skyrl(outputs)] == [2.75, 1.0]
    # What is given once for the row stays so.
    assert [row["reward"] for row in from_skyrl({**SKYRL, "rewards": [2.0, 0.5]}, turn_rewards=True)] == [2.0, 0.5]


def test_rewards_of_turns_that_are_wrong():
    with pytest.raises(InputError, match="field `rm_scores`: expected 4 entries, one for each token of responses, received 3"):
        from_verl({**VERL, "rm_scores": [[0.0] * 3] * 2}, turn_rewards=True)
    with pytest.raises(InputError, match="sample 0: field `rewards`: expected a finite number"):
        from_skyrl({**SKYRL, "rewards": [[0.5, NAN, 2.0], [1.0]]}, turn_rewards=True)
    with pytest.raises(InputError, match="field `is_last_step`: expected whole trajectories with turn rewards"):
        from_skyrl({**SKYRL, "is_last_step": [False, True]}, turn_rewards=True)


def test_verl_without_what_may_be_missing():
    few = {name: VERL[name] for name in ("prompts", "responses", "attention_mask")}
    assert from_verl(few) == [{"input_ids": [1, 2, 3, 4, 5, 6], "loss_mask": [0, 0, 1, 1, 1, 1]},
                              {"input_ids": [7, 8], "loss_mask": [0, 1]}]
    rows = from_verl({**few, "old_log_probs": VERL["rollout_log_probs"], "token_level_rewards": VERL["rm_scores"]})
    assert rows[1] == {"input_ids": [7, 8], "loss_mask": [0, 1], "logprobs": [None, -2.0], "reward": 0.25}
    with pytest.raises(
            InputError,
            match="field `attention_mask`: expected a mask of the tokens that are not padding, received none"):
        from_verl({name: few[name] for name in ("prompts", "responses")})


def test_routes_of_verl_are_those_of_the_tokens_and_the_last_takes_its_neighbours():
    routes = torch.arange(1, 2 * 6 * 2 * 2 + 1).reshape(2, 6, 2, 2)  # [B, P + R, layers, chosen]
    routes[0, 5] = 0  # never encoded
    routes[1, 2] = 0
    rows = from_verl({**VERL, "routed_experts": routes})
    assert rows[0]["routed_experts"] == [[4 * t + i for i in range(1, 5)] for t in (0, 1, 2, 3, 4, 4)]
    assert rows[1]["routed_experts"] == [list(range(29, 33))] * 2
    routes[0, 3] = 0
    with pytest.raises(InputError, match="sample 0: field `routed_experts`: .*, received only zeros for token 3"):
        from_verl({**VERL, "routed_experts": routes})


@pytest.mark.parametrize("value, what", [(NAN, "NaN"), (-math.inf, "-Infinity"), (math.inf, "Infinity")])
def test_numbers_that_are_not_finite_are_null_outside_the_loss_and_refused_in_it(value, what):
    logprobs = [[-0.25, -0.5, value, -1.0], [-2.0, value, value, value]]
    rows = from_verl({**VERL, "rollout_log_probs": logprobs})
    assert rows[0] == VERL_ROWS[0] | {"logprobs": [None, None, -0.25, -0.5, None, -1.0]} and rows[1] == VERL_ROWS[1]
    logprobs[1][0] = value
    with pytest.raises(
            InputError,
            match=rf"sample 1: field `logprobs`: expected numbers \(null only for tokens without loss\), received {what} "
            "at index 1"):
        from_verl({**VERL, "rollout_log_probs": logprobs})


@pytest.mark.parametrize("convert, data", [
    (from_verl, {**VERL, "multi_modal_inputs": np.array([{}, {"pixel_values": torch.ones(2)}], dtype=object)}),
    (from_slime, [{"tokens": [1, 2], "response_length": 1, "multimodal_train_inputs": {"pixel_values": [1.0]}}]),
    (from_trl, {"prompt_ids": [1], "completion_ids": [2], "pixel_values": torch.ones(2, 2)})])
def test_images_are_refused(convert, data):
    with pytest.raises(InputError, match="expected text alone, since rows have tokens only, received images"):
        convert(data)


def test_a_column_of_another_batch_is_refused():
    with pytest.raises(InputError, match="field `uid`: expected 2 entries, one for each sample, received 3"):
        from_verl({**VERL, "uid": ["a", "b", "c"]})
    with pytest.raises(InputError, match="field `rewards`: expected 2 entries, one for each sample, received 3"):
        from_skyrl({**SKYRL, "rewards": [1.0, 2.0, 3.0]})


SKYRL = {
    "prompt_token_ids": [[1, 2], [1, 2]], "response_ids": [[3, 4, 5], [6]], "loss_masks": [[1, 0, 1], [1]],
    "rewards": [[0.0, 0.0, 2.0], [0.5]], "rollout_logprobs": [[-1.0, 0.0, -2.0], [-3.0]],
    "stop_reasons": ["stop", "stop"], "trajectory_ids": [
        SimpleNamespace(instance_id="q", repetition_id=0),
        SimpleNamespace(instance_id="q", repetition_id=1)
    ]
}


def test_skyrl():
    rows = [{
        "trajectory_id": "q_0", "group_id": "q", "reward": 2.0, "input_ids": [1, 2, 3, 4, 5],
        "loss_mask": [0, 0, 1, 0, 1], "logprobs": [None, None, -1.0, 0.0, -2.0]
    }, {
        "trajectory_id": "q_1", "group_id": "q", "reward": 0.5, "input_ids": [1, 2, 6], "loss_mask": [0, 0, 1],
        "logprobs": [None, None, -3.0]
    }]
    assert from_skyrl(SKYRL) == rows
    named = {**SKYRL, "trajectory_ids": ["q_0", "q_1"], "rewards": torch.tensor([2.0, 0.5])}
    assert from_skyrl(named) == rows
    routes = [np.arange(8).reshape(4, 1, 2), np.arange(4).reshape(2, 1, 2)]  # of all tokens but the last
    assert [row["routed_experts"] for row in from_skyrl({**SKYRL, "rollout_expert_indices": routes})] == [
        [[0, 1], [2, 3], [4, 5], [6, 7], [6, 7]], [[0, 1], [2, 3], [2, 3]]]
    with pytest.raises(
            InputError,
            match=
            "sample 1: field `rollout_logprobs`: expected 1 entries, one for each token of response_ids, received 2"):
        from_skyrl({**SKYRL, "rollout_logprobs": [[-1.0, 0.0, -2.0], [-3.0, -1.0]]})


def test_steps_of_a_skyrl_trajectory_share_its_reward():
    steps = {**SKYRL, "trajectory_ids": ["q_0", "q_0"], "is_last_step": [False, True], "rewards": [0.0, 0.5]}
    assert [(row["trajectory_id"], row["reward"]) for row in from_skyrl(steps)] == [("q_0/step-0", 0.5),
                                                                                    ("q_0/step-1", 0.5)]
    with pytest.raises(InputError, match="field `is_last_step`"):
        from_skyrl({**steps, "is_last_step": [True, False]})


@pytest.mark.parametrize("kind", KINDS)
def test_areal(kind):
    batch = held(
        kind, {
            "input_ids": [[1, 2, 3], [4, 5, 0]], "attention_mask": [[1, 1, 1], [1, 1, 0]],
            "loss_mask": [[0, 0, 1], [0, 1, 0]], "logprobs": [[0.0, 0.0, -1.0], [0.0, -2.0, 0.0]],
            "versions": [[-1, -1, 3], [-1, 3, 0]], "rewards": [1.0, 0.0]
        })
    assert from_areal(batch, group_ids=["a", 7]) == [
        {"group_id": "a", "reward": 1.0, "input_ids": [1, 2, 3], "loss_mask": [0, 0, 1], "logprobs": [None, 0.0, -1.0]},
        {"group_id": "7", "reward": 0.0, "input_ids": [4, 5], "loss_mask": [0, 1], "logprobs": [None, -2.0]}]
    del batch["attention_mask"]
    with pytest.raises(InputError, match="field `attention_mask`: expected a mask of the tokens that are not padding"):
        from_areal(batch)


@dataclass
class Sample:
    """As slime has it, with the fields that matter."""

    tokens: list
    response_length: int
    loss_mask: list | None = None
    rollout_log_probs: list | None = None
    reward: float | dict | None = None
    group_index: int | None = None
    index: int | None = None
    remove_sample: bool = False
    rollout_routed_experts: np.ndarray | None = None
    metadata: dict = field(default_factory=dict)


def test_slime():
    sample = Sample([1, 2, 3, 4],
                    2, [1, 0], [-1.0, -2.0],
                    0.5,
                    3,
                    11,
                    rollout_routed_experts=np.arange(6).reshape(3, 1, 2))
    row = {"trajectory_id": "11", "group_id": "3", "reward": 0.5, "input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 0],
           "logprobs": [None, None, -1.0, -2.0], "routed_experts": [[0, 1], [2, 3], [4, 5], [4, 5]]}
    assert from_slime([[sample], [vars(sample)]]) == [row, row]
    assert from_slime([Sample([1, 2], 1)]) == [{"input_ids": [1, 2], "loss_mask": [0, 1]}]
    assert from_slime([Sample([1, 2], 1, remove_sample=True)])[0]["loss_mask"] == [0, 0]
    rewarded = Sample([1, 2], 1, reward={"score": 2.0, "length": 9.0})
    assert from_slime([rewarded], reward_key="score")[0]["reward"] == 2.0
    with pytest.raises(
            InputError,
            match=
            "expected a number, or reward_key to name one of its entries, received an object with `score`, `length`"):
        from_slime([rewarded])
    with pytest.raises(InputError,
                       match="sample 1: field `response_length`: expected a number from 0 to 2 .*, received 3"):
        from_slime([Sample([1, 2], 1), Sample([1, 2], 3)])


class TensorData:
    """As Tinker's: an array with a method tolist."""

    def __init__(self, values):
        self.values = values

    def tolist(self):
        return self.values


def datum(tokens, **inputs):
    chunks = [
        SimpleNamespace(type="encoded_text", tokens=tokens[:1]),
        SimpleNamespace(type="encoded_text", tokens=tokens[1:])
    ]
    return SimpleNamespace(model_input=SimpleNamespace(chunks=chunks),
                           loss_fn_inputs={name: TensorData(values) for name, values in inputs.items()})


def test_tinker_is_shifted_by_one():
    made = datum([1, 2, 3],
                 target_tokens=[2, 3, 4],
                 weights=[0.0, 1.0, 1.0],
                 logprobs=[0.0, -1.0, -2.0],
                 advantages=[0.0, 0.5, 0.25])
    row = {
        "input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1], "logprobs": [None, 0.0, -1.0, -2.0],
        "advantages": [0.0, 0.0, 0.5, 0.25]
    }
    assert from_tinker([made]) == [row]
    # Control: arrays that are not shifted are seen.
    with pytest.raises(
            InputError,
            match=r"expected the token that follows in model_input \(3\) where there is loss, received 2 at index 1"):
        from_tinker([datum([1, 2, 3], target_tokens=[1, 2, 3], weights=[0.0, 1.0, 1.0])])
    plain = {
        "model_input": torch.tensor([1, 2, 3]),
        "loss_fn_inputs": {"target_tokens": np.array([2, 3, 4]), "mask": [0, 1, 1]}
    }
    assert from_tinker([plain]) == [{"input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1]}]


def test_weights_of_tinker():
    weighted = datum([1, 2], target_tokens=[2, 3], weights=[0.5, 2.0])
    assert from_tinker([weighted]) == [{"input_ids": [1, 2, 3], "loss_weights": [0, 0.5, 2.0]}]
    credited = datum([1, 2], target_tokens=[2, 3], advantages=[0.0, -2.0], logprobs=[0.0, -1.0])
    assert from_tinker([credited])[0]["loss_mask"] == [0, 0, 1]
    assert from_tinker([datum([1, 2], target_tokens=[2, 3])])[0]["loss_mask"] == [0, 1, 1]
    with pytest.raises(InputError, match="datum 1: field `loss_fn_inputs.weights`: expected 2 entries"):
        from_tinker([weighted, datum([1, 2], target_tokens=[2, 3], weights=[1.0])])
    image = SimpleNamespace(model_input=SimpleNamespace(chunks=[SimpleNamespace(type="image")]),
                            loss_fn_inputs={"target_tokens": []})
    with pytest.raises(InputError, match="expected chunks of tokens only, received .*image"):
        from_tinker([image])


@pytest.mark.parametrize("kind", KINDS)
def test_trl_inputs_of_grpo(kind):
    inputs = held(kind, {
        "prompt_ids": [[0, 1], [2, 3]], "prompt_mask": [[0, 1], [1, 1]], "completion_ids": [[4, 5, 6], [7, 0, 0]],
        "completion_mask": [[1, 1, 1], [1, 0, 0]], "tool_mask": [[1, 0, 1], [1, 1, 1]], "advantages": [0.5, -0.5],
        "old_per_token_logps": [[-9.0] * 3] * 2, "sampling_per_token_logps": [[-1.0, 0.0, -2.0], [-3.0, 0.0, 0.0]],
        "ref_per_token_logps": [[-1.5, 0.0, -2.5], [-3.5, 0.0, 0.0]]})
    assert from_trl(inputs) == [{
        "advantage": 0.5, "input_ids": [1, 4, 5, 6], "loss_mask": [0, 1, 0, 1], "logprobs": [None, -1.0, 0.0, -2.0],
        "ref_logprobs": [None, -1.5, 0.0, -2.5]
    }, {
        "advantage": -0.5, "input_ids": [2, 3, 7], "loss_mask": [0, 0, 1], "logprobs": [None, None, -3.0],
        "ref_logprobs": [None, None, -3.5]
    }]


def test_trl_datasets():
    datasets = pytest.importorskip("datasets")
    rows = [{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}, {"input_ids": [4, 5], "loss_mask": [0, 1]}]
    columns = {"input_ids": [[1, 2, 3], [4, 5]], "completion_mask": [[0, 1, 1], [0, 1]]}
    assert from_trl(columns) == rows and from_trl(datasets.Dataset.from_dict(columns)) == rows
    pairs = from_trl([{"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]},
                      {"prompt_ids": [1], "chosen_ids": [4], "rejected_ids": [5]}])
    assert [(row["pair_id"], row["chosen"], row["input_ids"]) for row in pairs] == [
        ("pair-0", True, [1, 2]), ("pair-0", False, [1, 3]), ("pair-1", True, [1, 4]), ("pair-1", False, [1, 5])]


def test_random_batches_padded_on_either_side_give_the_samples_back():
    generator = np.random.default_rng(seed_of(3))
    for _ in range(20):
        prompts = [generator.integers(1, 100, generator.integers(1, 6)).tolist() for _ in range(5)]
        responses = [generator.integers(1, 100, generator.integers(1, 6)).tolist() for _ in range(5)]
        logprobs = [(-generator.random(len(response))).tolist() for response in responses]
        left, right = max(map(len, prompts)), max(map(len, responses))
        batch = {
            "prompts": [[0] * (left - len(prompt)) + prompt for prompt in prompts],
            "responses": [response + [0] * (right - len(response)) for response in responses],
            "attention_mask": [[0] * (left - len(p)) + [1] * (len(p) + len(r)) + [0] * (right - len(r))
                               for p, r in zip(prompts, responses)],
            "rollout_log_probs": [values + [0.0] * (right - len(values)) for values in logprobs]
        }
        rows = from_verl({
            name: torch.tensor(value, dtype=torch.float64 if "log" in name else None)
            for name, value in batch.items()
        })
        assert [row["input_ids"] for row in rows] == [p + r for p, r in zip(prompts, responses)]
        assert [row["logprobs"] for row in rows] == [[None] * len(p) + values for p, values in zip(prompts, logprobs)]



def test_rows_are_written_and_read_by_the_commands(tmp_path, espalier):
    for name in ("rows.jsonl", "rows.jsonl.zst", "rows.safetensors"):
        assert write_rows(VERL_ROWS, tmp_path / name) == 2
        done = espalier("inspect", "--data", tmp_path / name)
        assert "2 trajectories, 8 tokens, 4 with loss" in done.stderr
    before = (tmp_path / "rows.jsonl").read_bytes()
    with pytest.raises(InputError, match="row 2: field `input_ids`: expected at least one token, received none"):
        write_rows([VERL_ROWS[0], {"input_ids": []}], tmp_path / "rows.jsonl")
    assert (tmp_path / "rows.jsonl").read_bytes() == before
