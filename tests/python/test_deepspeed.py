# SPDX-License-Identifier: Apache-2.0
"""Patched models under DeepSpeed on two ranks over Gloo: the checks of deepspeed_rank_checks.py."""

import importlib.util
import os

import pytest

from conftest import REPOSITORY
from rank_processes import check_passed, outcomes

WRAPPERS = REPOSITORY / ".venv/wrappers"  # packages that no other test should see (requirements-wrappers.txt)
CHECKS = ["set_up", *(f"steps_of_stage_{stage}" for stage in range(4)), "another_forest_is_seen", "heads_are_shared",
          "logits_are_those_of_the_forward_pass", "what_cannot_be_done_is_refused", "tensor_parallel_heads",
          "ulysses_is_refused"]  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    if not (WRAPPERS / "deepspeed").exists() and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs the package deepspeed (requirements-wrappers.txt)")
    path = os.pathsep.join([str(WRAPPERS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return outcomes("deepspeed_rank_checks", tmp_path_factory.mktemp("ranks"), [2], PYTHONPATH=path)


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_ranks(found, name):
    check_passed(found, name, 2)


def test_the_checks_are_all(found):
    assert {name for name, _ in found} == set(CHECKS)
