# SPDX-License-Identifier: Apache-2.0
"""Parsers of commands that compute: flags as the library describes them (flags.json) and others. Imports only the standard
library."""

import argparse
import functools
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError
from .command_line import ArgumentParser, nearest_word
from .registry import COMMANDS
from .toml import TomlFile

DATA, OUTPUT = "Model and data", "Output"
DATA_FLAGS = ("skip_bad_rows", "limit", "max_row_bytes", "row_cache")
PLAN_FLAGS = ("strategy", "token_budget", "memory_budget", "checkpoint_activations", "offload_context", "cost_model")
# Flags as other trainers call them.
_OTHER_NAMES = {"lr": "learning-rate", "max-steps": "steps", "num-steps": "steps", "num-epochs": "epochs",
                "num-train-epochs": "epochs", "bs": "batch-size", "output": "out", "output-dir": "out", "wd": "weight-decay",
                "grad-clip": "max-grad-norm", "clip-grad": "max-grad-norm", "dataset": "data", "train-file": "data",
                "model-name-or-path": "model", "model-path": "model", "loss": "objective", "lr-scheduler": "scheduler",
                "lr-scheduler-type": "scheduler", "warmup": "warmup-steps", "gradient-checkpointing": "checkpoint-activations",
                "max-tokens": "token-budget", "save-steps": "save-every", "save-total-limit": "keep-last"}  # fmt: skip


@functools.cache
def described_flags() -> dict[str, list[dict[str, Any]]]:
    """The options of commands as the library describes them (scripts/write_options.py writes the file)."""
    flags: dict[str, list[dict[str, Any]]] = json.loads(Path(__file__).with_name("flags.json").read_text(encoding="utf-8"))
    return flags


def whole(least: int = 0, most: int = (1 << 63) - 1) -> Callable[[str], int]:
    """A reader of whole numbers in plain decimal digits, because 010 and 0x10 are ambiguous."""

    def read(text: str) -> int:
        if not re.fullmatch(r"-?(0|[1-9]\d*)", text, re.ASCII):
            expected = "in plain decimal digits" if re.match("-?0", text) else f"of at least {least}"
            raise argparse.ArgumentTypeError(f"expected a whole number {expected}, received {text}")
        if not least <= int(text) <= most:
            bound = f"least {least}" if int(text) < least else f"most {most}"
            raise argparse.ArgumentTypeError(f"expected a whole number of at {bound}, received {text}")
        return int(text)

    return read


