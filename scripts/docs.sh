#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The site of docs/ in build/site, by a separate environment, build/docs-env. Needs bin/espalier, whose help is a page.
#   scripts/docs.sh          builds it; warnings, missing pages and dead links are errors
#   scripts/docs.sh --serve  shows it on http://127.0.0.1:8000 and builds again what changes
set -euo pipefail
cd "$(dirname "$0")/.."
case "${1:-}" in
  "") action=(build) ;;
  --serve) action=(serve) ;;
  *)
    echo "usage: scripts/docs.sh [--serve]" >&2
    exit 2
    ;;
esac
if [[ ! -x bin/espalier ]]; then
  echo "docs: bin/espalier is missing; run make command" >&2
  exit 1
fi
environment=build/docs-env
if ! cmp --silent docs/requirements.txt "$environment/requirements.txt"; then
  python3 -m venv --clear "$environment"
  "$environment/bin/python" -m pip install --quiet --disable-pip-version-check --requirement docs/requirements.txt
  cp docs/requirements.txt "$environment/requirements.txt"
fi
NO_MKDOCS_2_WARNING=1 PATH="$environment/bin:$PATH" "$environment/bin/mkdocs" "${action[@]}"
