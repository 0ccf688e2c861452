# SPDX-License-Identifier: Apache-2.0
"""TRL's tokenised data (TRL 1.16: trainer/sft_trainer.py, dpo_trainer.py, grpo_trainer.py) as rows. Fields used:

    input_ids with labels, completion_mask or assistant_masks       as in SFT: see espalier.io.plain_rows
    prompt_ids, completion_ids          GRPO, also padded as a batch with prompt_mask (on the left) and completion_mask;
                                        tool_mask excludes tool outputs from the loss
    prompt_ids, chosen_ids, rejected_ids    DPO: two rows with one pair_id, and chosen true and false
    sampling_per_token_logps, else old_per_token_logps, else logprobs    -> logprobs, for each token of the completion
    ref_per_token_logps                 -> ref_logprobs
    advantages                          a number for each sample -> advantage, or one for each token of the completion
    reward, rewards                     -> reward
    group_id, trajectory_id, pair_id    unchanged
"""

from typing import Any

from . import plain_rows
from .fields import verdict
from .parts import attention, converted, each_sample, joined, kept, refuse_images
from .rules import checked, same_length, token_ids, zero_one

LOGPROBS = ("sampling_per_token_logps", "old_per_token_logps", "logprobs")


def from_trl(data: Any) -> list[dict[str, Any]]:
    """Rows of what TRL's trainers take and make.

    Args:
        data: A dict (one sample, or a padded batch of GRPO's inputs), a list of dicts, or a `datasets.Dataset`; the module
            names the fields.

    Returns:
        A list of row dicts, as docs/data-format.md has them.

    Raises:
        InputError: A sample cannot be used; the message names sample and field.

    Examples:
        >>> import espalier
        >>> [row] = espalier.io.from_trl({"prompt_ids": [5, 6], "completion_ids": [7], "advantages": 0.5})
        >>> row["input_ids"], row["loss_mask"], row["advantage"]
        ([5, 6, 7], [0, 0, 1], 0.5)
    """
    records = [data] if hasattr(data, "keys") else data
    return converted(records, _rows_of_columns, "record")


def _rows_of_columns(record):
    """A dict of columns of SFT data has one list for each row."""
    if "input_ids" in record and "prompt_ids" not in record:
        yield from each_sample(record, "input_ids", plain_rows.rows)
    else:
        yield from rows(record)


def rows(record, options=None, place=""):
    """Yields the rows of a record of a file, a sample or a batch. place: names the pair if the record does not."""
    if "chosen_ids" in record:
        yield from each_sample(record, "chosen_ids", lambda sample: _pair(sample, place))
    elif "completion_ids" in record:
        yield from each_sample(record, "completion_ids", _sample)
    else:
        yield from plain_rows.rows(record)


def _pair(sample, place):
    refuse_images(sample, "pixel_values", "images")
    prompt = token_ids(sample.list("prompt_ids"), "prompt_ids")
    pair = sample.get("pair_id")
    if pair is None:  # a record may have several, and files of several folders may have the same name
        number = sample.tally.next(f"pairs of {place}")
        pair = (f"{place}/{number}" if number else place) if place else f"pair-{number}"
    for chosen, name in ((True, "chosen_ids"), (False, "rejected_ids")):
        row = joined(prompt, token_ids(sample.list(name), name))
        yield checked(row | {"pair_id": pair, "chosen": chosen, "group_id": sample.get("group_id")})


def _sample(sample):
    refuse_images(sample, "pixel_values", "images")
    prompt, completion = sample.list("prompt_ids"), sample.list("completion_ids")
    if "prompt_mask" in sample:
        prompt = kept(prompt, attention("prompt_mask", sample.get("prompt_mask"), len(prompt)))
    count, keep = len(completion), [1] * len(completion)
    if "completion_mask" in sample:
        keep = zero_one("completion_mask", sample.get("completion_mask"), count, "completion_ids")
    if "prompt_mask" in sample:  # a padded batch: masked tokens are padding
        keep = attention("completion_mask", keep, count)
        loss, real = [1] * count, keep
    else:
        loss, real = keep, [1] * count
    if "tool_mask" in sample:
        tool = zero_one("tool_mask", sample.get("tool_mask"), count, "completion_ids")
        loss = [a * b for a, b in zip(loss, tool)]
    arrays = [("completion_mask", "loss_mask", kept(loss, real))]
    for field, names in (("logprobs", LOGPROBS), ("ref_logprobs", ("ref_per_token_logps",))):
        name, values = sample.first_of(*names)
        if name:
            arrays.append((name, field, kept(same_length(name, values, count, "completion_ids"), real)))
    advantages = sample.get("advantages")
    if isinstance(advantages, list):
        arrays.append(
            ("advantages", "advantages", kept(same_length("advantages", advantages, count, "completion_ids"), real)))
    row = joined(prompt, kept(completion, real), arrays, "completion_ids")
    if not isinstance(advantages, list):
        row["advantage"] = advantages
    row["reward"] = sample.first_of("reward", "rewards")[1]
    for name in ("group_id", "trajectory_id", "pair_id", "chosen"):
        row[name] = sample.get(name)
    if row["chosen"] is None:
        row["chosen"] = verdict(sample)
    yield checked(row)
