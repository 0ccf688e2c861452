# SPDX-License-Identifier: Apache-2.0
"""Rows of tokens: as users hold them, and as files have them."""
