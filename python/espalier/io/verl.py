# SPDX-License-Identifier: Apache-2.0
"""verl's batches (verl 0.9.1: verl/protocol.py, verl/experimental/agent_loop/agent_loop.py) as rows.

A `DataProto` holds tensors of [B, P + R]: prompts padded on the left to P, responses on the right to R. Fields used:

    input_ids, attention_mask [B, P + R], or prompts [B, P] and responses [B, R] with the same attention_mask
    response_mask [B, R]                    1: sampled by the model (0: tool outputs and padding)
    rollout_log_probs, else old_log_probs [B, R]        -> logprobs
    ref_log_prob [B, R]                                 -> ref_logprobs
    advantages [B, R]                                   -> advantages
    rm_scores, else token_level_scores, else token_level_rewards [B, R]    their sum -> reward, or their sums in
                                                        each turn -> turn_rewards
    uid [B]                                             -> group_id
    routed_experts [B, P + R, layers, chosen]           -> routed_experts
"""

from functools import partial
from typing import Any

from ..errors import BadRow
from .parts import (Options, attention, converted, each_sample, kept, refuse_images, rewards_of_turns, routes_with_last,
                    sum_of)  # fmt: skip
from .rules import checked, same_length, zero_one

LOGPROBS = ("rollout_log_probs", "old_log_probs")
REWARDS = ("rm_scores", "token_level_scores", "token_level_rewards")


def from_verl(data: Any, turn_rewards: bool = False) -> list[dict[str, Any]]:
    """Rows of a verl `DataProto`.

    Old log-probabilities, which the trainer computes again, are taken only where the rollout recorded none.

    Args:
        data: A `DataProto`, or a dict with its tensors and non-tensor fields together: tensors, arrays or lists, which the
            module names.
        turn_rewards: Rewards of tokens become one for each turn, not one for the row.

    Returns:
        A list of row dicts, as docs/data-format.md has them, in the order of the batch.

    Raises:
        InputError: A sample cannot be used; the message names sample and field.

    Examples:
        >>> import espalier
        >>> batch = {"prompts": [[0, 5, 6]], "responses": [[7, 0]], "attention_mask": [[0, 1, 1, 1, 0]]}
        >>> espalier.io.from_verl(batch)
        [{'input_ids': [5, 6, 7], 'loss_mask': [0, 0, 1]}]
    """
    if hasattr(data, "batch") and hasattr(data, "non_tensor_batch"):
        parts = [part for part in (data.batch, data.non_tensor_batch) if part is not None]  # bool(TensorDict) raises
        data = {name: part[name] for part in parts for name in part.keys()}
    return converted([data], partial(rows, options=Options(turn_rewards=turn_rewards)), "batch")


def rows(record, options):
    """Yields the rows of a batch, or of one sample."""
    yield from each_sample(record, "responses", partial(_sample, by_turn=options.turn_rewards))


def _sample(sample, by_turn):
    refuse_images(sample, "multi_modal_inputs", "multi_modal_data")
    responses = sample.list("responses")
    ids = sample.get("input_ids") or sample.list("prompts") + responses
    prompt = len(ids) - len(responses)  # length with padding
    if prompt < 0 or ids[prompt:] != responses:
        raise BadRow("responses", "the end of input_ids", f"{len(responses)} other tokens")
    if "attention_mask" not in sample:
        raise BadRow("attention_mask", "a mask of the tokens that are not padding", "none")
    keep = attention("attention_mask", sample.get("attention_mask"), len(ids))
    if "response_mask" in sample:
        mask = zero_one("response_mask", sample.get("response_mask"), len(responses), "responses")
    else:
        mask = keep[prompt:]
    lost = [index for index, (loss, keeps) in enumerate(zip(mask, keep[prompt:])) if loss and not keeps]
    if lost:
        raise BadRow("response_mask", "0 on padding", f"1 at index {lost[0]}, where attention_mask has 0")
    row = {"input_ids": kept(ids, keep), "loss_mask": kept([0] * prompt + mask, keep)}
    for field, fill, names in (("logprobs", None, LOGPROBS), ("ref_logprobs", None, ("ref_log_prob",)),
                               ("advantages", 0.0, ("advantages",))):
        name, values = sample.first_of(*names)
        if name:
            row[field] = kept([fill] * prompt + same_length(name, values, len(responses), "responses"), keep)
    row |= _outcome(sample, row["loss_mask"], keep[prompt:], by_turn)
    if "routed_experts" in sample:
        routes = kept(same_length("routed_experts", sample.get("routed_experts"), len(ids), "the padded sample"), keep)
        row["routed_experts"] = routes_with_last(routes, len(row["input_ids"]))
    yield checked(row)


def _outcome(sample, loss_mask, keep, by_turn):
    outcome = {"group_id": sample.get("uid")}
    name, scores = sample.first_of(*REWARDS)
    if not name:
        return outcome
    if not isinstance(scores, list):
        return outcome | {"reward": scores}
    scores = kept(same_length(name, scores, len(keep), "responses"), keep)
    if not by_turn:
        return outcome | {"reward": sum_of(name, scores)}
    before = [0.0] * (len(loss_mask) - len(scores))
    return outcome | {"turn_rewards": rewards_of_turns(name, before + scores, loss_mask)}
