# SPDX-License-Identifier: Apache-2.0
"""The build backend: that of scikit-build-core, with the PyTorch that is installed. pip builds where it cannot be imported, in an
environment of its own; it is found beside the interpreter all the same, so that the wheel is for the PyTorch that will run."""

import importlib.metadata
import importlib.util
import os
import re
import sys
import sysconfig
from pathlib import Path

from scikit_build_core import build as _scikit_build
from scikit_build_core.build import *  # noqa: F403  the hooks that stay as they are

OLDEST = "2.9"
ANY = f"torch>={OLDEST}"


def find_torch():
    """(folder, version) of the PyTorch to build against; None where there is none."""
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    for path in (sys.path, list(installed)):
        for distribution in importlib.metadata.distributions(name="torch", path=path):
            folder = Path(distribution.locate_file("torch"))
            if (folder / "lib").is_dir():
                return folder.resolve(), distribution.version
    return None


def _minor(version):
    major, minor = map(int, re.match(r"(\d+)\.(\d+)", version).groups())
    return major, minor


def get_requires_for_build_wheel(config_settings=None):
    needed = _scikit_build.get_requires_for_build_wheel(config_settings)
    return needed if find_torch() else [*needed, ANY]


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    settings = dict(config_settings or {})
    if found := find_torch():
        folder, version = found
        if _minor(version) < _minor(OLDEST):
            sys.exit(f"espalier-torch: expected PyTorch {OLDEST} or later, received {version} in {folder}")
        settings["cmake.define.ESPALIER_TORCH_FOLDER"] = str(folder)
    return _scikit_build.build_wheel(wheel_directory, settings, metadata_directory)


class Metadata:
    """Version and dependencies. A wheel needs the minor version of PyTorch that it was built against. Where ESPALIER_RELEASE is
    set, its version says it, too: 0.2.0.211 of Espalier 0.2.0 is for PyTorch 2.11."""

    def __init__(self):
        self.state = "sdist"

    def build_state(self, build_state):
        self.state = build_state

    def dynamic_metadata(self, settings, project):
        version = re.search(r"project\(espalier VERSION ([0-9.]+)", Path("espalier/CMakeLists.txt").read_text())[1]
        torch, found = ANY, self.state != "sdist" and find_torch()
        fields = {"dependencies": [torch, f"espalier-train=={version}"], "version": version}
        if found:
            major, minor = _minor(found[1])
            fields["dependencies"][0] = f"torch=={major}.{minor}.*"
            if os.environ.get("ESPALIER_RELEASE"):
                fields["version"] += f".{100 * major + minor}"
        return fields

    def dynamic_wheel(self, settings):
        return {"dependencies": True}