def real(least: float, most: float = math.inf) -> Callable[[str], float]:
    """A reader of finite numbers."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and least <= value <= most):
            bounds = f"number from {least:g} to {most:g}" if most < math.inf else f"finite number of at least {least:g}"
            raise argparse.ArgumentTypeError(f"expected a {bounds}, received {text}")
        return value

    return read


def word(words: Sequence[str]) -> Callable[[str], str]:
    """A reader of one of these words."""

    def read(text: str) -> str:
        if text not in words:
            raise argparse.ArgumentTypeError(f"expected {', '.join(words[:-1])} or {words[-1]}, received {text}")
        return text

    return read


class Flag(argparse.Action):
    """Stands once at most, unless it takes several values. The keywords are what help, completion and the manual page tell of
    it."""

    def __init__(self, *names: Any, words: Sequence[str] = (), path: str = "", default_value: str = "", group: str = "",
                 needed: bool = False, **more: Any) -> None:  # fmt: skip
        super().__init__(*names, **more)
        self.words, self.path, self.default_value, self.group, self.needed = words, path, default_value, group, needed

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any,
                 option_string: str | None = None) -> None:  # fmt: skip
        before = getattr(namespace, self.dest)
        if before is not None and self.nargs == "+":
            value = [*before, *value]
        elif before is not None:
            values = "" if self.nargs == 0 else f": {before} and {value}"
            parser.error(f"{self.option_strings[-1]} was given twice{values}")
        setattr(namespace, self.dest, True if self.nargs == 0 else value)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=100)

    def _expand_help(self, action: argparse.Action) -> str:
        default = getattr(action, "default_value", "")
        needed = " [required]" if getattr(action, "needed", False) else ""
        return super()._expand_help(action) + needed + (f" [default: {default}]" if default else "")

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        value = str(action.metavar)
        if action.nargs == "+":
            return value if value.endswith("...") else f"{value}..."
        return super()._format_args(action, default_metavar)


class CommandParser(ArgumentParser):
    """The flags of a command. Their values have no defaults here: the library knows those, and help shows them.

    Args:
        name: Of the command.
        description: What it does. Default: its summary.
        epilog: The end of its help.
        usage: Default: the flags that it requires.
    """

    def __init__(self, name: str, description: str = "", epilog: str = "", usage: str = "") -> None:
        super().__init__(prog=f"espalier {name}", usage=usage or None, description=description or f"{COMMANDS[name].summary}.",
                         epilog=epilog, formatter_class=_Formatter, allow_abbrev=False, add_help=False)  # fmt: skip
        self._has_usage, self._has_config = bool(usage), False
        self._is_described = False  # whether the library has all flags, and says which of them it lacks
        self._shared: list[str] = []  # flags that are options of `plan`, too

    def group(self, title: str) -> None:
        """The heading of the flags that are added from now on."""
        known = (each for each in self._action_groups if each.title == title)
        self._group = next(known, None) or self.add_argument_group(title)

    def flag(self, name: str, help: str, value: str = "", read: Callable[[str], Any] | None = None, *, words: Sequence[str] = (),
             path: str = "", default: str = "", letter: str = "", required: bool = False,
             several: bool = False) -> None:  # fmt: skip
        """A flag without a value where `value`, its placeholder, is empty. `read` makes its value of a text."""
        names = [*([letter] if letter else []), f"--{name}"]
        self._group.add_argument(*names, action=Flag, type=read or str, nargs=0 if not value else "+" if several else None,
                                 metavar=value or None, help=help.replace("%", "%%"), needed=required, words=words, path=path,
                                 default_value=default, group=self._group.title)  # fmt: skip

    def option(self, command: str, name: str, read: Callable[[str], Any] | None = None, help: str = "") -> None:
        """A flag that the library describes for a command, in the current group."""
        each = next(each for each in described_flags()[command] if each["name"] == name)
        if command == "plan":
            self._shared.append(name.replace("-", "_"))
        self.flag(name, help or each["help"], each["value"], read, words=each["words"], path=each["path"],
                  default=each["default"], letter=each["letter"] and f"-{each['letter']}",
                  required=each["required"], several=each["list"])  # fmt: skip

    def options(self, command: str) -> None:
        """All flags that the library describes for a command, in their groups."""
        self._is_described = True
        for each in described_flags()[command]:
            self.group(each["group"])
            self.option(command, each["name"], help=argparse.SUPPRESS if each["hidden"] else "")

    def data(self) -> None:
        """Which rows a command reads."""
        for name in ("data", *DATA_FLAGS):
            self.option("plan", name.replace("_", "-"))

    def model(self) -> None:
        self.flag("model", "Hugging Face model folder", "DIR", path="folder", required=True)

    def machine(self) -> None:
        """Precision, device and threads."""
        self.group("Machine and precision")
        self.option("plan", "dtype", help="Precision to compute in")
        self.option("plan", "device")
        self.option("plan", "threads")

    def plan(self) -> None:
        self.group("Plan")
        for name in PLAN_FLAGS:
            self.option("plan", name.replace("_", "-"))
        self.flag("no-calibration", "Has no effect: these plans never depend on measurements of the machine")

    def others(self) -> None:
        """--config and --help. Comes last."""
        self.group("Other")
        self.flag("config", "TOML file with these flags as keys. Flags on the command line take precedence", "FILE", path="file")
        self._has_config = True
        self.help()

    def help(self) -> None:
        """--help alone, for a command without --config."""
        self.group("Other")
        self._group.add_argument("-h", "--help", action="help", help="Print this help and exit")
        if not self._has_usage:
            needed = (f"{each.option_strings[-1]} {each.metavar}{'...' if each.nargs == '+' else ''}" for each in self._flags()
                      if each.needed)  # fmt: skip
            self.usage = " ".join([self.prog, *needed, "[FLAGS]"])

    def error(self, message: str) -> Any:
        """"argument -o/--out: ..." names the flag as messages of the library do."""
        super().error(re.sub(r"^argument (-\w/)?(--[\w-]+): ", r"\2: ", message))

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Their values by name, and those of the file that --config names. Raises InputError where the file is wrong."""
        self._refuse_unknown(arguments)
        words = [part for word in arguments for part in self._parts(word)]
        if self._has_config:
            config = ArgumentParser(prog=self.prog, allow_abbrev=False, add_help=False)
            config.add_argument("--config", action="append")
            config.error = self.error  # type: ignore[method-assign]
            files = config.parse_known_args(words)[0].config or []
            if len(files) == 1 and not {"-h", "--help"} & set(words):
                words = [*self._config_arguments(files[0], words), *words]
        values = self.parse_args(words)
        if not self._is_described:
            self._check(values)
        return values

    def _check(self, values: argparse.Namespace) -> None:
        """Raises UsageError, or SystemExit, where the library would for a command of its own."""
        from ..native import core
        from .native import texts_of

        shared = argparse.Namespace(**{name: getattr(values, name) for name in self._shared})
        core.check_options("plan", texts_of(shared))
        for flag in self._flags():
            if flag.needed and getattr(values, flag.dest) is None:
                self.error(f"{flag.option_strings[-1]} is required")

    def _flags(self) -> list[Flag]:
        return [action for action in self._actions if isinstance(action, Flag)]

    def _parts(self, word: str) -> list[str]:
        """A word of the command line as argparse takes it: more values may follow on --flag=value."""
        name, equals, value = word.partition("=")
        action = self._option_string_actions.get(name)
        takes_more = equals and action is not None and action.nargs == "+" and (value == "-" or not value.startswith("-"))
        return [name, value] if takes_more else [word]

    def _suggestion(self, name: str) -> str:
        """"; did you mean --learning-rate?" for a flag that `name` is similar to, or that other trainers call so."""
        known = [each.removeprefix("--") for each in self._option_string_actions if each.startswith("--")]
        dashed = name.replace("_", "-")
        other = _OTHER_NAMES.get(dashed)
        near = other if other in known else nearest_word(dashed, known)
        return f"; did you mean --{near}?" if near else ""

    def _refuse_unknown(self, arguments: Sequence[str]) -> None:
        for text in arguments:
            if text == "--":
                return
            name = text.split("=")[0]
            if name.startswith("--") and name not in self._option_string_actions:
                self.error(f"unknown flag {name} of `{self.prog}`{self._suggestion(name[2:])}")

    def _config_arguments(self, file: str, arguments: Sequence[str]) -> list[str]:
        """Those of a TOML file whose flags the arguments do not have."""
        toml = TomlFile("--config", file)
        flags = {flag.dest: flag for flag in self._flags() if flag.dest != "config"}
        present = {text.split("=")[0] if text.startswith("--") else text[:2] for text in arguments}
        words = []
        for key, value in toml.values.items():
            flag = flags.get(key.replace("-", "_"))
            if flag is None:
                raise InputError(f"{toml.place(key)}: unknown key `{key}`: expected a flag of `{self.prog}` (see --help)"
                                 f"{self._suggestion(key)}")  # fmt: skip
            if isinstance(value, dict):
                raise InputError(f"{toml.place(key)}: key `{key}`: expected a value, received a table")
            toml.check_value(value, key)
            if isinstance(value, list) and flag.nargs != "+":
                raise InputError(f"{toml.place(key)}: key `{key}`: expected one value, received a list")
            if not present & set(flag.option_strings):
                words += _words_of(flag, value, toml, key)
        return words


def _words_of(flag: Flag, value: Any, toml: TomlFile, key: str) -> list[str]:
    """A flag with the value of a key of TOML."""
    name = flag.option_strings[-1]
    if flag.nargs == 0:
        if not isinstance(value, bool):
            raise InputError(f"{toml.place(key)}: key `{key}`: expected true or false, received {value}")
        return [name] if value else []
    parts = value if isinstance(value, list) else [value]
    return [f"{name}={str(part).lower() if isinstance(part, bool) else part}" for part in parts]


def present_values(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """The values of those of these flags that are there, by name."""
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}
