# SPDX-License-Identifier: Apache-2.0
"""What each Python process below `espalier launch` does when it starts: it waits for Transformers.

Every process runs this, also those that never train: it loads little."""

import functools
import json
import sys
from typing import Any

from .notes import note, settings_of


def install(text):
    """Waits for Transformers with the settings `text`."""
    settings = settings_of(**json.loads(text))
    note(settings.folder, "hook")
    if settings.patch_on == "load":
        when_imported("transformers.modeling_utils", lambda module: watch_loading(module, settings))
    else:
        when_imported("transformers.trainer", lambda module: watch_training(module, settings))


def when_imported(name, action):
    """Calls action(module) once the module is loaded; at once where it is."""
    if name in sys.modules and getattr(sys.modules[name].__spec__, "_initializing", False) is False:
        action(sys.modules[name])
    else:
        sys.meta_path.insert(0, Watcher(name, action))


class Watcher:
    """A finder that finds one module as the others do, and calls an action when it has been executed."""

    def __init__(self, name, action):
        self.name, self.action, self.is_asking = name, action, False

    def find_spec(self, name, path=None, target=None):
        if name != self.name or self.is_asking:  # by another Watcher of the same module
            return None
        self.is_asking = True
        try:
            finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
            spec: Any = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
        finally:
            self.is_asking = False
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader.exec_module = self.executing(spec.loader.exec_module)
        return spec

    def executing(self, execute):
        def exec_module(module):
            execute(module)
            if module.__name__ == self.name:  # a loader may serve several modules
                self.action(module)

        return exec_module


def watch_training(module, settings):
    """Makes the Trainer of `module`, transformers.trainer, patch its model when training begins."""
    note(settings.folder, "library")
    train, call_model_init = module.Trainer.train, module.Trainer.call_model_init
    if hasattr(train, "patched_by_espalier"):
        return  # by `espalier launch` and by a plugin

    @functools.wraps(train)
    def patching_train(trainer, *args, **kwargs):
        from . import training

        training.begin(trainer, settings)
        with training.refusals_end_the_run():
            result = train(trainer, *args, **kwargs)
        training.tell_sharing(trainer)
        return result

    @functools.wraps(call_model_init)
    def patching_call_model_init(trainer, *args, **kwargs):
        from . import training

        return training.made_again(trainer, call_model_init(trainer, *args, **kwargs), settings)

    patching_train.patched_by_espalier = True  # type: ignore[attr-defined]
    module.Trainer.train, module.Trainer.call_model_init = patching_train, patching_call_model_init


def watch_loading(module, settings):
    """Makes from_pretrained of `module`, transformers.modeling_utils, patch what it returns."""
    note(settings.folder, "library")
    load = module.PreTrainedModel.__dict__["from_pretrained"].__func__

    @functools.wraps(load)
    def from_pretrained(cls, *args, **kwargs):
        from . import training

        return training.loaded(load(cls, *args, **kwargs), settings)

    module.PreTrainedModel.from_pretrained = classmethod(from_pretrained)
