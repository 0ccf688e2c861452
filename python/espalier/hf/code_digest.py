# SPDX-License-Identifier: Apache-2.0
"""A digest of the code that runs: of functions as they are in this process, whatever files and versions say."""

import functools
import hashlib
import sys
from collections.abc import Iterable
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from .origin import is_library_code

_KNOWN = {"torch", "transformers", *sys.stdlib_module_names} - {"__main__"}  # whose objects are as their classes are
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype)
_Plain = bool | int | float | str


class Undigestible(Exception):
    """A function depends on an object of which nothing is known but its class, so it may differ in another process."""


def digest_of(functions: Iterable[tuple[str, Any]]) -> str:
    """A digest of named functions, in whatever order: bytecode, constants, defaults, and what closures and `__wrapped__` hold, to
    the last function. Raises Undigestible."""
    lines = sorted({f"{name} {_Walk().of(function)}" for name, function in functions})
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class _Walk:
    """One function, and those that it holds; a function that is met again adds its number."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def of(self, value: Any) -> str:
        if isinstance(value, _PLAIN):
            return repr(value)
        is_of_library = isinstance(value, type) and value.__module__.partition(".")[0] in _KNOWN | {"espalier"}
        if isinstance(value, type) and not is_of_library and id(value) not in self._seen:
            self._seen[id(value)] = len(self._seen)
            own = sorted((name, item) for name, item in vars(value).items() if isinstance(item, FunctionType | _Plain))
            return f"{value.__qualname__} {[(name, self.of(item)) for name, item in own]}"
        if isinstance(value, type | ModuleType | BuiltinFunctionType):
            return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}"
        if id(value) in self._seen:
            return f"#{self._seen[id(value)]}"
        self._seen[id(value)] = len(self._seen)
        if isinstance(value, tuple | list):
            return f"({','.join(map(self.of, value))})"
        if isinstance(value, frozenset | set):
            return f"{{{','.join(sorted(map(self.of, value)))}}}"
        if isinstance(value, dict):
            return f"{{{','.join(sorted(f'{self.of(key)}:{self.of(item)}' for key, item in value.items()))}}}"
        if isinstance(value, MethodType):
            return f"method {self.of(value.__func__)}"
        if isinstance(value, functools.partial):
            return f"partial {self.of(value.func)} {self.of(value.args)} {self.of(value.keywords)}"
        if isinstance(value, FunctionType):
            return self._of_function(value)
        if type(value).__module__.partition(".")[0] in _KNOWN:
            return f"{type(value).__module__}.{type(value).__qualname__}"
        raise Undigestible(f"{type(value).__module__}.{type(value).__qualname__}")

    def _of_function(self, function: FunctionType) -> str:
        held = [_contents(cell) for cell in function.__closure__ or ()]
        parts = [_of_code(function.__code__), self.of(function.__defaults__), self.of(function.__kwdefaults__), self.of(held),
                 self.of(getattr(function, "__wrapped__", None))]  # fmt: skip
        if not is_library_code(function):  # whose helpers no version speaks for
            names = sorted(names_in(function.__code__) & function.__globals__.keys())
            parts += [f"{name}={self.of(function.__globals__[name])}" for name in names]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet set
        return None


@functools.cache
def names_in(code: CodeType) -> frozenset[str]:
    """The names of globals and attributes in a function and in those inside of it."""
    inner = (names_in(value) for value in code.co_consts if isinstance(value, CodeType))
    return frozenset(code.co_names).union(*inner)


def _of_code(code: CodeType) -> str:
    constants = [_of_code(value) if isinstance(value, CodeType) else _of_constant(value) for value in code.co_consts]
    return f"{code.co_code.hex()} {constants} {code.co_names} {code.co_varnames} {code.co_freevars}"


def _of_constant(value: Any) -> str:
    return f"frozenset {sorted(map(repr, value))}" if isinstance(value, frozenset) else repr(value)
