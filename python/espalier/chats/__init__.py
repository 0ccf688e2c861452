# SPDX-License-Identifier: Apache-2.0
"""Chats as rows of tokens: reading, checking, rendering with a chat template, and tokenising."""
