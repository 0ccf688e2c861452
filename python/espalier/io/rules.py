# SPDX-License-Identifier: Apache-2.0
"""Checks of rows (docs/data-format.md) that were converted from other formats.

`checked` normalises a row: ids are ints, masks 0 and 1 (0 for the first token, which nothing predicts), numbers floats.
A log-probability that is missing or not finite becomes null if the token carries no loss, and is an error if it does.
"""

import math

from ..rows.json_lines import is_text, shown
from ..rows.fields import ROW_NUMBERS
from ..errors import BadRow

LOGPROB_SLACK = 1e-3  # like the reader: how far rounding may put a log-probability above 0
LARGEST_ID = 2**31 - 1
ORDER = ("trajectory_id", "group_id", "pair_id", "chosen", *ROW_NUMBERS, "turn_rewards", "advantage", "input_ids", "loss_mask",
         "loss_weights", "logprobs", "ref_logprobs", "advantages", "ref_topk_ids", "ref_topk_logprobs", "routed_experts")

# How tokens were chosen: what the values have to be, as the reader says it.
_CHOICES = {
    "temperature": ("a number >= 0", lambda value: value >= 0),
    "top_k": ("a whole number >= 0, or -1 (all)", lambda value: value >= -1 and value == int(value)),
    "top_p": ("a number above 0 and at most 1", lambda value: 0 < value <= 1),
}


def checked(row):
    """The normalised row without fields that are missing or None; raises BadRow."""
    row = {name: row[name] for name in ORDER if row.get(name) is not None}
    ids = row["input_ids"] = token_ids(row.get("input_ids"), "input_ids")
    if not ids:
        raise BadRow("input_ids", "at least one token id", "an empty list")
    carries_loss = _loss(row, len(ids))
    for name in ("logprobs", "ref_logprobs"):
        if name in row:
            row[name] = _logprobs(name, row[name], carries_loss)
    if "advantages" in row:
        row["advantages"] = _advantages(row["advantages"], carries_loss)
        if "advantage" in row:
            raise BadRow("advantages", "either advantages or advantage", "both")
    for name in ("advantage", *ROW_NUMBERS):
        if name in row:
            row[name] = number(name, row[name])
    for name, (expected, is_good) in _CHOICES.items():
        if name in row and not is_good(row[name]):
            raise BadRow(name, expected, shown(row[name]))
    if "turn_rewards" in row:
        row["turn_rewards"] = _turn_rewards(row, carries_loss)
    if "ref_topk_ids" in row or "ref_topk_logprobs" in row:
        _ref_topk(row, len(ids))
    for name in ("trajectory_id", "group_id", "pair_id"):
        if name in row:
            row[name] = identity(name, row[name])
    if "chosen" in row and not isinstance(row["chosen"], bool):
        raise BadRow("chosen", "true or false", shown(row["chosen"]))
    if "routed_experts" in row:
        row["routed_experts"] = _routes(row["routed_experts"], len(ids))
    return row


def token_ids(values, name):
    """A list of token ids as ints; raises BadRow."""
    if not isinstance(values, list):
        raise BadRow(name, "a list of token ids", _described(values))
    for index, value in enumerate(values):
        if type(value) is not int or not 0 <= value <= LARGEST_ID:
            raise BadRow(name, f"token ids from 0 to {LARGEST_ID}", f"{_described(value)} at index {index}")
    return values


def same_length(name, values, count, what="input_ids"):
    """The list, which must have `count` entries, one for each token of `what`."""
    if not isinstance(values, list):
        raise BadRow(name, f"a list with {count} entries, one for each token of {what}", _described(values))
    if len(values) != count:
        raise BadRow(name, f"{count} entries, one for each token of {what}", f"{len(values)}")
    return values


def zero_one(name, values):
    """A mask as ints; accepts 0, 1, 0.0, 1.0, true and false."""
    for index, value in enumerate(values):
        if isinstance(value, str) or value not in (0, 1):
            raise BadRow(name, "0, 1, true or false", f"{_described(value)} at index {index}")
    return [int(value) for value in values]


