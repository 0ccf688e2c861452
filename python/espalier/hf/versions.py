# SPDX-License-Identifier: Apache-2.0
"""The versions of Transformers that the tests cover, and what to install where another one fails."""

import transformers

VERSION = transformers.__version__
TESTED = ("5.23", "5.24")  # minor versions
_PIN = f"; the tests cover Transformers {' and '.join(TESTED)}: pip install 'transformers=={TESTED[-1]}.*'"


def is_tested() -> bool:
    return ".".join(VERSION.split(".")[:2]) in TESTED


def what_to_pin() -> str:
    """The end of a message about Transformers that is not tested: what to install instead. Nothing where it is tested."""
    return "" if is_tested() else _PIN
