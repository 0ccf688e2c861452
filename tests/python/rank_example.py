# SPDX-License-Identifier: Apache-2.0
"""The example of training on several ranks, as one of their checks (rank_checks.py)."""

import contextlib
import importlib.util
import io
import re
from unittest import mock

import torch
import torch.distributed as dist

from conftest import REPOSITORY


def the_example(rank):
    """examples/train_fsdp2.py, in the process group of the checks. Both modes find the same losses."""
    spec = importlib.util.spec_from_file_location("train_fsdp2", REPOSITORY / "examples/train_fsdp2.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    found = []
    for mode, strategy in ("gathered", "partition"), ("zero3", "tree-packing"):
        with contextlib.redirect_stdout(io.StringIO()) as printed, mock.patch.object(dist, "init_process_group"), \
                mock.patch.object(dist, "destroy_process_group"), \
                mock.patch.object(torch.cuda, "is_available", return_value=False):  # fmt: skip
            example.main(["--steps", "2", "--characters", "400", "--token-budget", "512", "--mode", mode, "--strategy",
                          strategy])  # fmt: skip
        found.append(re.findall(r"^step \d: loss ([\d.]+), gradient norm ([\d.]+)$", printed.getvalue(), re.MULTILINE))
        assert rank.rank == 0 or printed.getvalue() == ""
        assert rank.rank > 0 or "predicted: the slowest rank is " in printed.getvalue()
    assert len(found[0]) == (2 if rank.rank == 0 else 0)
    for a, b in zip(*found):
        torch.testing.assert_close(*(torch.tensor(list(map(float, each))) for each in (a, b)), rtol=1e-3, atol=1e-3)
