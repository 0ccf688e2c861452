# SPDX-License-Identifier: Apache-2.0
"""Arguments that a model takes in **kwargs and no code of its layers reads, such as the `margin` of TRL's RewardTrainer.

Code reads one of **kwargs by a parameter of that name, or by a string with the name. Where neither occurs in any module that
the layers' own modules import from their packages, the argument cannot change a result, and rows may share tokens whatever
it is."""

import functools
import re
import sys
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

import torch

from .origin import text_of

_OF_TORCH = ("torch", "builtins")  # whose modules take no **kwargs of a model
_AFFIX = re.compile(r"""["'](?:(\w+_)|(_\w+))["']""")  # by which code may look for names: "text_", "_ids"


@torch.compiler.disable  # type: ignore[untyped-decorator]
def may_be_read(backbone: Any, name: str) -> bool:
    """Whether code of the layers of `backbone` may read the argument `name`."""
    modules = {name for module in backbone.modules() for name in _modules_of(module)}
    return _is_read_in(frozenset(modules), name)


def _modules_of(module: Any) -> Iterator[str]:
    """The names of the modules that have the code of a layer: of its classes, and of all that its forward wraps."""
    yield from (cls.__module__ for cls in type(module).__mro__)
    for function in (module.__dict__.get("forward"), type(module).forward):
        function = getattr(function, "__func__", function)
        while function is not None:
            yield getattr(function, "__globals__", {}).get("__name__", type(function).__module__)
            function = getattr(function, "__wrapped__", None)


@functools.lru_cache(maxsize=256)
def _is_read_in(modules: frozenset[str], name: str) -> bool:
    word = re.compile(rf"\b{re.escape(name)}\b")
    for module in _with_imports(modules):
        source = text_of(module)
        if source is None:
            return True
        if any(name.startswith(prefix or name + "_") or name.endswith(suffix or name + "_")
               for prefix, suffix in _AFFIX.findall(source)):  # fmt: skip
            return True
        if word.search(source) and name in _names_in(compile(source, module, "exec")):
            return True
    return False


def _with_imports(modules: frozenset[str]) -> set[str]:
    """The modules and those of their packages that they know of, through others as well."""
    found: set[str] = set()
    waiting = {name for name in modules if name.partition(".")[0] not in (*_OF_TORCH, "espalier")}
    packages = {name.partition(".")[0] for name in waiting}
    while waiting:
        name = waiting.pop()
        found.add(name)
        for value in list(vars(sys.modules.get(name, sys)).values()):
            other = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            if isinstance(other, str) and other.partition(".")[0] in packages and other not in found:
                waiting.add(other)
    return found


def _names_in(code: CodeType) -> set[str]:
    """The names of parameters and the strings in code and in all functions inside of it."""
    names = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
        elif isinstance(constant, str):
            names.add(constant)
        elif isinstance(constant, tuple | frozenset):
            names.update(each for each in constant if isinstance(each, str))
    return names
