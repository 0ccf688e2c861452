# SPDX-License-Identifier: Apache-2.0
"""The plugin of verl: `actor_rollout_ref.model.external_lib=espalier.plugins.verl`.

verl imports it in each worker, before it makes a model, which it then hands to apply_monkey_patch."""

import functools
import inspect
import sys

from ..launch import hooks, training


def watch_patches(module):
    """Makes apply_monkey_patch of `module` patch the model after what verl does, wherever it has been imported."""
    apply = module.apply_monkey_patch
    if hasattr(apply, "__wrapped__"):
        return

    @functools.wraps(apply)
    def patching(*args, **kwargs):
        given = inspect.signature(apply).bind(*args, **kwargs).arguments
        result = apply(*args, **kwargs)
        training.patch_worker(given["model"], given.get("ulysses_sp_size", 1))
        return result

    for each in list(sys.modules.values()):
        if getattr(each, "apply_monkey_patch", None) is apply:
            each.__dict__["apply_monkey_patch"] = patching


hooks.when_imported("verl.models.transformers.monkey_patch", watch_patches)
