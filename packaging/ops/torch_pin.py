# SPDX-License-Identifier: Apache-2.0
"""What the distribution depends on, as scikit-build-core asks for it: a wheel needs the minor version of PyTorch that it
was built against, the source distribution any that is served."""

import importlib.metadata

ANY = "torch>=2.9"


class Pin:
    def __init__(self):
        self.state = "sdist"

    def build_state(self, build_state):
        self.state = build_state

    def dynamic_metadata(self, settings, project):
        if self.state == "sdist":
            return {"dependencies": [ANY]}
        try:
            major, minor = importlib.metadata.version("torch").split(".")[:2]
        except importlib.metadata.PackageNotFoundError:  # CMake says what helps
            return {"dependencies": [ANY]}
        return {"dependencies": [f"torch=={major}.{minor}.*"]}

    def dynamic_wheel(self, settings):
        return {"dependencies": True}
