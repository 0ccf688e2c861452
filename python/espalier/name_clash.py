# SPDX-License-Identifier: Apache-2.0
"""Another distribution of the same import name: `espalier` on PyPI is a package for phylogenetics."""

import os
import warnings

_CURE = "; run `pip uninstall espalier`, and install espalier-train again"


def distribution_in(folder: str) -> str | None:
    """The distribution named espalier that has been installed into `folder`, where the package lies; None where there is none."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:  # inside of a zip file, where nothing is mixed
        return None
    own = (name for name in names if name.lower().startswith("espalier-"))  # that of espalier-train begins with espalier_train-
    return next((name for name in own if name.endswith((".dist-info", ".egg-info"))), None)


def warn(package_file: str) -> None:
    """Warns where the files of another distribution lie among those of the package whose __init__.py is given."""
    if (found := distribution_in(os.path.dirname(os.path.dirname(package_file)))) is not None:
        warnings.warn("import espalier: expected the files of the distribution espalier-train alone, found those of another "
                      f"one, {found}, in the same folder{_CURE}", stacklevel=3)  # fmt: skip


def check(package: object) -> None:
    """Raises ImportError where the package that Python has loaded is that of the other distribution."""
    if not hasattr(package, "_HOMES"):
        raise ImportError("import espalier: expected the package of espalier-train, received that of another distribution, "
                          f"{getattr(package, '__file__', None)}{_CURE}", name="espalier")  # fmt: skip
