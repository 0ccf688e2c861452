# SPDX-License-Identifier: Apache-2.0
"""Libraries that wrap models, for tests that run them in processes of their own (requirements-wrappers.txt)."""

import importlib.util
import os

import pytest

from conftest import REPOSITORY

FOLDER = REPOSITORY / ".venv/wrappers"  # no other test should see them


def path_with(package):
    """PYTHONPATH with which a process can import a package. Skips where it is not installed."""
    if not (FOLDER / package).exists() and importlib.util.find_spec(package) is None:
        pytest.skip(f"needs the package {package} (requirements-wrappers.txt)")
    return os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
