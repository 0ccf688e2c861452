# SPDX-License-Identifier: Apache-2.0
"""What a user can do where another library has replaced code of a model, and rows cannot share tokens with it: the end of
refusals."""

import re

# Of libraries that leave no choice: the first letters of their modules -> what to do. Others can be left out by an option.
_CURES = {"unsloth": "Unsloth replaces attention and layers where it finds a GPU, and has no option that leaves them: load the "
                     "model by Transformers, with PEFT for adapters, in a process that does not import unsloth, or train it "
                     "unpatched"}  # fmt: skip


def cure_of(change: object, otherwise: str = "train this model unpatched") -> str:
    """What to do about a change, whose text names the module that the code is from."""
    text = str(change)
    return next((cure for prefix, cure in _CURES.items() if re.search(rf"[( ]{prefix}\w*[.) ]", f"{text} ")), otherwise)
