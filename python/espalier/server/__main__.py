# SPDX-License-Identifier: Apache-2.0
"""`python -m espalier.server`, as `espalier serve`."""

import sys

from .command import main

sys.exit(main(sys.argv[1:]))
