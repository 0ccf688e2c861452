#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tokens that a model encodes after packing the same rows, by project: what is left of the repetition, without any timing.

    python bench/papers/packed_tokens.py --art DIR/art/megatron/prefix_tree_packing.py

- sequence packing: all tokens of all rows;
- append-only merging: rows that others extend are dropped (bench/papers/append_only.py);
- ART: `prefix_tree_pack` of OpenPipe ART at each depth limit, of the file that --art names. It needs torch alone: take it out of
  the wheel that `pip download --no-deps --python-version 3.12 --only-binary :all: openpipe-art==0.5.23` brings;
- TRL: the packed row of AsyncGRPO (trl.experimental.async_grpo), where TRL is installed;
- Espalier: `espalier.build`.

Rows: the turns of eight real conversations, nine answers to a prompt, and rollouts that branch at each of four turns.
"""

import argparse
import importlib.util
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from commit import commit
from compare_transformers import espalier, markdown
from papers import append_only, workloads

DEPTHS = (0, 1, 2, 3, 4, 8, 16)


def rollouts(scratch):
    path = scratch / "rollouts.jsonl"
    espalier("synth", "-o", path, "--depth", 4, "--branching", 3, "--node-length", 40, "--vocab-size", 4096, "--end-inside", 0.5)
    return [json.loads(line) for line in path.read_text().splitlines()]


def module_of_art(file):
    spec = importlib.util.spec_from_file_location("prefix_tree_packing", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def tokens_of_art(file, rows):
    """Depth limit -> tokens."""
    import torch

    module = module_of_art(file)
    tensors = [torch.tensor(row["input_ids"]) for row in rows]
    return {depth: module.prefix_tree_pack(tensors, max_depth=depth).tokens.numel() for depth in DEPTHS}


def tokens_of_trl(rows):
    try:
        from trl.experimental.async_grpo.packing import TreeRow
    except ImportError:
        return None
    import torch

    packed = TreeRow()
    for row in rows:
        size = len(row["input_ids"])
        packed.add({"input_ids": torch.tensor(row["input_ids"]), "completion_mask": torch.zeros(size), "group_id": 0})
    return len(packed.tokens)


def counts(name, rows, art):
    import espalier as package

    found = {"rows ": name, "sequence packing": sum(len(row["input_ids"]) for row in rows),
             "append-only merging": sum(len(row["input_ids"]) for row in append_only.merge(rows, linear=True).rows)}  # fmt: skip
    found |= {f"ART, depth {depth}": tokens for depth, tokens in tokens_of_art(art, rows).items()} if art else {}
    trl = tokens_of_trl(rows)
    found |= {} if trl is None else {"TRL": trl}
    return found | {"Espalier": package.build(rows).tree_tokens}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--art", type=Path, metavar="FILE", help="prefix_tree_packing.py of OpenPipe ART (default: leave it out)")
    parser.add_argument("--conversations", type=int, default=8, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="espalier-papers-") as scratch:
        turns = workloads.conversation_turns(args.conversations, 4096, 2600)
        sets = {f"turns of {args.conversations} conversations": turns,
                "nine answers to a prompt": workloads.group(1024, 64, 9, 4096), "rollouts": rollouts(Path(scratch))}  # fmt: skip
    rows = [counts(name, each, args.art) for name, each in sets.items()]
    print(f"commit {commit()}\n")
    print(
        markdown(
            {name: lambda row, name=name: row[name] if isinstance(row[name], str) else f"{row[name]:,}" for name in rows[0]}, rows
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
