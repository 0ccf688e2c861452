# SPDX-License-Identifier: Apache-2.0
"""The commands of `espalier` (registry.py lists them), their arguments, signals and progress."""
