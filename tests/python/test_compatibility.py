# SPDX-License-Identifier: Apache-2.0
"""docs/compatibility.md: every row of its tables names tests, and these exist."""

import ast
import re

import pytest

import rank_checks
from conftest import REPOSITORY

TEXT = (REPOSITORY / "docs/compatibility.md").read_text()
ROWS = [line for line in TEXT.splitlines() if line.startswith("| ") and not line.endswith("| test |")]
NAMED = re.compile(r"`(tests/python/\w+\.py): (\w+)`")


def test_there_are_tables():
    assert len(ROWS) > 30 and len(re.findall(r"^\|---", TEXT, re.MULTILINE)) == 8


@pytest.mark.parametrize("row", ROWS)
def test_a_row_names_tests_that_exist(row):
    cell = row.strip("| ").split(" | ")[-1]
    found = NAMED.findall(cell)
    assert found and not NAMED.sub("", cell).strip(", ")
    for file, name in found:
        tree = ast.parse((REPOSITORY / file).read_text())
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        assert name in functions
        run = {check.__name__ for checks in rank_checks.CHECKS.values() for check in checks}
        assert name.startswith("test_") or (file.endswith("rank_checks.py") and name in run)


def test_tested_versions_of_transformers():
    from espalier.hf.versions import TESTED

    assert f"| Transformers | {', '.join(TESTED)} |" in TEXT
