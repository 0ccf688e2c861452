# SPDX-License-Identifier: Apache-2.0
"""The text that the program prints, made of what it found, as JSON."""
