# SPDX-License-Identifier: Apache-2.0
"""Losses of patched models on two ranks, with FSDP2 and DistributedDataParallel over Gloo: the checks of head_rank_checks.py."""

import pytest

from rank_processes import outcomes

pytest.importorskip("transformers")
head_rank_checks = pytest.importorskip("head_rank_checks")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return outcomes("head_rank_checks", tmp_path_factory.mktemp("ranks"), sorted(head_rank_checks.CHECKS))


@pytest.mark.parametrize("name", [check.__name__ for check in head_rank_checks.CHECKS[2]])
def test_on_two_ranks(found, name):
    assert (name, 2) in found, f"it did not run, because another failed or the processes did:\n{found}"
    assert found[name, 2] is None, found[name, 2]
