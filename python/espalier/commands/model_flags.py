# SPDX-License-Identifier: Apache-2.0
"""Flags of commands that run a model: those that they share, and how texts become values. Imports only the standard library."""

import argparse
import difflib
import inspect
import math
import os
import re
import tomllib
import types
import typing

from ..errors import InputError
from ..options import EngineConfig
from .command_line import ArgumentParser

DATA, OUTPUT, MACHINE = "Model and data", "Output", "Machine and precision"
DATA_FLAGS = ("skip_bad_rows", "limit", "max_row_bytes", "row_cache")
PLAN_FLAGS = ("strategy", "token_budget", "memory_budget", "checkpoint_activations", "offload_context", "cost_model")


def _refuse(expected, text):
    raise argparse.ArgumentTypeError(f"expected {expected}, received {text}")


def whole(least=0, most=(1 << 63) - 1):
    """A reader of whole numbers in plain decimal digits, because 010 and 0x10 are ambiguous."""
    def read(text):
        if not re.fullmatch(r"-?(0|[1-9]\d*)", text, re.ASCII):
            _refuse("a whole number" + (" in plain decimal digits" if re.match("-?0", text) else f" of at least {least}"), text)
        if not least <= int(text) <= most:
            _refuse(f"a whole number of at {f'least {least}' if int(text) < least else f'most {most}'}", text)
        return int(text)

    return read


def real(least, most=math.inf):
    """A reader of finite numbers."""
    def read(text):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and least <= value <= most):
            bounds = f"number from {least:g} to {most:g}" if most < math.inf else f"finite number of at least {least:g}"
            _refuse(f"a {bounds}", text)
        return value

    return read


def size(text):
    """A number of bytes, with or without a unit, as the library reads it."""
    if not re.fullmatch(r"\d+\.?\d*(e\d+)? *([kmgtpe]i?)?b?", text, re.ASCII | re.IGNORECASE):
        _refuse("a size such as 8GiB or 500MB", text)
    return text


def device(text):
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,2}|:1[01]\d|:12[0-7])?", text, re.ASCII):
        _refuse("auto, cpu, cuda or cuda:N", f"`{text}`")
    return text


def word(words):
    """A reader of one of these words."""
    def read(text):
        if text not in words:
            _refuse(f"{', '.join(words[:-1])} or {words[-1]}", text)
        return text

    return read


class _Flag(argparse.Action):
    """Is given once at most, unless it takes several values. `words`, `path`, `default_value` and `group` are what completion and
    the manual page tell of it."""

    def __init__(self, *names, words=(), path="", default_value="", group="", **more):
        super().__init__(*names, **more)
        self.words, self.path, self.default_value, self.group = words, path, default_value, group

    def __call__(self, parser, namespace, value, option_string=None):
        before = getattr(namespace, self.dest)
        if before is not None and self.nargs == "+":
            value = [*before, *value]
        elif before is not None:
            values = "" if self.nargs == 0 else f": {before} and {value}"
            parser.error(f"{self.option_strings[-1]} was given twice{values}")
        setattr(namespace, self.dest, True if self.nargs == 0 else value)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def _expand_help(self, action):
        default = getattr(action, "default_value", "")
        return super()._expand_help(action) + " [required]" * action.required + (f" [default: {default}]" if default else "")


