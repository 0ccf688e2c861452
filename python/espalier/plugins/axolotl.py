# SPDX-License-Identifier: Apache-2.0
"""The plugin of Axolotl: `plugins: [espalier.plugins.axolotl.EspalierPlugin]` in the YAML of a run."""

from axolotl.integrations.base import BasePlugin

from ..launch import notes, training


class EspalierPlugin(BasePlugin):
    """Patches the models of a run's trainer when it has been made, and says at the end what was shared.

    Keys of the YAML: espalier_backend, espalier_check, espalier_skip_logits and espalier_keep_groups, as the flags of
    `espalier launch`."""

    def get_input_args(self):
        return "espalier.plugins.axolotl_keys.EspalierKeys"

    def post_trainer_create(self, cfg, trainer):
        given = {name: cfg.get(f"espalier_{name}") for name in ("backend", "check", "skip_logits", "keep_groups")}
        training.begin(trainer, notes.settings_of(**{name: value for name, value in given.items() if value is not None}))
        self.trainer = trainer

    def post_train(self, cfg, model):
        training.tell_sharing(self.trainer)
