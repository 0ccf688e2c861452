# SPDX-License-Identifier: Apache-2.0
"""AReaL's trajectories (AReaL 1.0.4: areal/workflow/rlvr.py) as rows. Fields used, padded to [B, T] or of one sample [T]:

    input_ids, attention_mask       the mask may be missing if nothing is padded (one sample)
    loss_mask, logprobs             entry t belongs to token t; log-probabilities of the prompt are 0
    rewards [B]                     -> reward
    advantages                      if the trainer has computed them
"""

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import BadRow
from .parts import attention, converted, each_sample, kept, refuse_images
from .rules import checked, same_length


def from_areal(batch: Mapping[str, Any], group_ids: Iterable[str | int] | None = None) -> list[dict[str, Any]]:
    """Rows of an AReaL batch.

    Args:
        batch: A dict of tensors, arrays or lists, padded to [B, T] or of one sample [T]; the module names the fields.
        group_ids: One text or integer for each sample, where samples of one prompt are compared with one another. AReaL itself
            keeps no name for them.

    Returns:
        A list of row dicts, as docs/data-format.md has them.

    Raises:
        InputError: A sample cannot be used; the message names sample and field.

    Examples:
        >>> import espalier
        >>> espalier.io.from_areal({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "rewards": 1.0})
        [{'reward': 1.0, 'input_ids': [5, 6, 7], 'loss_mask': [0, 1, 1]}]
    """
    if group_ids is not None:
        batch = {**batch, "group_id": group_ids}
    return converted([batch], rows, "batch")


def rows(record, options=None):
    """Yields the rows of a batch, or of one sample."""
    if "attention_mask" not in record and len(record.list("input_ids")) > 1 and isinstance(
            record.list("input_ids")[0], list):
        raise BadRow("attention_mask", "a mask of the tokens that are not padding", "none")
    yield from each_sample(record, "input_ids", _sample)


def _sample(sample):
    refuse_images(sample, "multi_modal_input", "pixel_values")
    ids = sample.list("input_ids")
    keep = [1] * len(ids)
    if "attention_mask" in sample:
        keep = attention("attention_mask", sample.get("attention_mask"), len(ids))
    row = {"input_ids": kept(ids, keep), "reward": sample.get("rewards"), "group_id": sample.get("group_id")}
    for name in ("loss_mask", "logprobs", "advantages"):
        if name in sample:
            row[name] = kept(same_length(name, sample.get(name), len(ids)), keep)
    if "loss_mask" not in row:
        raise BadRow("loss_mask", "a mask of the tokens that carry loss", "none")
    yield checked(row)
