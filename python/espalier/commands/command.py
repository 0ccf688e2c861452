# SPDX-License-Identifier: Apache-2.0
"""Runs a command and maps errors to exit codes."""

import argparse
import os
import traceback
from collections.abc import Callable, Sequence

from ..errors import InputError, UsageError
from .command_line import OutputError
from .console import clipped, say, write
from .process import Process, die_of_closed_pipe
from .signals import Stopped, stops_raise

OUT_OF_MEMORY = ("out of memory: give a smaller --memory-budget, --token-budget or --batch-size, or --checkpoint-activations "
                 "layer, or use fewer trajectories (--limit)")  # fmt: skip


def run_command(name: str, work: Callable[[], int | None], out_of_memory: str = "out of memory") -> int:
    """Runs work() and returns the exit code: its own, 0 done, 1 failed, 2 wrong options (each with a one-line message), 130
    interrupted, 128 + N ended by signal N. Wrong arguments raise SystemExit. `out_of_memory`: the message of a MemoryError."""

    def failed(message: str, exit_code: int = 1) -> int:
        if os.environ.get("ESPALIER_TRACEBACK", "") not in ("", "0"):
            write(traceback.format_exc())
        say(f"espalier: error: {message}")
        return exit_code

    try:
        with stops_raise():
            return work() or 0
    except SystemExit:
        raise
    except UsageError as error:
        return failed(f"{error} (see `espalier {name} --help`)", 2)
    except InputError as error:
        return failed(str(error))
    except BrokenPipeError:
        die_of_closed_pipe()
        raise
    except OutputError as error:
        return failed(f"cannot write to standard output: {error}")
    except OSError as error:
        return failed(str(error) if error.filename else f"cannot write the output: {error.strerror or error}")
    except MemoryError:
        return failed(out_of_memory)
    except KeyboardInterrupt:
        return failed("interrupted", 130)
    except Stopped as error:
        return failed(f"stopped by {error}", 128 + error.number)
    except BaseException as error:
        if type(error) is RuntimeError:  # an error of the library, whose message is complete
            return failed(str(error))
        return failed(
            f"internal error: {type(error).__name__}: {clipped(str(error))} (ESPALIER_TRACEBACK=1 shows where)")


def run_work(name: str, parse: Callable[[Sequence[str]], argparse.Namespace],
             work: Callable[[argparse.Namespace, Process], int | None], arguments: Sequence[str]) -> int:  # fmt: skip
    """Runs work(parse(arguments), process), which calls the compiled library, in a thread of its own."""
    process = Process()

    def run() -> int | None:
        options = parse(arguments)
        return process.run(lambda: work(options, process))

    return run_command(name, run, OUT_OF_MEMORY)
