# SPDX-License-Identifier: Apache-2.0
"""The code of the documents runs, and prints what the documents show (tests/documents.py)."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "tests"))
from documents import blocks_of, check_lines, commands_of, make_desk, run_page, skeleton

DOCUMENTS = [path.relative_to(REPOSITORY) for path in
             [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]]  # fmt: skip
NEEDED = {"sft": ["trl", "datasets"], "grpo-trl": ["trl", "datasets"]}  # beside what every page may use


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder in which the documents' code finds what it names."""
    folder = tmp_path_factory.mktemp("desk")
    with pytest.MonkeyPatch.context() as patch:
        path = [str(REPOSITORY / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]  # with a python3 as a user has it
        patch.setenv("PATH", ":".join(path))
        patch.setenv("PYTHONPATH", str(REPOSITORY / "python"))
        patch.setenv("M", "")  # what make_desk sets goes with it
        make_desk(folder)
        yield folder


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_the_code_of_a_document_runs_and_prints_what_it_shows(desk, document):
    for package in NEEDED.get(document.stem, ()):
        pytest.importorskip(package)
    blocks = list(blocks_of((REPOSITORY / document).read_text(encoding="utf-8")))
    assert run_page(REPOSITORY / document, desk) or not any(block.shown for block in blocks)


def test_code_and_output_are_told_apart():
    text = ("```sh\na \\\n  b\nc 'd\ne'\n```\n```text\nf 1\n```\nwords\n```sh\ng\n```\nwords\n```text\nh\n```\n"
            '```python title="x.py"\ni\n```\n```python\nj\n```\n```text title="similar"\nk\n```\n')  # fmt: skip
    blocks = list(blocks_of(text))
    assert [block[0] for block in blocks] == ["sh", "sh", "python", "python"]
    assert [block.shown for block in blocks] == ["f 1\n", None, None, "k\n"]
    assert [block.title for block in blocks] == ["", "", "x.py", ""] and [block.exactly for block in blocks] == [True, False, False, False]
    assert list(commands_of(blocks[0].code)) == ["a \\\n  b", "c 'd\ne'"]
    assert skeleton("  loss 1.5e-3 in  model.layers.0.w 7,000") == skeleton("loss 2 in model.norm 1")
    assert skeleton("2 rows") != skeleton("2 trees")


def test_pages_that_show_something_else_are_found(tmp_path):
    """Negative controls."""
    page = tmp_path / "page.md"
    for code in ("```python\nprint(1)\n```\n```text\n2\n```\n", "```python\nprint('a 1')\n```\n```text title=\"similar\"\nb 1\n```\n",
                 "```sh\necho a\n```\n```text\nb\n```\n", "```sh\nfalse\n```\n"):  # fmt: skip
        page.write_text(code)
        with pytest.raises(AssertionError):
            run_page(page, tmp_path)
    page.write_text("```python\nprint('a 1')\n```\n```text title=\"similar\"\na 2\n```\n")
    assert run_page(page, tmp_path) == 1
    check_lines("a 1\n", "a 2\n")


def test_quickstarts_are_not_run_with_the_package_of_the_clone(tmp_path):
    """scripts/quickstarts.sh proves what is installed."""
    (tmp_path / "espalier").symlink_to(REPOSITORY / "python/espalier")
    (tmp_path / "python").write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} PYTHONSAFEPATH= exec {sys.executable} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    done = subprocess.run([REPOSITORY / "scripts/quickstarts.sh", tmp_path / "python"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "received that of this clone" in done.stderr or "expected a Python with espalier, torch" in done.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_pictures_are_there(document):
    text = (REPOSITORY / document).read_text(encoding="utf-8")
    for name in [*re.findall(r'(?:src|srcset)="([^"]+)"', text), *re.findall(r"!\[[^]]*\]\(([^)\s]+)\)", text)]:
        assert (REPOSITORY / document).parent.joinpath(name).stat().st_size > 0