class ModelParser(ArgumentParser):
    """The flags of a command, none of which has a default: what is not given is left to the library."""

    def __init__(self, name, description, epilog, usage=""):
        usage = usage or f"espalier {name} --model DIR --data FILE... --out FILE [FLAGS]"
        super().__init__(prog=f"espalier {name}", usage=usage, description=description, epilog=epilog, formatter_class=_Formatter,
                         allow_abbrev=False, add_help=False)  # fmt: skip

    def group(self, title):
        """The heading of the flags that are added from now on."""
        self._group = next((each for each in self._action_groups if each.title == title), None) or self.add_argument_group(title)

    def flag(self, name, help, value="", read=None, *, words=(), path="", default="", letter="", required=False, several=False):
        """A flag without a value where `value`, its placeholder, is empty. `read` makes its value of a text."""
        nargs = 0 if not value else "+" if several else None
        self._group.add_argument(*([letter] if letter else []), f"--{name}", action=_Flag, type=read, nargs=nargs,
                                 metavar=value or None, help=help.replace("%", "%%"), required=required, words=words, path=path,
                                 default_value=default, group=self._group.title)  # fmt: skip

    def option(self, kind, name, least=0, most=None, help=""):
        """The flag of an option that Python has in a dataclass, with its meaning, words and default."""
        text, words, value = _described(kind)[name]
        read = device if name == "device" else word(words) if words else size if value == "SIZE" else None
        if value == "N":
            read = whole(least) if most is None else whole(least, most)
        elif value == "X":
            read = real(least) if most is None else real(least, most)
        default = kind.__dataclass_fields__[name].default
        shown = "" if default is None or default is False else f"{default:g}" if isinstance(default, float) else str(default)
        self.flag(name.replace("_", "-"), help or text, value, read, words=words, path="file" if value == "FILE" else "",
                  default=shown)  # fmt: skip

    def data(self):
        """Which rows a command reads (cli/flags/data_flags.h)."""
        self.flag("data", "Trajectories: JSONL (plain, .gz or .zst) or packed .safetensors, see docs/data-format.md. Several "
                  "files, or patterns such as 'rows-*.jsonl', are read one after another. -: JSONL on standard input", "FILE",
                  path="file", required=True, several=True)  # fmt: skip
        self.flag("skip-bad-rows", "Count and report bad rows instead of stopping at the first")
        self.flag("limit", "Use only the first N trajectories (0: all)", "N", whole(), default="0")
        self.flag("max-row-bytes", "JSONL: maximum size of a row, such as 1GiB. Longer rows are refused before they fill the "
                  "memory", "SIZE", size, default="256.0 MiB")  # fmt: skip
        self.flag("row-cache", "Folder for an index of rows that take more than an eighth of the available memory: a packed file "
                  "that is mapped (default: the folder of the data). off: rows stay in memory", "DIR|off", words=("off",),
                  path="folder")  # fmt: skip

    def model(self):
        self.flag("model", "Hugging Face model folder", "DIR", path="folder", required=True)

    def machine(self):
        """Precision, device and threads."""
        self.group(MACHINE)
        self.option(EngineConfig, "dtype", help="Precision to compute in")
        self.option(EngineConfig, "device")
        self.option(EngineConfig, "threads", most=max(64, 4 * (os.cpu_count() or 1)))

    def plan(self):
        self.group("Plan")
        for name in PLAN_FLAGS:
            self.option(EngineConfig, name)
        self.flag("no-calibration", "Has no effect: these plans never depend on measurements of the machine")

    def others(self):
        """Comes last."""
        self.group("Other")
        self.flag("config", "TOML file with these flags as keys. Flags on the command line take precedence", "FILE", path="file")
        self.help()

    def help(self):
        self.group("Other")
        self._group.add_argument("-h", "--help", action="help", help="Print this help and exit")

    def error(self, message):
        """"argument -o/--out: ..." names the flag as messages of the library do."""
        super().error(re.sub(r"^argument (-\w/)?(--[\w-]+): ", r"\2: ", message))

    def parse(self, arguments):
        """Their values by name, and those of the file that --config names. Raises InputError where the file is wrong."""
        config = ArgumentParser(allow_abbrev=False, add_help=False)
        config.add_argument("--config", action="append")
        files = config.parse_known_args(arguments)[0].config or []
        file_arguments = self._config_arguments(files[0], arguments) if len(files) == 1 else []
        found = self.parse_args([*file_arguments, *arguments])
        del found.config
        return found

    def _config_arguments(self, file, arguments):
        """Those of a TOML file whose flags the arguments do not have."""
        try:
            with open(file, "rb") as opened:
                values = tomllib.load(opened)
        except OSError as error:
            raise InputError(f"--config: cannot open {file}: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{file}: {error}") from None
        flags = {action.dest: action for action in self._actions if isinstance(action, _Flag) and action.dest != "config"}
        given = {word.split("=")[0] if word.startswith("--") else word[:2] for word in arguments}
        found = []
        for key, value in values.items():
            action = flags.get(key.replace("-", "_"))
            if action is None:
                near = difflib.get_close_matches(key.replace("-", "_"), flags, n=1)
                raise InputError(f"{file}: unknown key `{key}`: expected a flag of `{self.prog}` (see --help)"
                                 + (f"; did you mean {near[0].replace('_', '-')}?" if near else ""))  # fmt: skip
            if not given & set(action.option_strings):
                found += _arguments_of(action, value, file, key)
        return found


def _arguments_of(action, value, file, key):
    """A flag with the value of a key of TOML."""
    name, values = action.option_strings[-1], value if isinstance(value, list) else [value]
    if isinstance(value, list) and action.nargs != "+":
        raise InputError(f"{file}: key `{key}`: expected one value, received a list")
    if not all(isinstance(each, str | int | float) for each in values):
        raise InputError(f"{file}: key `{key}`: expected text, a number, true or false")
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise InputError(f"{file}: key `{key}`: expected true or false, received {value}")
        return [name] if value else []
    texts = [str(each).lower() if isinstance(each, bool) else str(each) for each in values]
    return [f"{name}={texts[0]}"] if action.nargs is None else [word for text in texts for word in (name, text)]


def _described(kind):
    """Of each option of a dataclass: its meaning, with flags in place of names, its words, and the placeholder of its value."""
    _, _, rest = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    texts = dict(re.findall(r"^ {4}(\w+): ((?:.+\n?)(?: {8}.+\n?)*)", rest.split("\n\n")[0], re.MULTILINE))
    fields, found = typing.get_type_hints(kind), {}
    for name, annotation in fields.items():
        is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
        alternatives = typing.get_args(annotation) if is_union else (annotation,)
        words = tuple(word for each in alternatives if typing.get_origin(each) is typing.Literal
                      for word in typing.get_args(each))  # fmt: skip
        plain = set(alternatives)
        value = ("cpu|cuda|cuda:N|auto" if name == "device" else "|".join(words) if words else "" if bool in plain
                 else "SIZE" if {int, str} <= plain else "N" if int in plain else "X" if float in plain else "FILE")  # fmt: skip
        text = " ".join(texts.get(name, "").split()).rstrip(".").removesuffix(". A number counts bytes")
        text = re.sub(r"`(\w+)`", lambda match: f"--{match[1].replace('_', '-')}" if match[1] in fields else match[0], text)
        found[name] = (text, words, value)
    return found


def given(arguments, names):
    """The values of those of these flags that are given, by name."""
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}
