# SPDX-License-Identifier: Apache-2.0
"""Tinker's `Datum` (tinker 0.38.0: tinker/types/datum.py) as rows.

Tinker's arrays are shifted: entry t of `loss_fn_inputs` belongs to the token that follows token t of `model_input`, so
a row has one token more than `model_input`: the last target. Fields used:

    model_input                     chunks of tokens (no images)
    loss_fn_inputs.target_tokens    [T]: token t + 1
    loss_fn_inputs.weights, else mask       [T] -> loss_mask, or loss_weights if they are not all 0 and 1
    loss_fn_inputs.logprobs         [T] -> logprobs
    loss_fn_inputs.advantages       [T] -> advantages

Tinker sums the loss of all targets. Targets of advantage 0 contribute nothing, so without weights and mask only targets
whose advantage is not 0 carry loss.
"""

from collections.abc import Iterable
from typing import Any

from ..rows.json_lines import shown
from ..errors import BadRow
from .fields import plain
from .parts import converted
from .rules import checked, number, same_length, token_ids


def from_tinker(datums: Iterable[Any]) -> list[dict[str, Any]]:
    """Rows of Tinker's datums, whose arrays are shifted by one token.

    Args:
        datums: `Datum` objects, or dicts of the same form.

    Returns:
        A list of row dicts, as docs/data-format.md has them, one for each datum.

    Raises:
        InputError: A datum cannot be used, such as one where a target with loss is not the token that follows; the message
            names datum and field.

    Examples:
        >>> import espalier
        >>> datum = {"model_input": [5, 6], "loss_fn_inputs": {"target_tokens": [6, 7], "weights": [0, 1]}}
        >>> espalier.io.from_tinker([datum])
        [{'input_ids': [5, 6, 7], 'loss_mask': [0, 0, 1]}]
    """
    return converted(datums, rows, "datum")


def rows(record, options=None):
    """Yields the row of one datum."""
    tokens = _input_tokens(record)
    inputs = record.inside("loss_fn_inputs")
    arrays = {
        name: _array(inputs, name, len(tokens))
        for name in ("target_tokens", "weights", "mask", "logprobs", "advantages")
    }
    targets = token_ids(arrays["target_tokens"] or [], "loss_fn_inputs.target_tokens")
    if not targets:
        raise BadRow("loss_fn_inputs.target_tokens", "the token after each token of model_input", "none")
    weights = _weights(arrays)
    for place, (target, following) in enumerate(zip(targets, tokens[1:])):
        if target != following and weights[place]:
            raise BadRow("loss_fn_inputs.target_tokens",
                         f"the token that follows in model_input ({following}) where there is loss",
                         f"{target} at index {place}")
    row = {"input_ids": [*tokens, targets[-1]]}
    field = "loss_mask" if all(weight in (0, 1) for weight in weights) else "loss_weights"
    row[field] = [0, *weights]
    if arrays["logprobs"] is not None:
        row["logprobs"] = [None, *arrays["logprobs"]]
    if arrays["advantages"] is not None:
        row["advantages"] = [0.0, *arrays["advantages"]]
    yield checked(row)


def _input_tokens(record):
    """The tokens of model_input, whether it is an object of Tinker, its JSON, or a plain list."""
    value = record.get("model_input")
    if isinstance(value, list):
        return token_ids(value, "model_input")
    tokens = []
    for chunk in record.inside("model_input").each("chunks"):
        if chunk.get("type", "encoded_text") != "encoded_text" or "tokens" not in chunk:
            raise BadRow("model_input.chunks", "chunks of tokens only", shown(str(chunk.get("type"))))
        tokens += token_ids(chunk.list("tokens"), "model_input.chunks[].tokens")
    return tokens


def _array(inputs, name, count):
    """One entry for each token of model_input: TensorData, its JSON, a tensor, an array or a list; None: missing."""
    value = inputs.get(name)
    if isinstance(value, dict):
        if value.get("sparse_crow_indices") is not None:
            raise BadRow(f"loss_fn_inputs.{name}", "a dense array", "a sparse one")
        value = plain(value.get("data"))
    if value is None:
        return None
    return same_length(f"loss_fn_inputs.{name}", value, count, "model_input")


def _weights(arrays):
    for name in ("weights", "mask"):
        if arrays[name] is not None:
            return [number(f"loss_fn_inputs.{name}", value) for value in arrays[name]]
    if arrays["advantages"] is not None:
        return [int(number("loss_fn_inputs.advantages", value) != 0) for value in arrays["advantages"]]
    return [1] * len(arrays["target_tokens"])
