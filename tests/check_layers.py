#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that modules include only downward (docs/architecture.md).

    tests/check_layers.py              checks src/espalier; exit 1 and one line per violation
    tests/check_layers.py --self-test  also plants violations in a scratch tree and demands that each is found

Rules: a module includes its own headers and those of the modules named in MAY_INCLUDE. The LibTorch-free half
includes nothing of LibTorch, and neither do the kernels, which take raw pointers. Every `#include` of a project
file is written from the root, as "espalier/MODULE/file.h".
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path

MAY_INCLUDE = {
    "base": set(),
    "tree": {"base"},
    "data": {"base"},
    "config": {"base"},
    "plan": {"base", "tree", "config"},
    "inspect": {"base", "tree", "data"},
    "runtime": {"base"},
    "ops": {"base"},
    "distributed": {"base", "runtime"},
    "model": {"base", "config", "ops"},
    "objective": {"base", "tree", "data"},
    "engine": {"base", "tree", "plan", "data", "config", "runtime", "ops", "distributed", "model", "objective"},
}
MAY_INCLUDE["sample"] = MAY_INCLUDE["engine"] | {"engine"}
MAY_INCLUDE["measure"] = MAY_INCLUDE["engine"] | {"engine"}
MAY_INCLUDE["train"] = MAY_INCLUDE["measure"] | {"measure"}
MAY_INCLUDE["verify"] = MAY_INCLUDE["train"] | {"train"}
MAY_INCLUDE["commands"] = set(MAY_INCLUDE)
WITHOUT_LIBTORCH = {"base", "tree", "plan", "data", "config", "inspect"}
MAY_INCLUDE["python"] = set(WITHOUT_LIBTORCH) | {"ops", "runtime", "commands"}
WITHOUT_LIBTORCH.add("python")
MAY_INCLUDE["python_engine"] = MAY_INCLUDE["train"] | {"sample", "train"}
MAY_INCLUDE["python_module"] = set(MAY_INCLUDE)
LIBTORCH = re.compile(r"^(torch|ATen|c10|caffe2)/")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}


def violations(root):
    """Yields "FILE:LINE: what is wrong" for everything below `root`, the folder of the modules."""
    for path in sorted(root.rglob("*")):
        if path.suffix not in SUFFIXES:
            continue
        module = path.relative_to(root).parts[0]
        if module not in MAY_INCLUDE:
            yield f"{path}: expected a module of {', '.join(MAY_INCLUDE)}, received {module}"
            continue
        is_kernel = module == "ops" and "kernels" in path.relative_to(root).parts[1:-1]
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            match = INCLUDE.match(line)
            fault = match and fault_of(module, is_kernel, quoted=match[1] == '"', name=match[2])
            if fault:
                yield f"{path}:{number}: {fault}"


def fault_of(module, is_kernel, quoted, name):
    """What is wrong with one include; None when nothing is."""
    if LIBTORCH.match(name):
        if module in WITHOUT_LIBTORCH or is_kernel:
            return f"{'ops/kernels' if is_kernel else module} may not include LibTorch ({name})"
        return None
    parts = name.split("/")
    if parts[0] != "espalier":
        return f'"{name}" should be written from the root, as "espalier/MODULE/file.h"' if quoted else None
    target = parts[1] if len(parts) > 2 else ""
    if target not in MAY_INCLUDE:
        return f"{name}: no such module"
    if target != module and target not in MAY_INCLUDE[module]:
        return f"{module} may not include {target} ({name})"
    if is_kernel and target != "base" and parts[1:3] != ["ops", "kernels"]:
        return f"ops/kernels may include base and kernels only ({name})"
    return None


PLANTED = {
    "base/a.h": '#include "espalier/tree/forest.h"',
    "tree/a.cpp": '#include "espalier/plan/planner.h"',
    "data/a.cpp": '#include "espalier/tree/forest.h"',
    "ops/a.cpp": '#include "espalier/tree/layout.h"',
    "model/a.cpp": '#include "espalier/train/run/trainer.h"',
    "train/a.cpp": '  #  include "espalier/commands/command.h"',
    "engine/a.cpp": '#include "espalier/measure/profile.h"',
    "objective/a.cpp": '#include "espalier/plan/memory_model.h"',
    "measure/a.cpp": '#include "espalier/train/optimizer/optimizer.h"',
    "inspect/a.cpp": '#include "espalier/commands/command.h"',
    "inspect/b.cpp": "#include <ATen/Tensor.h>",
    "plan/a.cpp": "#include <torch/torch.h>",
    "tree/b.h": "#include <ATen/Tensor.h>",
    "data/b.h": "#include <c10/util/Half.h>",
    "ops/kernels/a.cuh": "#include <torch/library.h>",
    "ops/kernels/b.cu": '#include "espalier/ops/attention/tree_attention.h"',
    "train/b.cpp": '#include "batch.h"',
    "commands/a.cpp": '#include "espalier/nowhere/a.h"',
    "python/a.cpp": '#include "espalier/engine/step.h"',
    "commands/b.cpp": '#include "espalier/python/arrays.h"',
    "train/d.cpp": '#include "espalier/python_engine/engine.h"',
    "python_engine/b.cpp": '#include "espalier/commands/command.h"',
    "extra/a.h": "#include <vector>",
}
ALLOWED = {
    "python_engine/a.cpp": '#include "espalier/train/run/trainer.h"\n#include <ATen/Tensor.h>',
    "python_module/a.cpp": '#include "espalier/python_engine/engine.h"\n#include "espalier/commands/command.h"\n#include "espalier/python/arrays.h"\n#include <ATen/Tensor.h>',
    "train/c.cpp": '#include "espalier/tree/forest.h"\n#include <torch/torch.h>\n#include <vector>',
    "ops/c.cpp": '#include "espalier/ops/kernels/a.cuh"\n// #include "espalier/tree/forest.h"',
}


def self_test():
    """Returns the planted files that were missed and the sound files that were blamed."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for name, text in {**PLANTED, **ALLOWED}.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text("#pragma once\n" + text + "\n")
        found = {str(Path(re.split(r":\d+: |: ", line)[0]).relative_to(root)) for line in violations(root)}
    return sorted(found ^ set(PLANTED))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--self-test", action="store_true", help="demand that planted violations are found")
    arguments = parser.parse_args()
    if arguments.self_test:
        wrong = self_test()
        if wrong:
            print(f"check_layers: the self-test misjudged {', '.join(wrong)}", file=sys.stderr)
            return 1
    root = Path(__file__).resolve().parents[1] / "src" / "espalier"
    found = list(violations(root))
    for line in found:
        print(line, file=sys.stderr)
    files = sum(path.suffix in SUFFIXES for path in root.rglob("*"))
    if files == 0:
        print(f"check_layers: no sources below {root}", file=sys.stderr)
        return 1
    print(f"check_layers: {files} files, {len(found)} violations"
          + (f", {len(PLANTED)} planted violations found" if arguments.self_test else ""))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
