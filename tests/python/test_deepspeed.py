# SPDX-License-Identifier: Apache-2.0
"""Patched models under DeepSpeed on two ranks over Gloo: the checks of deepspeed_rank_checks.py."""

import pytest

from rank_processes import check_passed, outcomes
from wrappers import path_with

CHECKS = ["set_up", *(f"steps_of_stage_{stage}" for stage in range(4)), "another_forest_is_seen", "heads_are_shared",
          "logits_are_those_of_the_forward_pass", "what_cannot_be_done_is_refused", "tensor_parallel_heads",
          "ulysses_is_refused", "deepcompile_is_refused"]  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return outcomes("deepspeed_rank_checks", folder, [2], PYTHONPATH=path_with("deepspeed"))


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_ranks(found, name):
    check_passed(found, name, 2)


def test_the_checks_are_all(found):
    assert {name for name, _ in found} == set(CHECKS)
