# SPDX-License-Identifier: Apache-2.0
"""The command `prepare`, and code that it shares with `import` and `export` (espalier.io)."""
