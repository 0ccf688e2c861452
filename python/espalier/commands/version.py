# SPDX-License-Identifier: Apache-2.0
"""The text of `espalier --version`."""

from pathlib import Path

from .. import torch_package


def version_text() -> str:
    """Version, commit, compiler, build type, LibTorch, CUDA and the instruction set in use, one a line.

    Raises:
        InputError: ESPALIER_CPU names an instruction set that this machine lacks.
    """
    from ..native import core

    build = core.build()
    folder = torch_package.find()
    with_torch = torch_package.built(Path(__file__).resolve().parents[1]) or (torch_package.built(folder) if folder else {})
    build["LibTorch"] = with_torch.get("torch", "built without")
    build["CUDA"] = f"built with {with_torch['cuda']}" if with_torch.get("cuda") else "built without"
    names = ("commit", "compiler", "build type", "LibTorch", "CUDA", "instruction set")
    return "\n".join([f"espalier {build['espalier']}", *(f"{name}: {build[name]}" for name in names)])
