# SPDX-License-Identifier: Apache-2.0
"""Espalier's rows in another container or with other field names (listed in docs/data-format.md and
src/espalier/data/fields.h). Padding is cut, and a packed row becomes a row for each of its documents."""

from ..errors import BadRow
from ..rows.fields import ROW_NUMBERS
from .documents import documents, unpadded
from .fields import verdict
from .parts import refuse_images
from .rules import checked, identity, same_length, token_ids, zero_one

OTHER_NAMES = {
    "loss_mask": ("loss_mask", "response_mask", "completion_mask", "assistant_masks", "labels"),
    "logprobs": ("logprobs", "old_log_probs", "rollout_log_probs"),
    "ref_logprobs": ("ref_logprobs", "ref_log_prob", "ref_log_probs"),
}
OWN_NAMES = ("loss_weights", "advantages", "advantage", *ROW_NUMBERS, "turn_rewards", "group_id", "trajectory_id", "pair_id",
             "chosen", "ref_topk_ids", "ref_topk_logprobs", "routed_experts")
KNOWN_NAMES = frozenset(("input_ids", *OWN_NAMES, *(name for names in OTHER_NAMES.values() for name in names)))
TOKEN_LISTS = ("input_ids", "loss_weights", "advantages", "ref_topk_ids", "ref_topk_logprobs", "routed_experts")
OF_ONE_DOCUMENT = ("reward", "turn_rewards", "advantage", "pair_id", "chosen")
NO_LABEL = -100


def rows(record, options=None):
    """Yields the row of one record, or one for each document if it is packed: `input_ids` and related fields."""
    refuse_images(record, "pixel_values", "images", "image_grid_thw")
    ids = token_ids(record.list("input_ids"), "input_ids")
    span = unpadded(record, len(ids))
    parts = documents(record, len(ids), span)
    row = _unpadded_row(record, ids, span)
    for name in OF_ONE_DOCUMENT:
        if len(parts) > 1 and row[name] is not None:
            raise BadRow(name, "rows of one document, since this field cannot be divided: write each document as a row",
                         f"{len(parts)} documents")
    for number, part in enumerate(parts):
        tokens = slice(part.start - span.start, part.stop - span.start)
        document = {name: values[tokens] if name in TOKEN_LISTS or name in OTHER_NAMES else values
                    for name, values in row.items() if values is not None}
        if len(parts) > 1 and "trajectory_id" in document:
            document["trajectory_id"] = f"{identity('trajectory_id', document['trajectory_id'])}/document-{number}"
        yield checked(document)


def _unpadded_row(record, ids, span):
    """The row under our names. span: the tokens that are no padding."""
    row = {name: record.get(name) for name in OWN_NAMES}
    if row["chosen"] is None:
        row["chosen"] = verdict(record)
    for name in TOKEN_LISTS:
        if name in record:
            row[name] = same_length(name, record.get(name), len(ids))[span.start:span.stop]
    for field, names in OTHER_NAMES.items():
        for name in names:
            if name not in record:
                continue
            values = same_length(name, record.get(name), len(ids))
            if field == "loss_mask":
                values = _labels(values, ids, span) if name == "labels" else zero_one(name, values, len(ids))
            values = values[span.start:span.stop]
            if row.setdefault(field, values)[1:] != values[1:]:
                raise BadRow(name, f"the same values as the other name of `{field}` (keep one of them)", "something else")
    if "loss_weights" in record and "loss_mask" not in record and "loss_mask" in row:
        mask = row.pop("loss_mask")  # an alias may accompany weights that agree with it
        if [weight > 0 for weight in row["loss_weights"][1:]] != [loss > 0 for loss in mask[1:]]:
            raise BadRow("loss_weights", "weights above 0 where the mask has 1", "others")
    return row


def _labels(labels, ids, span):
    """A mask of the tokens with a label; checks those of `span`."""
    for index in span:
        label, token = labels[index], ids[index]
        if label not in (NO_LABEL, token):
            shifted = index + 1 < len(ids) and label == ids[index + 1]
            raise BadRow(
                "labels", "-100 or the token of input_ids at the same place", f"{label} at index {index}, where "
                f"input_ids has {token}{' (the next token: give unshifted labels)' if shifted else ''}")
    return [int(label != NO_LABEL) for label in labels]
