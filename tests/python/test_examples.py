# SPDX-License-Identifier: Apache-2.0
"""The examples run, and find the same losses patched and unpatched."""

import importlib
import re

import pytest
import torch

from conftest import REPOSITORY
from espalier.hf import patching

PAGE = (REPOSITORY / "examples/README.md").read_text(encoding="utf-8")
TINY = ["--steps", "1", "--batch-size", "2", "--hidden-size", "32", "--layers", "1"]
NEEDED = {"trl_sft": ["trl", "datasets"], "trl_dpo": ["trl", "datasets"], "trl_grpo": ["trl", "datasets"],
          "peft_lora": ["peft"]}  # fmt: skip


@pytest.fixture
def example(monkeypatch):
    """main() of an example, by name."""
    monkeypatch.syspath_prepend(REPOSITORY / "examples")

    def main_of(name):
        for package in NEEDED.get(name, ()):
            pytest.importorskip(package)
        return importlib.import_module(name).main

    return main_of


@pytest.mark.parametrize("name", NEEDED)
def test_side_by_side(example, name, capsys):
    example(name)(TINY)
    printed = capsys.readouterr().out
    encoded = re.search(r"^tokens encoded +([\d,]+) +([\d,]+) +[\d.]+x$", printed, re.MULTILINE)
    flat, tree = (int(number.replace(",", "")) for number in encoded.groups())
    assert 0 < tree < 0.8 * flat and re.search(r"^seconds per step .* [\d.]+x$", printed, re.MULTILINE)
    assert "step 1: loss " in printed and printed.endswith("Losses and gradient norms of the first step agree.\n")


def test_traces_to_checkpoint(example, capfd):
    settings = "--steps 1 --questions 2 --answers 3 --answer-tokens 8 --instructions 200"
    example("traces_to_checkpoint")(settings.split())
    printed, said = capfd.readouterr()
    assert "import: traces: 6 rows" in said and "ratio 1.0000" in said  # the log-probabilities are the model's own
    assert re.search(r"^tokens encoded .* 4\.\d\dx$", printed, re.MULTILINE)
    assert "verdict: train on trees" in printed and "Transformers, from step_1: '" in printed
    assert "\nLosses and gradient norms of the first step agree.\n" in printed


def test_the_page_and_make_have_every_example():
    written = {path.stem for path in (REPOSITORY / "examples").glob("*.py")} - {"side_by_side"}
    run = re.search(r"^EXAMPLES = (.*)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert set(run) <= written == set(re.findall(r"\]\((\w+)\.py\)", PAGE)) - {"side_by_side"}


def test_trainings_that_differ(example, monkeypatch):
    """Negative control: attention that sees other rows."""

    class Blind(patching.TreeRun):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.subtree_end = torch.full_like(self.subtree_end, self.num_tokens)

    monkeypatch.setattr(patching, "TreeRun", Blind)
    with pytest.raises(SystemExit, match="expected equal (losses|gradient norms), received"):
        example("peft_lora")(TINY)
