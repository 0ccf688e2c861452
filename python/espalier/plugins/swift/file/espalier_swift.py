# SPDX-License-Identifier: Apache-2.0
"""What ms-swift imports before it trains, in each of its processes."""

from espalier.launch import hooks, notes

hooks.when_imported("transformers.trainer", lambda module: hooks.watch_training(module, notes.settings_of()))
