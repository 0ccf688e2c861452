# SPDX-License-Identifier: Apache-2.0
"""What the commands written in Python consist of: `prepare`, and what it shares with `import` and `export` (espalier.io)."""
