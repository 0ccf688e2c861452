#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes what Python has of the options that C++ describes (base/options.h): dataclasses, or the flags of commands.

PYTHONPATH=python scripts/write_options.py > python/espalier/options.py
PYTHONPATH=python scripts/write_options.py --flags > python/espalier/commands/flags.json
"""

import json
import re
import sys
import textwrap

HEAD = '''# SPDX-License-Identifier: Apache-2.0
# Written by scripts/write_options.py.
"""The options of `espalier.Engine` as dataclasses. They need neither PyTorch nor the compiled part of the package."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Literal

from .options_base import Options

__all__ = ["EngineConfig", "LoraConfig", "ObjectiveConfig", "SamplingParams"]
'''
CLASSES = {
    "EngineConfig": ("How an `espalier.Engine` trains: precision, optimiser, plan and device. The flags of `espalier train`.",
                     "EngineConfig(learning_rate=1e-5, memory_budget=\"16GiB\").optimizer", "'adamw'"),
    "LoraConfig": ("The low-rank adapter that an `espalier.Engine` trains in place of the weights (Hu et al., LoRA, 2021).\n\n"
                   "Either `lora_rank` or `adapter` is needed.",
                   "LoraConfig(lora_rank=16, lora_targets=[\"q_proj\", \"v_proj\"]).lora_targets", "('q_proj', 'v_proj')"),
    "ObjectiveConfig": ("The loss of `Engine.forward_backward`. docs/objectives.md has the formulas and their sources.",
                        "ObjectiveConfig(objective=\"grpo\", clip_high=0.28).normalize is None", "True"),
    "SamplingParams": ("How `Engine.sample` samples completions. The flags of `espalier sample`.",
                       "SamplingParams(samples=8, temperature=0.7).top_p", "1.0"),
}  # fmt: skip
# Where an option of Python is not that of the command.
OTHER = {
    "stop-id": ("stop_ids", "Sequence[int] | None", "None",
                "Token ids that end a completion, which keeps them. None: `eos_token_id` of the model's generation_config.json, "
                "or else of config.json; an empty list: none, so that all completions have `max_new_tokens` tokens"),
    "ignore-stop-ids": None,
    "seed of sampling": ("seed", "int | None", "None",
                         "Of the random numbers, a whole number from 0. None: the number of calls of `Engine.sample` so far. Each "
                         "completion has its own numbers, by the number of its prompt's row and its own number"),
}  # fmt: skip
TYPES = {"flag": "bool", "whole": "int", "real": "float", "text": "str"}
WIDTH = 126


def type_of(option):
    """Without None."""
    if option["kind"] != "text":
        return {"SIZE": "int | str"}.get(option["value"], TYPES[option["kind"]])
    if option["value"] in ("FILE", "DIR"):
        return "str | os.PathLike[str]"
    if option["value"] == "NAMES":
        return "str | Sequence[str]"
    if not option["words"]:
        return "str"
    words = f"Literal[{', '.join(json.dumps(word) for word in option['words'])}]"
    others = set(option["value"].split("|")) - set(option["words"])
    return words + (" | float" if others == {"NUMBER"} else " | str" if others else "")


def default_of(option):
    """As Python writes it; None where another option decides, or where there is none."""
    text = option["default"]
    if option["kind"] == "flag":
        return "False"
    if text in ("", "by objective"):
        return "None"
    if option["kind"] == "text" or not re.fullmatch(r"[-+.\de]+", text):
        return json.dumps(text)
    return text if option["kind"] == "whole" else repr(float(text))


def fields_of(options, is_sampling):
    for option in options:
        special = "seed of sampling" if is_sampling and option["name"] == "seed" else option["name"]
        if special in OTHER:
            if OTHER[special]:
                yield OTHER[special]
            continue
        kind, default = type_of(option), default_of(option)
        meaning = option["help"] + {"SIZE": ". A number counts bytes", "NAMES": ". Or a list of names"}.get(option["value"], "")
        meaning += ". None: by objective" if option["default"] == "by objective" else ""
        yield option["name"].replace("-", "_"), kind + (" | None" if default == "None" else ""), default, meaning


def python_names(text, names):
    """Flags of the command as options of Python."""
    return re.sub(r"--([a-z][a-z0-9-]*)", lambda flag: f"`{flag[1].replace('-', '_')}`" if flag[1] in names else flag[0], text)


def wrapped(text, rest=12):
    return textwrap.fill(text, WIDTH, initial_indent=" " * 8, subsequent_indent=" " * rest, break_long_words=False,
                         break_on_hyphens=False)  # fmt: skip


def declared(line):
    """Long lists of words go on separate lines."""
    if len(line) <= WIDTH:
        return line
    begin, words, end = re.fullmatch(r"(.*?\[)(.*)(\].*?)", line).groups()
    return f"{begin}\n{wrapped(words, rest=8)}\n    {end}"


def written(name, options, names):
    summary, example, shown = CLASSES[name]
    fields = list(fields_of(options, is_sampling=name == "SamplingParams"))
    lines = ["", "", "@dataclasses.dataclass(frozen=True, kw_only=True)", f"class {name}(Options):",
             *f'"""{summary}\n\nAttributes:'.splitlines()]  # fmt: skip
    lines[4:] = [f"    {line}" if line else "" for line in lines[4:]]
    for field, _, _, meaning in fields:
        lines.append(wrapped(f"{field}: {python_names(meaning, names)}."))
    lines += ["", "    Examples:", f"        >>> from espalier import {name}", f"        >>> {example}", f"        {shown}",
              '    """', ""]  # fmt: skip
    lines += [declared(f"    {field}: {kind} = {default}") for field, kind, default, _ in fields]
    return "\n".join(lines) + "\n"


def flags(native):
    """The options of commands by command, and those of sampling, as the parsers take them."""
    from espalier.native import core

    libraries = {"inspect": core, "plan": core, "synth": core, "bench": native, "device": native, "train": native, "verify": native}
    described = {name: json.loads(library.describe_command(name)) for name, library in libraries.items()}
    described["sampling"] = [{"name": each["name"], "names": [f"--{each['name']}"], "value": each["value"], "words": each["words"],
                              "default": each["default"], "group": each["group"], "path": "", "required": False,
                              "several": each["list"], "hidden": False, "help": each["help"]}
                             for each in json.loads(native.sampling_options())]  # fmt: skip
    lines = [f'  "{name}": [\n' + ",\n".join(f"    {json.dumps(each, ensure_ascii=False)}" for each in options) + "\n  ]"
             for name, options in described.items()]  # fmt: skip
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main():
    from espalier.engine_library import find

    native = find()
    if "--flags" in sys.argv[1:]:
        print(flags(native), end="")
        return
    engine, objective, sampling = (json.loads(text) for text in (native.engine_options(), native.objective_options(),
                                                                 native.sampling_options()))  # fmt: skip
    lora = [option for option in engine if option["group"] == "LoRA"]
    groups = {"EngineConfig": [option for option in engine if option not in lora], "LoraConfig": lora,
              "ObjectiveConfig": objective, "SamplingParams": sampling}  # fmt: skip
    names = {option["name"] for option in (*engine, *objective, *sampling)}
    print(HEAD + "".join(written(name, options, names) for name, options in groups.items()), end="")


if __name__ == "__main__":
    main()
