# SPDX-License-Identifier: Apache-2.0
"""Espalier's rows in another container or with other field names (listed in docs/data-format.md and
src/espalier/data/fields.h)."""

from ..errors import BadRow
from .parts import refuse_images
from .rules import checked, same_length, token_ids, zero_one

OTHER_NAMES = {
    "loss_mask": ("loss_mask", "response_mask", "completion_mask", "assistant_masks", "labels"),
    "logprobs": ("logprobs", "old_log_probs", "rollout_log_probs"),
    "ref_logprobs": ("ref_logprobs", "ref_log_prob", "ref_log_probs"),
}
OWN_NAMES = ("loss_weights", "advantages", "advantage", "reward", "turn_rewards", "group_id", "trajectory_id", "pair_id",
             "chosen", "ref_topk_ids", "ref_topk_logprobs", "routed_experts")
KNOWN_NAMES = frozenset(("input_ids", *OWN_NAMES, *(name for names in OTHER_NAMES.values() for name in names)))
NO_LABEL = -100


def rows(record, options=None):
    """Yields the row of one record: `input_ids` and related fields, without padding."""
    refuse_images(record, "pixel_values", "images", "image_grid_thw")
    ids = token_ids(record.list("input_ids"), "input_ids")
    if "attention_mask" in record and 0 in record.get("attention_mask"):
        raise BadRow("attention_mask", "rows without padding", "zeros")
    row = {"input_ids": ids} | {name: record.get(name) for name in OWN_NAMES}
    for field, names in OTHER_NAMES.items():
        read = _mask if field == "loss_mask" else _values
        for name in names:
            if name not in record:
                continue
            values = read(name, record.get(name), ids)
            if row.setdefault(field, values)[1:] != values[1:]:
                raise BadRow(name, f"the same values as the other name of `{field}` (keep one of them)", "something else")
    if "loss_weights" in record and "loss_mask" not in record and "loss_mask" in row:
        mask = row.pop("loss_mask")  # an alias may accompany weights that agree with it
        if [weight > 0 for weight in row["loss_weights"][1:]] != [loss > 0 for loss in mask[1:]]:
            raise BadRow("loss_weights", "weights above 0 where the mask has 1", "others")
    yield checked(row)


def _values(name, values, ids):
    return same_length(name, values, len(ids))


def _mask(name, values, ids):
    same_length(name, values, len(ids))
    if name != "labels":
        return zero_one(name, values)
    for index, (label, token) in enumerate(zip(values, ids)):
        if label not in (NO_LABEL, token):
            shifted = index + 1 < len(ids) and label == ids[index + 1]
            raise BadRow(
                "labels", "-100 or the token of input_ids at the same place", f"{label} at index {index}, where "
                f"input_ids has {token}{' (the next token: give unshifted labels)' if shifted else ''}")
    return [int(label != NO_LABEL) for label in values]


def is_row(record):
    """Whether a record of a file is of this kind."""
    return "input_ids" in record
