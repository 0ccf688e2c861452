# SPDX-License-Identifier: Apache-2.0
"""Builds rows from prompts and responses, padded or not, with their arrays."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import BadRow, InputError
from .fields import Fields, Tally, WrongLength
from .rules import number, same_length, zero_one


@dataclass(frozen=True)
class Options:
    """How records are read. loss_weights: the stream of weights to use; None: the only one. turn_rewards: sum per-token
    rewards over turns. group_by: the field that becomes group_id."""

    loss_weights: str | None = None
    shared_targets: str = "once"
    include_failed: bool = False
    per_turn: bool = False
    turn_rewards: bool = False
    group_by: str | None = None


def joined(prompt, response, arrays=(), response_name="the response"):
    """A row of a prompt and a response, with loss on the response. arrays: (name, field of the row, values or None) with
    one entry per token of the response; a `loss_mask` among them selects the tokens with loss."""
    fill = {"loss_mask": 0, "loss_weights": 0.0, "advantages": 0.0}
    row = {"input_ids": [*prompt, *response], "loss_mask": [0] * len(prompt) + [1] * len(response)}
    for name, field, values in arrays:
        if values is not None:
            row[field] = [fill.get(field)] * len(prompt) + same_length(name, values, len(response), response_name)
    return row


def kept(values, keep):
    """The entries where `keep` is true, without padding."""
    return [value for value, keeps in zip(values, keep) if keeps]


def attention(name, values, count):
    """An attention mask of one sample as booleans. Raises BadRow for padding between tokens, which no model input can
    have."""
    mask = zero_one(name, values, count, "the padded sample")
    if 1 in mask:
        first, last = mask.index(1), len(mask) - mask[::-1].index(1)
        if 0 in mask[first:last]:
            raise BadRow(name, "padding at the ends only", f"a 0 at index {mask.index(0, first)}, between ones")
    return mask


def refuse_images(fields, *names):
    """Raises BadRow if one of these fields is not empty: images or other model inputs than tokens."""
    for name in names:
        value = fields.peek(name)
        if not _is_empty(value if isinstance(value, (dict, list, type(None))) else [value]):
            raise BadRow(name, "text alone, since rows have tokens only", "images or other inputs")


def _is_empty(value):
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    return all(_is_empty(item) if isinstance(item, (dict, list)) else item is None or (
        isinstance(item, (int, float)) and item == 0) for item in values)


def sum_of(name, values):
    """The sum of per-token rewards."""
    try:
        return float(sum(values))
    except TypeError:
        raise BadRow(name, "numbers", "something else") from None


def rewards_of_turns(name, values, loss_mask):
    """The sums of per-token rewards over each turn, a range of tokens with loss (docs/data-format.md). Rewards between
    turns count for the turn before, rewards before the first turn for the first."""
    turns, earlier, in_turn = [], 0.0, False
    for token, (value, loss) in enumerate(zip(same_length(name, values, len(loss_mask)), loss_mask)):
        if loss and token > 0 and not in_turn:
            turns.append(0.0)
        in_turn = bool(loss) and token > 0
        if turns:
            turns[-1] += number(name, value)
        else:
            earlier += number(name, value)
    return [turns[0] + earlier, *turns[1:]] if turns else []


def routes_with_last(routes, tokens):
    """Expert routes for each token of a row. Programs that never encode the last token record none for it; it gets the
    route of the token before it, because no loss depends on it."""
    if routes is None:
        return None
    if not isinstance(routes, list) or len(routes) not in (tokens, tokens - 1):
        raise BadRow("routed_experts", f"the routes of {tokens} or {tokens - 1} tokens",
                     f"{len(routes) if isinstance(routes, list) else 'none'}")
    unknown = [token for token, route in enumerate(routes[:tokens - 1]) if _is_zero_fill(route)]
    if unknown:
        raise BadRow("routed_experts", "the routes of every token", f"only zeros for token {unknown[0]}")
    if tokens > 1 and (len(routes) < tokens or _is_zero_fill(routes[-1])):
        return [*routes[:tokens - 1], routes[tokens - 2]]
    return routes


def _is_zero_fill(route):
    """Whether a token's route has expert 0 twice in a layer, which no router chooses."""
    if not isinstance(route, list):
        return False
    layers = route if route and isinstance(route[0], list) else [route]
    return all(len(layer) > 1 and not any(layer) for layer in layers)


def batch_size(fields, name):
    """The number of samples of a batch, by a field that has one list per sample; None for a single sample."""
    values = fields.list(name)
    return len(values) if values and isinstance(values[0], list) else None


def each_sample(fields, name, rows_of):
    """Yields rows_of(sample) for each sample of a batch, whose field `name` has one list per sample. Every other list is
    indexed by the sample; values that are not lists are shared. A record of a single sample is yielded as it is. A
    BadRow names the sample."""
    size = batch_size(fields, name)
    if size is None:
        yield from rows_of(fields)
        return
    columns = {}
    for key in fields.names():
        value = fields.peek(key)
        if isinstance(value, list) and len(value) != size:
            value = WrongLength(size, len(value))
        columns[key] = value if isinstance(value, list) else [value] * size
    for index in range(size):
        try:
            yield from rows_of(Fields({key: column[index] for key, column in columns.items()}, fields.tally))
        except BadRow as error:
            raise BadRow.within(f"sample {index}", error) from None


def converted(records: Iterable[Any], rows_of: Callable[[Fields], Iterable[Any]], what: str) -> list[dict[str, Any]]:
    """The rows of records in memory. Raises InputError, which names the record if there are several."""
    records, tally = list(records), Tally()
    rows: list[dict[str, Any]] = []
    for index, record in enumerate(records):
        try:
            rows += rows_of(Fields(record, tally))
        except BadRow as error:
            raise InputError(f"{what} {index}: {error}" if len(records) > 1 else str(error)) from None
        except (TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"{what} {index}: expected fields of the types that the documentation names, received others "
                f"({type(error).__name__}: {error})") from error
    return rows
