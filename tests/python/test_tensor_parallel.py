# SPDX-License-Identifier: Apache-2.0
"""Models whose heads, vocabulary and experts Transformers has divided over ranks: two and four of them over Gloo, which run the
checks of tp_checks.py, with data and context parallelism beside. `--long` takes every shape for every family."""

import pytest

from rank_processes import check_passed, names_and_ranks, outcomes

pytest.importorskip("transformers")
pytest.importorskip("transformers.distributed.tensor_parallel")  # as Transformers 5.23 has it
tp_checks = pytest.importorskip("tp_checks")


@pytest.fixture(scope="module")
def found(tmp_path_factory, long_tests):
    return outcomes("tp_checks", tmp_path_factory.mktemp("heads"), sorted(tp_checks.CHECKS), ESPALIER_LONG_TESTS=str(int(long_tests)))


@pytest.mark.parametrize("name, ranks", names_and_ranks(tp_checks.CHECKS))
def test_on_ranks(found, name, ranks):
    check_passed(found, name, ranks)
