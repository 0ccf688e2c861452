# SPDX-License-Identifier: Apache-2.0
"""The command line of `espalier launch`. Imports only the standard library."""

import argparse

from ..commands.command_line import ArgumentParser

DESCRIPTION = """\
Runs the command of another trainer, and makes the models that it trains run on
trees of tokens: prefixes that rows of a batch share are encoded once. Losses and
gradients are those of the command alone, up to rounding.

The command stays as it is. When Transformers' Trainer, or one that is built on it
(TRL, LLaMA-Factory, ms-swift, Axolotl), begins to train, its model is patched as
espalier.trl.patch(trainer) does it, in each process that the command starts: also
in the workers of torchrun and in processes that are spawned. One line says so, and
one at the end says what was shared.
"""

EPILOG = """\
examples:
  espalier launch -- llamafactory-cli train run.yaml
  espalier launch --check -- python my_script.py
  espalier launch -- torchrun --nproc-per-node 8 my_script.py --epochs 3
  espalier launch --patch-on load -- accelerate launch my_loop.py

what is shared:
  Rows share a prefix if they are in the same batch of a device. `espalier inspect`
  says what rows have in common; larger batches, or a sampler that keeps groups
  together (espalier.hf.group_sampler), bring them together.

your own loop:
  Without a Trainer nothing says when training begins. --patch-on load patches every
  causal language model that from_pretrained returns.

what ends the run:
  A model, or a setting such as dropout, with which trees would not be exact is
  refused with one message, before the first step. If nothing was patched by the end
  of the command, a warning says why.

exit codes: that of the command, 128 + N if signal N ended it; 1 if it cannot be
started, 2 wrong arguments.
"""


def launch_parser():
    parser = ArgumentParser(prog="espalier launch", usage="espalier launch [flags] -- COMMAND ...", description=DESCRIPTION,
                            epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
                            allow_abbrev=False)  # fmt: skip
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="what to run, with its arguments")
    parser.add_argument("--patch-on", choices=("train", "load"), default="train",
                        help="when models are patched: where a Trainer begins to train, or where from_pretrained returns them "
                             "(default: %(default)s)")  # fmt: skip
    parser.add_argument("--check", action="store_true",
                        help="verify the first batch that is trained on against the unpatched model, and stop if it fails")
    parser.add_argument("--skip-logits", action="store_true",
                        help="in training with labels leave `logits` out of outputs, as Liger does")
    parser.add_argument("--backend", choices=("auto", "espalier", "flex", "sdpa", "cudnn", "fla", "mamba_ssm"), default="auto",
                        help="what computes attention (default: %(default)s)")
    parser.add_argument("--no-keep-groups", dest="keep_groups", action="store_false",
                        help="let trainers that sample shuffle rows as they do, instead of groups; the generations of a prompt "
                             "then share less")  # fmt: skip
    return parser


def parse_launch(argv):
    parser = launch_parser()
    arguments = parser.parse_args(argv)
    if arguments.command[:1] == ["--"]:
        del arguments.command[0]
    if not arguments.command:
        parser.error("expected a command after --, received none")
    if arguments.command[0].startswith("-"):
        parser.error(f"expected a command after --, received {arguments.command[0]}")
    return arguments
