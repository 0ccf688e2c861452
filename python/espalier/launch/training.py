# SPDX-License-Identifier: Apache-2.0
"""What `espalier launch` does in a process that trains."""

import atexit
import contextlib
import os
import sys
import weakref
from typing import Any

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from .. import hf, trl
from ..commands.console import say
from ..errors import InputError, Unsupported
from ..hf.families import backbone_of
from ..hf.patching import patch_of
from . import notes

_started: weakref.WeakSet[Any] = weakref.WeakSet()  # trainers that have been patched


def begin(trainer, settings):
    """Patches the models of a Trainer that is about to train, once, unless the program has done so; and says it."""
    if trainer in _started:
        return
    with refusals_end_the_run():
        model = trainer.model
        is_patched = patch_of(backbone_of(model)) is not None
        if not is_patched:
            trl.patch(trainer, backend=settings.backend, check=settings.check, keep_groups=settings.keep_groups,
                      skip_logits=settings.skip_logits)  # fmt: skip
            _started.add(trainer)
    notes.note(settings.folder, "patched")
    if is_first_rank(trainer):
        name, kind = type(backbone_of(model)).__name__, type(trainer).__name__
        say(f"espalier: {kind} trains a {name} that the program has patched itself" if is_patched else
            f"espalier: {kind} trains {name} on trees of tokens")  # fmt: skip


def made_again(trainer, model, settings):
    """The model that a Trainer has made: patched if the one before was."""
    if trainer in _started:
        patch_model(model, settings)
    return model


def loaded(result, settings):
    """What from_pretrained has returned, of which a causal language model is patched; and says it."""
    model = result[0] if isinstance(result, tuple) else result
    if type(model).__name__ in causal_models():
        patch_model(model, settings)
        notes.note(settings.folder, "patched")
        tell_of_model(model)
    return result


def patch_worker(model, sequence_ranks):
    """Patches a model that a worker of verl has made, whose sequences are cut over `sequence_ranks` ranks; and says it."""
    with refusals_end_the_run():
        if sequence_ranks > 1:
            raise Unsupported(f"ulysses_sequence_parallel_size: expected 1, received {sequence_ranks}: a rank sees parts of "
                              "rows alone")  # fmt: skip
    patch_model(model, notes.settings_of())
    tell_of_model(model)


def patch_model(model, settings):
    with refusals_end_the_run():
        hf.patch(model, backend=settings.backend, check=settings.check, skip_logits=settings.skip_logits)


def tell_of_model(model):
    """Says that a model is patched, and at the end of the process what its batches have shared."""
    if is_first_rank():
        say(f"espalier: {type(model).__name__} runs on trees of tokens")
        given: Any = patch_of(backbone_of(model))  # the model itself may go
        atexit.register(lambda: given.sharing.batches and say(f"espalier: {given.sharing}"))


def causal_models():
    """Names of the classes that --patch-on load patches."""
    names = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()]
    return {name for each in names for name in ([each] if isinstance(each, str) else each)}


def tell_sharing(trainer):
    """Says what the batches of a Trainer have shared."""
    if trainer in _started and is_first_rank(trainer):
        say(f"espalier: {hf.sharing(trainer.model)}")


def is_first_rank(trainer=None):
    if trainer is not None:
        return trainer.is_world_process_zero()
    return os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def refusals_end_the_run():
    """A refusal ends the process with its message alone; programs that survive errors do not survive it."""
    try:
        yield
    except InputError as refusal:
        say(f"espalier: {refusal}")
        sys.exit(1)
