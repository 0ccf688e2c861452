# SPDX-License-Identifier: Apache-2.0
"""docs/troubleshooting.md has every refusal and warning of the sources (tests/messages.py), and no others.

A message is covered by a pattern of the page whose pieces between `...` it has in order. Patterns that say hardly anything
(GENERAL) cover those messages only that have no other words.
"""

import re
import sys

import pytest

from conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "tests"))
from messages import messages, sources, tidy

PAGE = (REPOSITORY / "docs/troubleshooting.md").read_text(encoding="utf-8")
GENERAL = {"expected ..., received", "...: ...: expected ..., received ...", "cannot ...:", "row ...:", "--model ...:", "source ...:"}


def patterns(page):
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    return [pattern for row in rows for pattern in re.findall(r"`([^`]+)`", row[0])], rows


def regex_of(pattern):
    pieces = [re.escape(piece) for piece in pattern.split("...")]
    return re.compile(rf"\W*{r'(?:[.]{3})'.join(pieces)}\W*" if pattern in GENERAL else ".*".join(pieces))


def without_quotes(text):
    return text.replace("`", "")


def uncovered(found, page):
    general = [regex_of(pattern) for pattern in patterns(page)[0] if pattern in GENERAL]
    others = [regex_of(pattern) for pattern in patterns(page)[0] if pattern not in GENERAL]
    for message in found:
        text = without_quotes(message.text)
        if not any(each.search(text) for each in others) and not any(each.fullmatch(text) for each in general):
            yield message


def test_every_message_of_the_sources_is_on_the_page():
    found = messages(sources())
    assert len(found) > 600
    missing = [f"{message.place}: {message.text}" for message in uncovered(found, PAGE)]
    assert not missing, "docs/troubleshooting.md lacks\n" + "\n".join(missing)


def test_the_page_has_no_message_that_the_sources_have_not():
    texts = [without_quotes(message.text) for message in messages(sources())]
    unknown = [pattern for pattern in patterns(PAGE)[0] if not any(regex_of(pattern).search(text) for text in texts)]
    assert not unknown, f"no source has {unknown}"


def test_every_row_has_a_cause_and_a_cure():
    for row in patterns(PAGE)[1]:
        assert len(row) == 3 and row[1] and (row[2] or row[1].startswith("a note")), row


@pytest.mark.parametrize("name, source", [
    ("a.py", 'raise InputError(f"frobnicate: {name} is purple, " "which nobody wants")\n'),
    ("a.py", 'import warnings\nwarnings.warn(f"{name} is purple, which nobody wants", stacklevel=2)\n'),
    ("a.cpp", 'ESPALIER_CHECK(a < f(")"), "frobnicate: {} is purple, "\n  "which nobody wants", a);\n'),
    ("a.cpp", 'TORCH_CHECK(a, "frobnicate: ", a, " is purple, which nobody wants");\n'),
    ("a.cpp", 'note(fmt::format("warning: {} is purple, which nobody wants", a));\n'),
])  # fmt: skip
def test_a_new_message_is_missed_on_the_page(tmp_path, name, source):
    """Controls: messages that no page has are found in sources of either language."""
    (tmp_path / name).write_text(source)
    found = messages([tmp_path / name])
    assert len(found) == 1 and found[0].text.endswith("is purple, which nobody wants")
    assert list(uncovered(found, PAGE)) == found
    assert tidy("a {} b {:.3f}") == "a ... b ..."
