# SPDX-License-Identifier: Apache-2.0
"""Messages to callers from Python name keyword arguments, not flags of the command line."""

import os
import re
import subprocess
import sys

import pytest

import espalier
from conftest import REPOSITORY
from espalier.native import core


def test_options():
    with pytest.raises(espalier.InputError) as raised:
        core.check_options("plan", [("token-budget", b"-1")])
    assert str(raised.value) == "token_budget: expected a whole number of at least 0, received -1"
    in_command = "from espalier import errors; errors.IN_COMMAND = True; from espalier.native import core; "
    code = in_command + "core.check_options('plan', [('token-budget', b'-1')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(REPOSITORY / "python")})  # fmt: skip
    assert done.stderr.endswith("--token-budget: expected a whole number of at least 0, received -1\n"), done.stderr


def test_plans():
    forest = espalier.build([[1, 2, 3, 4, 5, 6]])
    with pytest.raises(espalier.InputError, match='longest trajectory, or strategy="partition", which cuts') as raised:
        espalier.plan(forest, token_budget=3, strategy="tree-packing")
    assert type(raised.value) is espalier.InputError and "--" not in str(raised.value)


def test_reports():
    text = str(espalier.inspect([[5, 6, 7, 8], [5, 6, 9]]))
    assert "model gives FLOPs" in text and "(ids only: model with a tokenizer.json" in text
    assert not re.search(r"--[a-z]", text)
