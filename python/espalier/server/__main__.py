# SPDX-License-Identifier: Apache-2.0
"""Runs `espalier serve`: python3 -m espalier.server."""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
