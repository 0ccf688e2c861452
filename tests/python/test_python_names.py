# SPDX-License-Identifier: Apache-2.0
"""Messages to callers from Python name keyword arguments, not flags of the command line."""

import re

import pytest

import espalier
from espalier.errors import python_names


@pytest.mark.parametrize("text, expected", [
    ("expected --strategy partition or auto", 'expected strategy="partition" or auto'),
    ("give a smaller --memory-budget, --token-budget or --batch-size", "give a smaller memory_budget, token_budget or batch_size"),
    ("--device cuda:1: no CUDA device is visible", "device cuda:1: no CUDA device is visible"),
    ("(shown by `espalier device --check moe --device cuda:0`)", "(shown by `espalier device --check moe --device cuda:0`)"),
    ("`--model` gives FLOPs", "`model` gives FLOPs"),
    ("a--b, --, ---x and x--strategy partition", "a--b, --, ---x and x--strategy partition"),
    ("--strategy partitions", "strategy partitions"),
])  # fmt: skip
def test_names(text, expected):
    assert python_names(text) == expected


def test_plans():
    forest = espalier.build([[1, 2, 3, 4, 5, 6]])
    with pytest.raises(espalier.InputError, match='longest trajectory, or strategy="partition", which cuts') as raised:
        espalier.plan(forest, token_budget=3, strategy="tree-packing")
    assert type(raised.value) is espalier.InputError and "--" not in str(raised.value)


def test_reports():
    text = str(espalier.inspect([[5, 6, 7, 8], [5, 6, 9]]))
    assert "model gives FLOPs" in text and "(ids only: model with a tokenizer.json" in text
    assert not re.search(r"--[a-z]", text)
