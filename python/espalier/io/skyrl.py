# SPDX-License-Identifier: Apache-2.0
"""SkyRL's `GeneratorOutput` (August 2026: skyrl/train/generators/base.py) as rows. Fields used:

    prompt_token_ids, response_ids          lists of token ids for each trajectory (or step)
    loss_masks, rollout_logprobs            for each token of a response
    rewards                                 a number for each response, or one for each of its tokens: their sum, or
                                            their sums in each turn -> turn_rewards
    trajectory_ids                          {instance_id, repetition_id}: instance_id -> group_id, both -> trajectory_id
    rollout_expert_indices                  [tokens, layers, chosen] for each trajectory -> routed_experts
    is_last_step                            in step-wise training, where a trajectory has several responses: all its
                                            rows get the reward of its last step

A file may have one such object of lists, or one object for each trajectory. SkyRL's pretokenised data for SFT
(`input_ids`, `loss_mask`) are rows already.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from ..errors import BadRow
from .fields import Fields, mapping_of
from .parts import (Options, batch_size, converted, each_sample, joined, refuse_images, rewards_of_turns, routes_with_last,
                    sum_of)  # fmt: skip
from .rules import checked, identity, same_length, token_ids


def from_skyrl(generator_output: Mapping[str, Any], turn_rewards: bool = False) -> list[dict[str, Any]]:
    """Rows of a SkyRL `GeneratorOutput`.

    Args:
        generator_output: A dict of lists, or of tensors and arrays; the module names the fields.
        turn_rewards: Rewards of tokens become one for each turn, not one for the row.

    Returns:
        A list of row dicts, as docs/data-format.md has them, in the order of the output.

    Raises:
        InputError: A sample cannot be used; the message names sample and field.

    Examples:
        >>> import espalier
        >>> output = {"prompt_token_ids": [[5, 6]], "response_ids": [[7, 8]], "loss_masks": [[1, 1]], "rewards": [1.0]}
        >>> espalier.io.from_skyrl(output)
        [{'reward': 1.0, 'input_ids': [5, 6, 7, 8], 'loss_mask': [0, 0, 1, 1]}]
    """
    return converted([generator_output], partial(rows, options=Options(turn_rewards=turn_rewards)), "output")


def rows(record, options):
    """Yields the rows of an output, or of one trajectory."""
    made = each_sample(record, "response_ids", partial(_sample, by_turn=options.turn_rewards))
    if "is_last_step" not in record or batch_size(record, "response_ids") is None:
        yield from made
        return
    if options.turn_rewards:
        raise BadRow("is_last_step", "whole trajectories with turn rewards", "trajectories in steps")
    steps, several = [], 0
    for row, is_last in zip(made, record.list("is_last_step"), strict=True):
        steps.append(row)
        if not is_last:
            continue
        several += len(steps) > 1
        for number, step in enumerate(steps):
            step["reward"] = row.get("reward")
            if "trajectory_id" in step and len(steps) > 1:
                step["trajectory_id"] += f"/step-{number}"
            yield checked(step)
        steps = []
    if steps:
        raise BadRow("is_last_step", "true for the last step of every trajectory", "false for the last of all")
    if several:
        record.tally.notes[
            "trajectories of several steps: each step is a row with the trajectory's reward, and counts in the "
            "mean of its group"] += several


def _sample(sample, by_turn):
    refuse_images(sample, "pixel_values", "image_grid_thw")
    prompt = token_ids(sample.list("prompt_token_ids"), "prompt_token_ids")
    response = token_ids(sample.list("response_ids"), "response_ids")
    row = joined(prompt, response, response_name="response_ids", arrays=(
        ("loss_masks", "loss_mask", sample.get("loss_masks")),
        ("rollout_logprobs", "logprobs", sample.get("rollout_logprobs"))))
    reward = sample.get("rewards")
    if by_turn and isinstance(reward, list):
        rewards = [0.0] * len(prompt) + same_length("rewards", reward, len(response), "response_ids")
        row["turn_rewards"] = rewards_of_turns("rewards", rewards, row["loss_mask"])
    else:
        row["reward"] = sum_of("rewards", reward) if isinstance(reward, list) else reward
    if "trajectory_ids" in sample:
        row |= _names(sample.get("trajectory_ids"))
    row["routed_experts"] = routes_with_last(sample.get("rollout_expert_indices"), len(row["input_ids"]))
    yield checked(row)


def _names(trajectory):
    """instance_id and repetition_id of an object, or of a string that joins them with an underscore."""
    if isinstance(trajectory, str):
        instance, _, repetition = trajectory.rpartition("_")
        return {"trajectory_id": trajectory, "group_id": instance if instance and repetition.isdigit() else trajectory}
    fields = Fields(mapping_of(trajectory))
    instance = identity("trajectory_ids.instance_id", fields.get("instance_id"))
    return {"group_id": instance, "trajectory_id": f"{instance}_{fields.get('repetition_id', 0)}"}
