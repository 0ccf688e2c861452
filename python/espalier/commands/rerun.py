# SPDX-License-Identifier: Apache-2.0
"""`espalier rerun`.

It becomes `espalier train` with the flags of a run's config.toml, which compares rows, model and adapter with run.json.
"""

import argparse
import itertools
import json
import os
import tomllib
from pathlib import Path

from ..errors import InputError
from . import train
from .command import run_work
from .command_line import ArgumentParser
from .console import say
from .native import become_ranks
from .version import version_text

DESCRIPTION = """\
Repeats a run in a new folder, or names what has changed since: data, model or
program.

The flags are those of the run's config.toml, without --rescue-dir, --publish and
--profile; rates and matrix products are those of its cost_model.json. Rows,
model, adapter and this program are compared with its run.json: what has changed
is named, and nothing is run. A run of several processes is repeated by as many.
On a machine with the same instruction set and number of threads the checkpoints
are the same to the bit.
"""

EPILOG = """\
example:
  espalier rerun runs/a --out runs/a-again

exit codes: those of `espalier train`.
"""

NOT_REPEATED = ("out", "rescue-dir", "publish", "publish-every", "publish-command", "profile", "profile-step")


def parser():
    """All flags."""
    made = ArgumentParser(prog="espalier rerun", description=DESCRIPTION, epilog=EPILOG,
                            formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    made.add_argument("run", type=Path, metavar="RUN", help="folder of the run to repeat")
    made.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="folder of the new run")
    made.add_argument("--other-program", action="store_true",
                        help="run even if version, commit, LibTorch or instruction set of the program differ; says what "
                             "differs")  # fmt: skip
    return made


def _record(run):
    file = run / "run.json"
    if not file.is_file():
        raise InputError(f"{run}: expected a run, whose folder has run.json; found none (older versions wrote none)")
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        program, folder, state = record["program"], record["folder"], record["state"]
    except (ValueError, KeyError, TypeError):
        state = None
    if not isinstance(state, dict):
        raise InputError(f"{file}: expected program, folder and state of a run")
    return program, folder, record.get("processes", 1)  # older versions recorded no processes


def _check_program(before, now, may_differ):
    """Names the first property of the program that differs."""
    for was, received in itertools.zip_longest(before, now):
        if was == received:
            continue
        was, received = ("none" if text is None else json.dumps(text, ensure_ascii=False) for text in (was, received))
        if not may_differ:
            raise InputError(f"the run was made by a program with {was}, this one has {received}; use that one, or pass "
                             "--other-program for a run that may differ in its last bits")  # fmt: skip
        say(f"note: the run was made by a program with {was}, this one has {received}")


def _config_without(run, names):
    """The path of a file without a name: the run's config.toml without these flags."""
    values = tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))
    text = "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items() if key not in names)
    file = os.memfd_create("config.toml", 0)  # open as long as this process lives
    os.write(file, text.encode())
    return f"/proc/self/fd/{file}"


def train_arguments(arguments, processes):
    """The arguments of `espalier train`, in the folder in which the run was started.

    Args:
        arguments: Of `espalier rerun`.
        processes: How many divide the work.

    Raises:
        InputError: The run cannot be repeated by this program or so many processes.
    """
    values = parser().parse_args(arguments)
    run, out = values.run.absolute(), values.out.absolute()
    made_by, folder, before = _record(run)
    _check_program(made_by, version_text().splitlines(), values.other_program)
    if before != processes:
        raise InputError(f"the run was made with --processes {before}, this one has {processes}: "
                         "expected as many, or `espalier rerun`, which starts them")  # fmt: skip
    mix = ["--mix", str(run / "mix.toml")] if (run / "mix.toml").exists() else []
    config = _config_without(run, [*NOT_REPEATED, *(["mix"] if mix else [])])
    try:
        os.chdir(folder)
    except OSError as error:
        raise InputError(f"the folder in which the run was started, {folder}: {error.strerror}") from None
    return ["--config", config, "--out", str(out), "--repeats", str(run), *mix]


def main(arguments):
    """Runs the command and returns its exit status."""
    words = list(arguments)

    def parse(_):
        processes = _record(parser().parse_args(words).run)[2]
        if processes > 1:
            become_ranks(processes, ["rerun", *words])
        return train.parse(train_arguments(words, processes))

    return run_work("rerun", parse, train.work, words)
