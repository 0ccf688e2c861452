# SPDX-License-Identifier: Apache-2.0
"""Tells servers of samples to load published weights: `python -m espalier.publish`."""
