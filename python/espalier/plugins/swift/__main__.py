# SPDX-License-Identifier: Apache-2.0
"""Prints the path of the plugin."""

from pathlib import Path

print(Path(__file__).resolve().parent / "file/espalier_swift.py")
