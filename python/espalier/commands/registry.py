# SPDX-License-Identifier: Apache-2.0
"""The commands of `espalier`, and what its help says of them. Imports none of them."""

import importlib
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

DESCRIPTION = ("Espalier trains language models on trees of tokens: shared prefixes are encoded once, forward and backward, with "
               "exactly the gradients of ordinary training.")  # fmt: skip

EPILOG = """\
A first run:
  espalier prepare --model DIR --per-turn CHATS.jsonl -o rows.jsonl   text to trajectories
  espalier import TRACES.jsonl -o rows.jsonl                          rollouts of other trainers
  espalier inspect --model DIR --data rows.jsonl                      what sharing will gain
  espalier verify  --model DIR --data rows.jsonl --limit 8            proof on your model and data
  espalier train   --model DIR --data rows.jsonl --out RUN            train; then RUN/checkpoints/step_N
  espalier launch -- COMMAND ...                                      or train with another trainer

`espalier COMMAND --help` says more about each command.
"""
OPTIONS = {"--version": "Print the version and how the program was built, and exit", "-h, --help": "Print this help and exit"}
WIDTH = 100


@dataclass(frozen=True)
class Command:
    """`module` has main(arguments), which returns the exit status, and parser()."""

    name: str
    group: str
    summary: str
    module: str

    def main(self, arguments: list[str]) -> int:
        """Runs the command. Wrong arguments raise SystemExit."""
        status: int = importlib.import_module(self.module).main(arguments)
        return status

    def parser(self) -> Any:
        """That of its arguments."""
        make: Callable[[], Any] = importlib.import_module(self.module).parser
        return make()


_ROWS, _TRAINING, _PROOF = "From chats or rollouts to a plan", "Training", "Proof and measurement"
_RANDOM, _SHELL = "Random data and models", "Shell"
_COMMANDS = (
    ("prepare", _ROWS, "Convert chats (OpenAI-style messages) to trajectories with a model's tokenizer and template"),
    ("import", _ROWS, "Convert rollouts of other trainers (verifiers, prime-rl, verl, TRL, SkyRL, ...) to trajectories"),
    ("inspect", _ROWS, "Show which prefixes the trajectories share, what that gains, and what is lost"),
    ("plan", _ROWS, "Print the plan of a step, its predicted time and memory, and those of other strategies"),
    ("export", _ROWS, "Convert trajectories to the formats of other trainers"),
    ("train", _TRAINING, "Train a model on trajectories; shared prefixes are encoded once"),
    ("rerun", _TRAINING, "Repeat a run in a new folder, or name what has changed since: data, model or program"),
    ("launch", _TRAINING, "Run the command of another trainer, with its models on trees"),
    ("serve", _TRAINING, "Serve the Tinker API on this machine, on trees: training and sampling of adapters"),
    ("logprobs", _TRAINING, "Write the log-probability of every token, computed on the shared trees; with --entropies and "
     "--top-k also entropies and the most likely tokens"),
    ("merge", _TRAINING, "Add an adapter to the weights of its model and write the result as a new model"),
    ("sample", _TRAINING, "Sample completions of prompts, whose shared prefixes are encoded once, as rows with behaviour "
     "log-probabilities"),
    ("verify", _PROOF, "Prove on your model and data that loss and every gradient equal per-trajectory training"),
    ("bench", _PROOF, "Measure strategies against sequence packing, interleaved, with the FLOP bound"),
    ("device", _PROOF, "Print the CPU and GPUs of this machine and the kernels that run on them"),
    ("synth", _RANDOM, "Write random trajectories that share prefixes"),
    ("init", _RANDOM, "Create a model with random weights from a config.json"),
    ("completion", _SHELL, "Write a shell script that completes commands, flags and files"),
    ("man", _SHELL, "Write the manual page to standard output"),
)  # fmt: skip
_MODULES = {"import": "espalier.commands.import_", "launch": "espalier.launch.command",
            "serve": "espalier.server.command"}  # fmt: skip
COMMANDS = {name: Command(name, group, summary, _MODULES.get(name, f"espalier.commands.{name}"))
            for name, group, summary in _COMMANDS}  # fmt: skip


def _row(left: str, right: str, width: int) -> str:
    return textwrap.fill(right, WIDTH, initial_indent=f"  {left}".ljust(width), subsequent_indent=" " * width,
                         break_on_hyphens=False) + "\n"  # fmt: skip


def help_text() -> str:
    """What `espalier --help` prints."""
    text = textwrap.fill(DESCRIPTION, WIDTH) + "\n\nUsage: espalier COMMAND [FLAGS]\n\nOptions:\n"
    text += "".join(_row(names, meaning, 26) for names, meaning in OPTIONS.items())
    for group in dict.fromkeys(command.group for command in COMMANDS.values()):
        text += f"\n{group}:\n"
        text += "".join(_row(each.name, each.summary, 14) for each in COMMANDS.values() if each.group == group)
    return f"{text}\n{EPILOG}"
