# SPDX-License-Identifier: Apache-2.0
"""Losses of patched models on two ranks, with FSDP2 and DistributedDataParallel over Gloo: the checks of head_rank_checks.py."""

import pytest

from rank_processes import check_passed, names_and_ranks, outcomes

pytest.importorskip("transformers")
head_rank_checks = pytest.importorskip("head_rank_checks")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return outcomes("head_rank_checks", tmp_path_factory.mktemp("ranks"), sorted(head_rank_checks.CHECKS))


@pytest.mark.parametrize("name, ranks", names_and_ranks(head_rank_checks.CHECKS))
def test_on_ranks(found, name, ranks):
    check_passed(found, name, ranks)
