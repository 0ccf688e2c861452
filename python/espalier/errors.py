# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with what a user gave."""

import re
import sys

from . import name_clash

name_clash.check(sys.modules["espalier"])  # every module of the package comes here first

# A command in back-ticks, which is left as it is, or a flag, with its value where it is one of a few names.
_FLAG = re.compile(r"(?P<command>`[a-z]+ [^`]*`)|(?<![\w-])--(?P<name>[a-z][a-z-]*[a-z])"
                   r"(?: (?P<value>auto|partition|tree-packing|append-only|sequence-packing|none|layer|piece|rows|groups|group|"
                   r"linear|cosine)\b)?")  # fmt: skip


class InputError(ValueError):
    """What the user gave cannot be used; the message says where, what was expected, what was received.

    Examples:
        >>> import espalier
        >>> try:
        ...     espalier.build([[1, 2], []])
        ... except espalier.InputError as error:
        ...     print(type(error).__mro__[1].__name__)
        ValueError
    """

    command_message: str | None = None  # the message with flags where it has keyword arguments, if the library wrote it


class UsageError(InputError):
    """Options with which a command cannot be run: exit status 2."""


class Unsupported(InputError):
    """A model, or a way of calling it, with which Espalier would not be exact or has not been proven to be."""


class BadRow(Exception):
    """One line of input that cannot be used: field, what was expected, what was received."""

    def __init__(self, field_name: str, expected: str, received: object) -> None:
        super().__init__(f"field `{field_name}`: expected {expected}, received {received}")

    @classmethod
    def saying(cls, message: str) -> "BadRow":
        """With this message."""
        bad = cls.__new__(cls)
        bad.args = (message,)
        return bad

    @classmethod
    def within(cls, place: str, error: BaseException) -> "BadRow":
        """The same fault with the place inside of the line."""
        return cls.saying(f"{place}: {error}")


class RenderError(Exception):
    """The chat template refuses a conversation."""


def is_failure(error: BaseException) -> bool:
    """Whether `error` tells of something that failed, and not of a wish to stop (Ctrl-C, exit). The Rust half of
    the tokenizers reports its panics outside of Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def in_one_line(failure: BaseException) -> str:
    """The type of a failure and the beginning of its message, for a message that names it."""
    return f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"


def python_names(text: str) -> str:
    """A message of the library as callers from Python read it: flags of the command line are keyword arguments there.

    >>> python_names("expected --strategy partition, or a larger --token-budget (see `espalier plan --help`)")
    'expected strategy="partition", or a larger token_budget (see `espalier plan --help`)'
    """

    def named(match: re.Match[str]) -> str:
        if match["command"]:
            return match[0]
        name = match["name"].replace("-", "_")
        return f'{name}="{match["value"]}"' if match["value"] else name

    return _FLAG.sub(named, text)


def library_error(message: str) -> InputError:
    """The InputError for one of the library in C++."""
    error = InputError(python_names(message))
    error.command_message = message
    return error


def usage_error(message: str) -> UsageError:
    """The UsageError for one of the library in C++."""
    error = UsageError(python_names(message))
    error.command_message = message
    return error
