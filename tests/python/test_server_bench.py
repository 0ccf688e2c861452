# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of `espalier serve` on tiny models: they run, and make their tables."""

import subprocess
import sys

import pytest

from conftest import REPOSITORY

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("words", [["server.py"], ["server.py", "--conversations"], ["server_clients.py", "--against", str(REPOSITORY)]],
                         ids=["steps", "conversations", "clients"])  # fmt: skip
def test_the_table(words):
    pytest.importorskip("tinker", reason="the client of the Tinker API")
    pytest.importorskip("peft")
    script, *more = words
    done = subprocess.run([sys.executable, REPOSITORY / "bench" / script, *more, "--quick"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    header, rule, *rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert rows and all(line.count("|") == header.count("|") for line in [rule, *rows])
