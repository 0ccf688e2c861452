# SPDX-License-Identifier: Apache-2.0
"""Texts of what commands found, as JSON."""

import gc
import json
from importlib import import_module

_MAKERS = {"page": "page.render:page_of", "inspect": "printed.inspect:report_text", "plan": "printed.plan:plan_text",
           "table": "printed.table:table_text", "dry_run": "printed.dry_run:dry_run_text", "bench": "printed.bench:bench_text",
           "profile": "printed.profile:profile_text", "verify": "printed.rows:verify_text", "device": "printed.rows:device_text",
           "step_line": "printed.run_lines:step_line", "evaluation_line": "printed.run_lines:evaluation_line",
           "synth": "printed.rows:synth_text"}  # fmt: skip


def text_of(kind: str, found: str) -> str:
    """The text of a kind for JSON, whose keys are the arguments of the function that makes it."""
    module, function = _MAKERS[kind].split(":")
    make = getattr(import_module(f"..{module}", __name__), function)
    was_enabled = gc.isenabled()
    gc.disable()  # a page has millions of lists, of which all stay
    try:
        text: str = make(**json.loads(found))
    finally:
        if was_enabled:
            gc.enable()
    return text
