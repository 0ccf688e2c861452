# SPDX-License-Identifier: Apache-2.0
"""Whether a function is still the one that PyTorch or Transformers has, or a replacement by another library."""

import functools
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
import transformers

_FOLDERS = tuple(os.path.join(folder, "") for package in (torch, transformers) for folder in package.__path__)


def is_library_code(function: Any, name: str | None = None) -> bool:
    """Whether `function`, and every function that it wraps (`__wrapped__`), is code of PyTorch or Transformers.

    Decorators copy `__name__` and `__module__` to their wrappers, so this looks at the code objects. Functions in C count as
    PyTorch's unless their module says otherwise. Partials and objects that are called count as others' code. name: that the
    innermost function has to have in its source; None: any."""
    while True:
        function = getattr(function, "__func__", function)
        inner = getattr(function, "__wrapped__", None)
        if isinstance(function, types.FunctionType):
            if not function.__code__.co_filename.startswith(_FOLDERS):
                return False
            own_name = function.__code__.co_name
        elif isinstance(function, types.BuiltinFunctionType):
            if (function.__module__ or "torch").partition(".")[0] not in ("torch", "builtins"):
                return False
            own_name = function.__name__
        elif not isinstance(function, functools._lru_cache_wrapper):
            return False
        if inner is None:
            return name is None or own_name == name
        function = inner


def home_of(function: Any) -> str:
    """The name of the module that the code of a function, of a bound method or of the class of a called object is from.
    Decorators copy `__module__`, not this."""
    function = getattr(function, "__func__", function)
    scope = getattr(function, "__globals__", None)
    if scope is not None:
        return str(scope.get("__name__"))
    is_function = isinstance(function, types.BuiltinFunctionType | functools._lru_cache_wrapper)
    return str((function if is_function else type(function)).__module__ or "")


def stock_of(function: Any) -> Any:
    """What a function of this package stands in for (its attribute `stock`, which may be None); any other function itself.
    Decorators copy attributes to what they make, so `stock` alone says nothing."""
    return getattr(function, "stock", function) if home_of(function).startswith("espalier.") else function


@functools.cache
def text_of(module: str) -> str | None:
    """The source of a module; None where there is none that can be read."""
    path = Path(getattr(sys.modules.get(module), "__file__", None) or "")
    try:
        return path.read_text(encoding="utf-8") if path.suffix == ".py" else None
    except OSError:
        return None
