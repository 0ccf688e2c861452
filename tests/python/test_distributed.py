# SPDX-License-Identifier: Apache-2.0
"""Two and four ranks with FSDP2 over Gloo: the checks of rank_checks.py."""

import pytest

from rank_processes import outcomes

pytest.importorskip("transformers")
rank_checks = pytest.importorskip("rank_checks")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return outcomes("rank_checks", tmp_path_factory.mktemp("ranks"), sorted(rank_checks.CHECKS))


@pytest.mark.parametrize("name, ranks", [(check.__name__, ranks) for ranks, checks in rank_checks.CHECKS.items()
                                         for check in checks])  # fmt: skip
def test_on_ranks(found, name, ranks):
    assert (name, ranks) in found, f"it did not run, because another failed or the processes did:\n{found}"
    assert found[name, ranks] is None, found[name, ranks]