def number(name, value):
    """A finite number as a float."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**1023:
        return float(value)
    raise BadRow(name, "a finite number", _described(value))


def identity(name, value):
    if isinstance(value, str) and value and is_text(value):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise BadRow(name, "text in UTF-8 or an integer", "an unpaired surrogate" if isinstance(value, str) and value
                 else _described(value))


def _loss(row, tokens):
    """Normalises the mask or weights; returns which tokens carry loss."""
    if "loss_weights" in row:
        if "loss_mask" in row:
            raise BadRow("loss_mask", "either loss_mask or loss_weights", "both")
        weights = [number("loss_weights", value) for value in same_length("loss_weights", row["loss_weights"], tokens)]
        if min(weights) < 0:
            raise BadRow("loss_weights", "finite numbers >= 0",
                         f"{min(weights)} at index {weights.index(min(weights))}")
        row["loss_weights"] = [0.0, *weights[1:]]
        return [weight > 0 for weight in row["loss_weights"]]
    if "loss_mask" not in row:
        return [False] + [True] * (tokens - 1)
    mask = zero_one("loss_mask", same_length("loss_mask", row["loss_mask"], tokens))
    row["loss_mask"] = [0, *mask[1:]]
    return row["loss_mask"]


def _is_finite(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _logprobs(name, values, carries_loss):
    result: list[float | None] = [None]
    for index, (value, loss) in enumerate(zip(same_length(name, values, len(carries_loss)), carries_loss)):
        if index == 0:
            continue
        if not _is_finite(value):
            if loss:
                raise BadRow(name, "finite log-probabilities on tokens with loss",
                             f"{_described(value)} at index {index}")
            if isinstance(value, (str, bool, list, dict)):
                raise BadRow(name, "numbers", f"{_described(value)} at index {index}")
            value = None
        elif value > LOGPROB_SLACK:
            raise BadRow(name, "finite log-probabilities <= 0", f"{value} at index {index}")
        result.append(value if value is None else float(value))
    return result


def _advantages(values, carries_loss):
    result = []
    for index, (value, loss) in enumerate(zip(same_length("advantages", values, len(carries_loss)), carries_loss)):
        if _is_finite(value):
            result.append(float(value))
        elif loss or isinstance(value, (str, bool, list, dict)):
            raise BadRow("advantages", "finite numbers on tokens with loss", f"{_described(value)} at index {index}")
        else:
            result.append(0.0)
    return result


def _turn_rewards(row, carries_loss):
    if "reward" in row:
        raise BadRow("turn_rewards", "either turn_rewards or reward", "both")
    before = [False, *carries_loss]
    turns = sum(bool(loss) and not earlier for loss, earlier in list(zip(carries_loss, before))[1:])
    rewards = same_length("turn_rewards", row["turn_rewards"], turns, "the turns (ranges of tokens with loss)")
    return [number("turn_rewards", reward) for reward in rewards]


def _ref_topk(row, tokens):
    """Normalises both lists: K entries or none per token."""
    if not {"ref_topk_ids", "ref_topk_logprobs"} <= row.keys():
        raise BadRow("ref_topk_ids", "ref_topk_ids and ref_topk_logprobs together", "one of them")
    ids = [list(each or []) for each in same_length("ref_topk_ids", row["ref_topk_ids"], tokens)]
    logprobs = [list(each or []) for each in same_length("ref_topk_logprobs", row["ref_topk_logprobs"], tokens)]
    width = max(map(len, ids))
    for token, (some, values) in enumerate(zip(ids, logprobs)):
        if len(some) not in (0, width) or len(values) != len(some) or (token == 0 and some):
            raise BadRow("ref_topk_ids", f"{width} ids and log-probabilities for each token, none for the first",
                         f"{len(some)} and {len(values)} for token {token}")
        token_ids(some, "ref_topk_ids")
        if not all(_is_finite(value) and value <= LOGPROB_SLACK for value in values):
            raise BadRow("ref_topk_logprobs", "finite log-probabilities <= 0", f"{_described(values)} for token {token}")
    row["ref_topk_ids"], row["ref_topk_logprobs"] = ids, [[float(value) for value in each] for each in logprobs]


def _routes(routes, tokens):
    """One flat list of expert ids for each token."""
    flat: list[list[int]] = []
    for token, ids in enumerate(same_length("routed_experts", routes, tokens)):
        if isinstance(ids, list) and ids and isinstance(ids[0], list):
            ids = [expert for layer in ids for expert in (layer if isinstance(layer, list) else [None])]
        if not isinstance(ids, list) or not ids or (flat and len(ids) != len(flat[0])):
            raise BadRow("routed_experts", "a list of as many expert ids for every token",
                         f"{_described(ids)} at token {token}")
        if not all(type(expert) is int and 0 <= expert <= LARGEST_ID for expert in ids):
            raise BadRow("routed_experts", "expert ids (integers >= 0)", f"{_described(ids)} at token {token}")
        flat.append(ids)
    return flat


def _described(value):
    """Describes a value for a message, as JSON if possible."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, list) and len(value) > 4:
        return f"a list of {len(value)}"
    try:
        return shown(value)
    except TypeError:
        return f"a {type(value).__name__}"
