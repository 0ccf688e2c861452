# SPDX-License-Identifier: Apache-2.0
"""What trajectories share, what that gains, and what sharing was lost."""

import functools
import html
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import InputError
from .native import core
from .page.render import page_of
from .printed.inspect import report_text
from .printed.verdict import with_verdict
from .rows.files import Trajectories, file_names, read, trajectories
from .rows.sequences import Row
from .trees import Forest
from .vocabulary import token_bytes


class Report:
    """What `espalier.inspect` found. `str(report)` is the text of the command; a notebook shows the page.

    Reports can be pickled and copied.

    Attributes:
        data: dict: counts and ratios of the forest, predicted speed-ups, sharing by depth, lost sharing by cause, verdict.
        forest: The Forest of the rows.

    Examples:
        >>> import espalier
        >>> report = espalier.inspect([[5, 6, 7, 8], [5, 6, 9]])
        >>> report.forest.tree_tokens
        5
    """

    def __init__(self, found: "core.RowsReport | _Found", title: str) -> None:
        self._found = found
        self._title = title

    @functools.cached_property
    def data(self) -> dict[str, Any]:
        """What `espalier inspect --json` prints."""
        return with_verdict(json.loads(self._found.json()))

    @property
    def forest(self) -> Forest:
        """The prefix trees of the rows."""
        return self._found.forest

    def html(self) -> str:
        """A self-contained page with the trees, which needs no network.

        Returns:
            The page as text.

        Examples:
            >>> import espalier
            >>> espalier.inspect([[5, 6, 7, 8], [5, 6, 9]]).html().startswith("<!DOCTYPE html>")
            True
        """
        return page_of(**json.loads(self._found.page_data(self._title)))

    def __str__(self) -> str:
        return report_text(self.data, has_model=False, model="model")

    def __repr__(self) -> str:
        return f"<espalier.Report of {self._title}: {self.data['verdict']['text']}>"

    def __reduce__(self) -> tuple[Any, ...]:
        found = self._found
        return Report, (_Found(found.forest, found.json(), found.page_data(self._title)), self._title)

    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{html.escape(self.html())}" width="100%" height="720" style="border: 0"></iframe>'


@dataclass(frozen=True)
class _Found:
    """What a report that was pickled or copied has in place of the library's."""

    forest: Forest
    _json: str
    _page_data: str

    def json(self) -> str:
        return self._json

    def page_data(self, _title: str) -> str:
        return self._page_data


def inspect(rows: str | os.PathLike[str] | Trajectories | Mapping[str, Any] | Iterable[Row | str | os.PathLike[str]], *,
            model: str | os.PathLike[str] | None = None, title: str | None = None) -> Report:  # fmt: skip
    """Which prefixes trajectories share, what that gains in tokens, and what was lost and why.

    Args:
        rows: A file, a list of files or patterns, or rows as `espalier.write` takes them.
        model: A Hugging Face folder, or its tokenizer.json, to show text; without it token ids are shown.
        title: What the data is called on the page.

    Returns:
        A Report, with the figures of `espalier inspect --json` in `data`.

    Raises:
        InputError: Rows, files or the tokenizer cannot be used.

    Examples:
        >>> import espalier
        >>> report = espalier.inspect([[5, 6, 7, 8], [5, 6, 9], [5, 6, 9, 1]])
        >>> report.data["flat_tokens"], report.data["tree_tokens"], report.data["append_only_tokens"]
        (11, 6, 8)
    """
    names = file_names(rows)
    given: Any = rows
    found = core.inspect(trajectories(given) if names is None else read(names), *_vocabulary_of(model))
    return Report(found, title or ("rows" if names is None else ", ".join(Path(name).name for name in names)))


def _vocabulary_of(model: str | os.PathLike[str] | None) -> tuple[NDArray[np.int64] | None, bytes]:
    if model is None:
        return None, b""
    path = Path(model)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise InputError(f"model: expected a folder with a tokenizer.json, or that file, received {model}")
    offsets, texts = token_bytes(path)
    return np.asarray(offsets, np.int64), texts
