#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a recipe of tinker-cookbook, as it is, against `espalier serve` in a folder that home.py made:
#
#     examples/cookbook/recipes.sh HOME MODULE [KEY=VALUE ...]
#
# TINKER_BASE_URL names the server (default: http://127.0.0.1:8000), PYTHON the Python that has the cookbook.
set -euo pipefail
[[ $# -ge 2 && -d $1 ]] || { echo "usage: $0 HOME MODULE [KEY=VALUE ...]" >&2; exit 2; }
cd "$1"
export TINKER_BASE_URL=${TINKER_BASE_URL:-http://127.0.0.1:8000} TINKER_API_KEY=${TINKER_API_KEY:-tml-local} HF_HUB_OFFLINE=1
exec "${PYTHON:-python}" -m "tinker_cookbook.$2" "${@:3}"
