# SPDX-License-Identifier: Apache-2.0
"""espalier.distributed: two and four ranks with FSDP2 over Gloo, which run the checks of rank_checks.py, and what needs
no ranks."""

import numpy as np
import pytest

import espalier
from rank_processes import check_passed, names_and_ranks, outcomes

pytest.importorskip("transformers")
distributed = pytest.importorskip("espalier.distributed")
rank_checks = pytest.importorskip("rank_checks")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return outcomes("rank_checks", tmp_path_factory.mktemp("ranks"), sorted(rank_checks.CHECKS))


@pytest.mark.parametrize("name, ranks", names_and_ranks(rank_checks.CHECKS))
def test_on_ranks(found, name, ranks):
    check_passed(found, name, ranks)


def test_shares():
    """Every row is on one rank, and other rows, or the same in another order, have another digest."""
    from espalier.distributed.share import share_of

    rows = rank_checks.rows_of_a_step()
    for given in rows, espalier.trajectories([{"input_ids": row} for row in rows]):
        shares = [share_of(given, rank, 3) for rank in range(3)]
        assert sorted(np.concatenate([share.trajectories for share in shares])) == list(range(len(rows)))
        for share in shares:
            own = [rows[number] for number in share.trajectories]
            assert [row if isinstance(row, list) else list(row["input_ids"]) for row in share.rows] == own
            assert share.forest.flat_tokens == sum(map(len, own))
        assert sum(share.forest.tree_tokens for share in shares) == shares[0].encoded_tokens
        assert len({share.digest() for share in shares}) == 1
    others = [share_of(rows[::-1], 0, 3), share_of(rows, 0, 2), share_of(rows[:-1], 0, 3),
              share_of(rows, 0, 3, tree_keys=list(range(len(rows))))]  # fmt: skip
    assert len({share.digest() for share in [shares[0], *others]}) == 5
    assert others[3].encoded_tokens == sum(map(len, rows))
    with pytest.raises(espalier.InputError, match="received packed arrays"):
        share_of((np.zeros(1, np.int64), np.zeros(0, np.int32)), 0, 2)


def test_reports():
    report = distributed.Report(300, 100, 0.125, (1.0, 2.0, 3.0), (2, 1, 4), (2, 3, 0))
    assert str(report).splitlines() == [
        "3 ranks, 100 of 300 tokens encoded (3.00x)", "predicted: the slowest rank is 12.5% over the mean",
        "measured: the slowest rank is 50.0% over the mean",
        "micro-batches by rank: 2, 1, 4, and 5 without weight"]  # fmt: skip
    assert str(distributed.Report(None, None, None, None, None, (0, 0))) == "2 ranks"


def test_one_process_alone():
    with pytest.raises(espalier.InputError, match="expected a process group, found none; start the program by"):
        distributed.Ranks(None)
