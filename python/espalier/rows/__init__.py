# SPDX-License-Identifier: Apache-2.0
"""Rows of tokens in memory and in files."""
