# SPDX-License-Identifier: Apache-2.0
"""Espalier trains language models on trees of tokens.

`espalier.prepare` turns chat messages into the token rows that the command line reads.
"""
