# SPDX-License-Identifier: Apache-2.0
"""Checks of rows (docs/data-format.md), and of the fields of other formats of which rows are made.

`checked` normalises a row: ids are ints, masks 0 and 1 (0 for the first token, which nothing predicts), other numbers floats.
A log-probability that is missing or not finite becomes null if the token carries no loss, and is an error if it does.
"""

import math

from ..errors import BadRow, InputError
from ..rows.json_lines import is_text, shown

LARGEST_ID = 2**31 - 1


def checked(row):
    """The normalised row without fields that are missing or None; raises BadRow."""
    from ..native import core  # the modules of commands are read without it

    try:
        return core.checked_row(row)
    except InputError as error:
        raise BadRow.saying(str(error)) from None


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


def zero_one(name, values, count, what="input_ids"):
    """A mask as ints, of such a list; accepts 0, 1, 0.0, 1.0, true and false."""
    for index, value in enumerate(same_length(name, values, count, what)):
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
