# SPDX-License-Identifier: Apache-2.0
"""Runs commands that compute with a model: as the program, by themselves or as ranks of torchrun."""

import os
import signal
import sys
import traceback

from ..errors import InputError
from .command_line import print_whole
from .console import clipped, say, write
from .model_flags import DATA_FLAGS, given
from .progress import Progress

OUT_OF_MEMORY = ("out of memory: give a smaller --memory-budget, --token-budget or --batch-size, or --checkpoint-activations "
                 "layer, or use fewer trajectories (--limit)")  # fmt: skip


def main(parse, work, arguments=None):
    """Runs work(found) and returns the exit code: 0 done, 1 failed with a message. Wrong arguments raise SystemExit with 2.

    Args:
        parse: Gives what it finds in the arguments.
        work: The command.
        arguments: Of the command line. Default: those of this process.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        work(parse(sys.argv[1:] if arguments is None else arguments))
        return 0
    except BrokenPipeError:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)
        raise
    except InputError as error:
        message = error.command_message or str(error)
    except OSError as error:  # of standard output: the library writes all else
        message = f"cannot write to standard output: {error.strerror or error}"
    except MemoryError:
        message = OUT_OF_MEMORY
    except RuntimeError as error:
        message = str(error)
    except Exception as error:
        message = f"internal error: {type(error).__name__}: {clipped(str(error))} (ESPALIER_TRACEBACK=1 shows where)"
    if os.environ.get("ESPALIER_TRACEBACK", "") not in ("", "0"):
        write(traceback.format_exc())
    say(f"espalier: error: {message}")
    return 1


class Work:
    """A command at work, with the compiled trainer.

    Attributes:
        tells: Whether this process writes and prints: the only one, or the first rank.
    """

    def __init__(self, name, group=None):
        try:
            from ..native_engine import native
        except ImportError as error:
            raise InputError(f"{name} needs LibTorch: {error}") from None
        self._native, self._group = native, group
        self.tells = group is None or group.rank() == 0
        native.prepare_command(self.tells)

    def engine(self, model, options):
        """An engine that trains nothing."""
        from ..engine import Engine

        return Engine(model, adapters=True, process_group=self._group, **options)

    def rows(self, arguments):
        """The rows that the flags name, checked for the model; a line on stderr tells of them."""
        from ..native_options import named_texts

        return self._native.read_data(arguments.model, arguments.data, named_texts(given(arguments, DATA_FLAGS)))

    def check_file(self, path):
        """Raises InputError where the file cannot be written."""
        if self.tells:
            self._native.check_file(path)

    def write_file(self, path, texts):
        """The file appears when it is whole."""
        self._native.write_file(path, texts)

    def sum(self, count):
        """What the ranks count together."""
        if self._group is None:
            return count
        import torch

        total = torch.tensor(count, device="cpu")
        torch.distributed.all_reduce(total, group=self._group)
        return total.item()

    def progress(self, label):
        return Progress(label) if self.tells else _Silence()

    def warn(self, text):
        if self.tells:
            say(text)

    def print(self, text):
        if self.tells:
            print_whole(text)


class _Silence:
    def update(self, fraction, note):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass
