# SPDX-License-Identifier: Apache-2.0
"""Rollouts of other trainers as Espalier's rows, and back.

The commands `espalier import` and `espalier export` convert files. Converters convert objects in memory: `from_verl`,
`from_skyrl`, `from_areal`, `from_slime`, `from_tinker`, `from_trl`. Each accepts the trainer's objects, or dicts of
PyTorch tensors, NumPy arrays or lists, and returns a list of rows of docs/data-format.md: dicts of plain lists and
numbers. The trainers need not be installed, and nothing is ever unpickled.

    rows = espalier.io.from_verl(data_proto)
    espalier.io.write_rows(rows, "rows.jsonl.zst")

Errors: InputError, which names the sample, the field, the expected and the received value.
"""

from ..errors import InputError
from .areal import from_areal
from .skyrl import from_skyrl
from .slime import from_slime
from .tinker import from_tinker
from .trl import from_trl
from .verl import from_verl
from .writing import write_rows

__all__ = ["InputError", "from_areal", "from_skyrl", "from_slime", "from_tinker", "from_trl", "from_verl", "write_rows"]
