#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Transformers 5.24.0: importing transformers.processing_utils (which modeling_layers and all models import) executes the package a
# second time and puts another module object into sys.modules. What `import transformers` gave before is no longer the module that
# later imports get, so an attribute that a program sets on the one is not there on the other.
# Seen: "False", then "patched 5.24.0".
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m venv "$scratch/venv"
"$scratch/venv/bin/python" -m pip install --quiet --disable-pip-version-check transformers==5.24.0 'numpy<3'
cd "$scratch"
seen=$("$scratch/venv/bin/python" - <<'PYTHON'
import transformers as first

first.__version__ = "patched"
import transformers.processing_utils  # noqa: E402, F401
import transformers as second  # noqa: E402

print(first is second)
print(first.__version__, second.__version__)
PYTHON
)
echo "$seen"
[[ $seen == $'False\npatched 5.24.0' ]]
