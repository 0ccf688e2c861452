# SPDX-License-Identifier: Apache-2.0
"""What trajectories share, what that gains, and what sharing was lost."""

import functools
import html
import json
import os
from pathlib import Path

from .errors import InputError
from .native import core
from .rows.files import read, trajectories
from .trees import Forest


class Report:
    """What `espalier.inspect` found. `str(report)` is the text of the command; a notebook shows the page.

    data    dict: counts and ratios of the forest, predicted speed-ups, sharing by depth, lost sharing by cause, verdict
    forest  the Forest of the rows
    """

    def __init__(self, found, title):
        self._found = found
        self._title = title

    @functools.cached_property
    def data(self) -> dict:
        """What `espalier inspect --json` prints."""
        return json.loads(self._found.json())

    @property
    def forest(self) -> Forest:
        """The prefix trees of the rows."""
        return self._found.forest

    def html(self) -> str:
        """A self-contained page with the trees, as text. It needs no network."""
        return self._found.page(self._title)

    def __str__(self):
        return self._found.text()

    def __repr__(self):
        return f"<espalier.Report of {self._title}: {self.data['verdict']['text']}>"

    def _repr_html_(self):
        return f'<iframe srcdoc="{html.escape(self.html())}" width="100%" height="720" style="border: 0"></iframe>'


def inspect(rows, *, model=None, title: str | None = None) -> Report:
    """Which prefixes trajectories share, what that gains in tokens, and what was lost and why.

    rows   a file, a list of files or patterns, or rows as `espalier.write` takes them
    model  a Hugging Face folder, or its tokenizer.json, to show text; without it token ids are shown
    title  what the data is called on the page

    Returns a Report, with the figures of `espalier inspect --json` in `data`.

    >>> import espalier
    >>> report = espalier.inspect([[5, 6, 7, 8], [5, 6, 9], [5, 6, 9, 1]])
    >>> report.data["flat_tokens"], report.data["tree_tokens"], report.data["append_only_tokens"]
    (11, 6, 8)
    >>> report.html().startswith("<!DOCTYPE html>")
    True
    """
    names = _names_of(rows)
    found = core.inspect(trajectories(rows) if names is None else read(names), _tokenizer_of(model))
    return Report(found, title or ("rows" if names is None else ", ".join(Path(name).name for name in names)))


def _names_of(rows):
    if isinstance(rows, str | os.PathLike):
        return [rows]
    if isinstance(rows, list | tuple) and rows and all(isinstance(row, str | os.PathLike) for row in rows):
        return list(rows)
    return None


def _tokenizer_of(model):
    if model is None:
        return None
    path = Path(model)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise InputError(f"model: expected a folder with a tokenizer.json, or that file, received {model}")
    return os.fspath(path)
