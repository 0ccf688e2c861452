# SPDX-License-Identifier: Apache-2.0
"""`espalier launch`: runs the command of another trainer, whose models train on trees.

The command gets a `sitecustomize` (site/) by PYTHONPATH, and its settings by an environment variable. Its processes inherit
both, so the workers of torchrun and processes that are spawned are reached as well. In each of them hooks.py waits until
Transformers is imported, and training.py patches when training begins."""
