# SPDX-License-Identifier: Apache-2.0
"""The compiled part of the package, or one error that says how to build it."""

try:
    import espalier._core as core
except ModuleNotFoundError as error:
    if error.name != "espalier._core":
        raise
    raise ImportError("expected the compiled part of Espalier (espalier._core), which is not built for this Python: "
                      "run `pip install .` in a clone of Espalier, or `make build` there and set PYTHONPATH to its "
                      "folder python", name=error.name) from None  # fmt: skip

__all__ = ["__version__", "core"]

__version__: str = core.__version__  # type: ignore[attr-defined]  # nanobind's stubs leave it out
