# SPDX-License-Identifier: Apache-2.0
"""Reads records of other programs in any container: JSON, Parquet, tensors, arrays, objects with attributes.

`Fields` returns a record's fields as plain lists and numbers; a `Tally` tracks which were read, so that a command can
list those that it ignored.
"""

from collections import Counter
from dataclasses import dataclass, field

from ..rows.json_lines import is_text, shown
from ..errors import BadRow


def plain(value):
    """Converts tensors, arrays and nested sequences of them to lists, numbers and strings; other objects stay."""
    if value is None or isinstance(value, (bool, int, float, str, dict)):
        return value
    if isinstance(value, (list, tuple)):
        if all(type(item) in (int, float, bool, str) for item in value):
            return list(value)
        return [plain(item) for item in value]
    if getattr(value, "is_nested", False):  # a tensor whose rows differ in length
        return [plain(row) for row in value.unbind()]
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return value


def mapping_of(thing):
    """The fields of a record as a dict: the mapping itself, or the attributes of an object."""
    if hasattr(thing, "keys") and hasattr(thing, "__getitem__"):
        return thing
    if hasattr(thing, "__dict__"):
        return vars(thing)
    names = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    if names:
        return {name: getattr(thing, name, None) for name in names}
    raise BadRow("<record>", "an object with fields", shown(thing) if isinstance(thing, (str, list, int, float))
                 else f"a {type(thing).__name__}")


@dataclass(frozen=True)
class WrongLength:
    """Placeholder for a list of a batch that does not have one entry per sample. Reading it raises BadRow."""

    expected: int
    received: int


@dataclass
class Tally:
    """Fields and notes of all records that a command has read."""

    seen: dict = field(default_factory=dict)  # names of fields, in order of appearance
    used: dict = field(default_factory=dict)
    notes: Counter = field(default_factory=Counter)  # notes for the user and how often they apply
    counts: Counter = field(default_factory=Counter)
    decimals: int = 0  # maximum number of decimals of a log-probability; 17: not rounded

    def ignored(self):
        return [name for name in self.seen if name not in self.used]

    def next(self, what):
        """0, 1, 2, ...: the next number for `what`."""
        self.counts[what] += 1
        return self.counts[what] - 1

    def see_logprobs(self, values):
        if self.decimals < 17 and any(value is not None and round(value, 4) != value for value in values):
            self.decimals = 17
        elif self.decimals < 4 and values:
            self.decimals = 4


class Fields:
    """The fields of one record. Null counts as missing."""

    def __init__(self, record, tally=None, prefix=""):
        self._values = mapping_of(record)
        self._tally, self._prefix = Tally() if tally is None else tally, prefix
        for name in self.names():
            self._tally.seen.setdefault(prefix + name)

    @property
    def tally(self):
        return self._tally

    def names(self):
        return [name for name in self._values.keys() if isinstance(name, str) and self._values[name] is not None]

    def peek(self, name):
        """Like get, but the field does not count as used."""
        return plain(self._values[name]) if name in self else None

    def __contains__(self, name):
        return name in self._values.keys() and self._values[name] is not None

    def get(self, name, default=None):
        """The field as lists, numbers, texts or dicts."""
        if name not in self:
            return default
        self._tally.used.setdefault(self._prefix + name)
        value = plain(self._values[name])
        if isinstance(value, WrongLength):
            raise BadRow(self._prefix + name, f"{value.expected} entries, one for each sample", f"{value.received}")
        return value

    def list(self, name):
        """The field as a list; raises BadRow if it is missing or has another type."""
        value = self.get(name)
        if not isinstance(value, list):
            raise BadRow(
                self._prefix + name, "a list",
                shown(value) if value is None or isinstance(value, (str, int, float)) else f"a {type(value).__name__}")
        return value

    def first_of(self, *names):
        """(name, value) of the first field that is present; (None, None) if none is."""
        for name in names:
            if name in self:
                return name, self.get(name)
        return None, None

    def inside(self, name):
        """The fields of the object in this field; no fields if it is missing."""
        if name not in self:
            return Fields({}, self._tally, f"{self._prefix}{name}.")
        self._tally.seen.pop(self._prefix + name, None)  # its own fields are listed instead
        if isinstance(self._values[name], (str, int, float, list)):
            raise BadRow(self._prefix + name, "an object", shown(self._values[name]))
        return Fields(self._values[name], self._tally, f"{self._prefix}{name}.")

    def each(self, name):
        """The fields of each object of a list in this field."""
        items = self._values[name] if name in self else None
        self._tally.seen.pop(self._prefix + name, None)
        if not isinstance(items, (list, tuple)):
            raise BadRow(self._prefix + name, "a list of objects", shown(items) if items is None or isinstance(
                items, (str, int, float, dict)) else f"a {type(items).__name__}")
        return [Fields(item, self._tally, f"{self._prefix}{name}[].") for item in items]


def scalar_text(value, name):
    """A name or an id as text; raises BadRow."""
    if isinstance(value, str) and value:
        if not is_text(value):
            raise BadRow(name, "text in UTF-8", "an unpaired surrogate")
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    raise BadRow(name, "a non-empty string or a number", shown(value))


def scalar_at(fields, path):
    """The text or number at a dotted path, as text. A key that contains dots itself is tried first. Raises BadRow."""
    if path in fields:
        return scalar_text(fields.get(path), path)
    first, *keys = path.split(".")
    value = fields.get(first)
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    if value is None:
        raise BadRow(path, "a string or a number to group by", "no such field")
    return scalar_text(value, path)


# Of an answer: true and false as files have them. 1 and 0 equal True and False.
VERDICTS = {True: True, False: False, "true": True, "false": False, "True": True, "False": False, "1": True, "0": False}


def verdict(fields):
    """Whether an answer was good, by `chosen`, `label` (TRL, ms-swift) or `kto_tag` (LLaMA-Factory); None without them."""
    for name in ("chosen", "label", "kto_tag"):
        if isinstance(fields.peek(name), (bool, int, str)) and fields.peek(name) in VERDICTS:
            return VERDICTS[fields.get(name)]
    return None
