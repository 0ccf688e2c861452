# SPDX-License-Identifier: Apache-2.0
"""What commands need that compute with a model in Python, by themselves or as ranks of torchrun."""

from ..errors import InputError
from ..rows.advice import with_advice
from .command_line import print_whole
from .console import say
from .parser import DATA_FLAGS, present_values
from .progress import Progress


class Work:
    """A command at work, with the compiled trainer.

    Attributes:
        tells: Whether this process writes and prints: the only one, or the first rank.
    """

    def __init__(self, name, process, group=None):
        from ..engine_library import load

        native = load(name)
        self._native, self._group = native, group
        self.tells = group is None or group.rank() == 0
        native.prepare_process()
        process.add(native, tells=self.tells)

    def engine(self, model, options):
        """An engine that trains nothing."""
        from ..engine import Engine

        return Engine(model, adapters=True, process_group=self._group, **options)

    def rows(self, arguments):
        """The rows that the flags name, checked for the model; a line on stderr tells of them."""
        from ..native_options import named_texts

        try:
            return self._native.read_data(arguments.model, arguments.data, named_texts(present_values(arguments, DATA_FLAGS)))
        except InputError as error:
            raise with_advice(error) from None

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
