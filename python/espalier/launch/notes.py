# SPDX-License-Identifier: Apache-2.0
"""Settings of `espalier launch`, which its processes find in their environment, and notes, which they leave for it."""

import contextlib
import os
from types import SimpleNamespace

VARIABLE = "ESPALIER_LAUNCH"  # the settings as JSON
DEFAULTS = {"folder": "", "patch_on": "train", "backend": "auto", "check": False, "skip_logits": False, "keep_groups": True}


def settings_of(**given):
    """Settings by their names; those that are not given have their defaults."""
    return SimpleNamespace(**DEFAULTS | given)


def note(folder, name):
    """Leaves a note, which says nothing but its name, for the process that waits for the command."""
    if folder:
        with contextlib.suppress(OSError):  # it is there, or the folder is on another machine
            open(os.path.join(folder, name), "x").close()


def has_note(folder, name):
    return os.path.exists(os.path.join(folder, name))


def read_note(folder, name):
    try:
        with open(os.path.join(folder, name)) as file:
            return file.read()
    except OSError:
        return ""
