# SPDX-License-Identifier: Apache-2.0
"""What Python loads when it starts below `espalier launch`: Espalier's hook, then the sitecustomize that it hides."""

import json
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

HERE = os.path.dirname(os.path.abspath(__file__))


def install_hook():
    text = os.environ.get("ESPALIER_LAUNCH")
    if not text:
        return
    try:
        from espalier.launch import hooks
    except ImportError as error:
        fault = f"{sys.executable}, which the command runs, has no package espalier: {error}"
        with open(os.path.join(json.loads(text)["folder"], "fault"), "w") as file:
            file.write(fault)
    else:
        hooks.install(text)


def load_hidden():
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.abspath(path or ".") != HERE])
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules["sitecustomize"])


try:
    install_hook()
finally:
    load_hidden()
