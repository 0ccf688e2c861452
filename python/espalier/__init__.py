# SPDX-License-Identifier: Apache-2.0
"""Espalier trains language models on trees of tokens.

    import espalier

    forest = espalier.build([[1, 2, 3], [1, 2, 4]])   # the prefix trees of the rows
    layout = forest.layout()                          # their tokens in preorder, and which sees which

Importing the package loads nothing else: names below are loaded when they are used. `espalier.prepare` turns chat messages into
the token rows that the command line reads.
"""

import importlib

# Where names come from: module of this package -> names.
_MODULES = {
    "errors": ("InputError",),
    "native": ("__version__",),
    "trees": ("Forest", "Layout", "build"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(name for name in _HOMES if not name.startswith("_"))


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *_HOMES})
