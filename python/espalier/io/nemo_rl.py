# SPDX-License-Identifier: Apache-2.0
"""NeMo RL's log of a step as rows (NVIDIA-NeMo/RL, August 2026: nemo_rl/algorithms/grpo.py writes train_data_stepN.jsonl).

Each line is a sample; every field but `idx` is a list of one, or the value itself. Fields used:

    token_ids, input_lengths        the row is the first input_lengths tokens; padding follows
    token_loss_mask                 for each token -> loss_mask
    sample_loss_mask                a number that multiplies it: 0 leaves the sample out, others than 1 -> loss_weights
    generation_logprobs, else prev_logprobs     for each token -> logprobs
    advantages                      for each token, or one -> advantages, or advantage
    filtered_rewards, else rewards  -> reward. With dynamic sampling, rewards are those of other samples
"""

import math

from ..errors import BadRow
from ..rows.json_lines import shown
from .parts import each_sample
from .rules import checked, number, same_length, token_ids, zero_one


def rows(record, options=None):
    """Yields the row of each sample of a line."""
    yield from each_sample(record, "token_ids", _sample)


def _sample(sample):
    ids = token_ids(sample.list("token_ids"), "token_ids")
    length = sample.get("input_lengths", len(ids))
    if type(length) is not int or not 0 < length <= len(ids):
        raise BadRow("input_lengths", f"a number from 1 to {len(ids)}, the number of token_ids", shown(length))
    mask = zero_one("token_loss_mask", sample.get("token_loss_mask"), len(ids), "token_ids")
    weight = number("sample_loss_mask", sample.get("sample_loss_mask", 1))
    if weight == 0:
        sample.tally.notes["samples left out whose sample_loss_mask is 0"] += 1
        return
    row = {"input_ids": ids[:length], "loss_mask": mask[:length]}
    if weight != 1:
        row["loss_weights"] = [loss * weight for loss in row.pop("loss_mask")]
    name, logprobs = sample.first_of("generation_logprobs", "prev_logprobs")
    if name:
        row["logprobs"] = same_length(name, logprobs, len(ids), "token_ids")[:length]
    advantages = sample.get("advantages")
    if isinstance(advantages, list):
        row["advantages"] = same_length("advantages", advantages, len(ids), "token_ids")[:length]
    else:
        row["advantage"] = advantages
    _, reward = sample.first_of("filtered_rewards", "rewards")
    row["reward"] = None if isinstance(reward, float) and not math.isfinite(reward) else reward
    yield checked(row)
