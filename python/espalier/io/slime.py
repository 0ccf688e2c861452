# SPDX-License-Identifier: Apache-2.0
"""slime's `Sample` (August 2026: slime/utils/types.py) as rows. Fields used:

    tokens, response_length         the response is the end of the tokens
    loss_mask, rollout_log_probs    for each token of the response; without a mask all of them carry loss
    remove_sample                   true: none of them does
    reward                          a number -> reward (of an object of rewards, the one that reward_key names)
    group_index                     -> group_id
    index                           -> trajectory_id
    rollout_routed_experts          [tokens - 1, layers, chosen] -> routed_experts
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

from ..rows.json_lines import shown
from ..errors import BadRow
from .parts import converted, joined, refuse_images, routes_with_last
from .rules import checked, token_ids


def from_slime(samples: Iterable[Any], reward_key: str | None = None) -> list[dict[str, Any]]:
    """Rows of slime's samples.

    Args:
        samples: `Sample` objects or dicts, or lists of such (one for each group).
        reward_key: Which entry of a `reward` that is a dict.

    Returns:
        A list of row dicts, as docs/data-format.md has them, one for each sample.

    Raises:
        InputError: A sample cannot be used; the message names sample and field.

    Examples:
        >>> import espalier
        >>> [row] = espalier.io.from_slime([{"tokens": [5, 6, 7], "response_length": 1, "reward": 1.0, "group_index": 3}])
        >>> row["loss_mask"], row["group_id"]
        ([0, 0, 1], '3')
    """
    flat: list[Any] = []
    for sample in samples:
        flat += sample if isinstance(sample, (list, tuple)) else [sample]
    return converted(flat, partial(rows, reward_key=reward_key), "sample")


def rows(record, options=None, reward_key=None):
    """Yields the row of one sample."""
    refuse_images(record, "multimodal_inputs", "multimodal_train_inputs")
    tokens = token_ids(record.list("tokens"), "tokens")
    length = record.get("response_length")
    if type(length) is not int or not 0 <= length <= len(tokens):
        raise BadRow("response_length", f"a number from 0 to {len(tokens)} (the tokens)", shown(length))
    prompt = len(tokens) - length
    mask = [0] * length if record.get("remove_sample") else record.get("loss_mask")
    row = joined(tokens[:prompt], tokens[prompt:], response_name="the response", arrays=(
        ("loss_mask", "loss_mask", mask), ("rollout_log_probs", "logprobs", record.get("rollout_log_probs"))))
    row["reward"] = _reward(record.get("reward"), reward_key)
    row["group_id"], row["trajectory_id"] = record.get("group_index"), record.get("index")
    row["routed_experts"] = routes_with_last(record.get("rollout_routed_experts"), len(tokens))
    yield checked(row)


def _reward(reward, key):
    if not isinstance(reward, dict):
        return reward
    if key not in reward:
        names = ", ".join(f"`{name}`" for name in list(reward)[:8])
        raise BadRow("reward", "a number, or reward_key to name one of its entries", f"an object with {names}")
    return reward[key]
