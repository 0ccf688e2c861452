#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs every quickstart of docs/ from top to bottom with the wheels that are installed, and compares what it prints. The clone gives
# the pages and examples/ only: none of its code is imported.
#   scripts/quickstarts.sh                the Python and the command `espalier` of PATH
#   scripts/quickstarts.sh PYTHON         another Python, and the command beside it
#   scripts/quickstarts.sh PYTHON PAGE... some pages only, such as docs/quickstarts/sft.md
# Needs espalier-train, espalier-torch, transformers and trl. Takes a minute or two on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(command -v "${1:-python3}") || { echo "quickstarts: expected a Python, received ${1:-python3}" >&2; exit 2; }
shift || true
pages=("$@")
if [[ ${#pages[@]} -eq 0 ]]; then pages=(README.md docs/quickstarts/*.md docs/larger-than-memory.md docs/does-my-data-benefit.md); fi

unset PYTHONPATH ESPALIER_OPS ESPALIER_PYTHON
export PATH="$(dirname "$python"):$PATH" PYTHONSAFEPATH=1
"$python" - <<'PYTHON'
import importlib.util
import os
import shutil
import sys

missing = [name for name in ("espalier", "torch", "transformers", "trl", "datasets") if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"quickstarts: expected a Python with espalier, torch, transformers and trl, received {sys.executable} without "
             f"{', '.join(missing)}; pip install 'espalier-train[torch,hf,trl]' or the wheels of `make wheels`")
package = os.path.dirname(importlib.util.find_spec("espalier").origin)
if os.path.realpath(package) == os.path.realpath("python/espalier"):
    sys.exit("quickstarts: expected an installed espalier, received that of this clone")
if shutil.which("espalier") is None:
    sys.exit("quickstarts: expected the command espalier on PATH, found none")
print(f"quickstarts: {package}, {shutil.which('espalier')}")
PYTHON
exec "$python" tests/documents.py "${pages[@]}"
