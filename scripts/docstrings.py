# SPDX-License-Identifier: Apache-2.0
"""An extension of griffe for mkdocs.yml: docstrings that are laid out by hand keep their lines.

Google's sections (Args:, Returns:, ...) are read as such. In a docstring without them everything after the first paragraph is shown
as it stands in the source, since its columns mean something.
"""

import inspect
import re

import griffe

SECTIONS = re.compile(r"^(Args|Arguments|Returns|Raises|Yields|Attributes|Example|Examples):\s*$", re.MULTILINE)


class KeepLines(griffe.Extension):
    def on_object(self, *, obj, **_):
        if obj.docstring is None or SECTIONS.search(obj.docstring.value):
            return
        first, _, rest = inspect.cleandoc(obj.docstring.value).partition("\n\n")
        if rest.strip():
            obj.docstring.value = f"{first}\n\n```text\n{rest.rstrip()}\n```"
