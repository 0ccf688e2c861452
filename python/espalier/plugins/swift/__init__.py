# SPDX-License-Identifier: Apache-2.0
"""The plugin of ms-swift: `--external_plugins $(python -m espalier.plugins.swift)`.

ms-swift puts the folder of the file first on sys.path and imports it by its name; so it has its own folder and name."""
