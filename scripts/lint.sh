#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Formatting of all sources, clang-tidy on the LibTorch-free half, ruff and mypy on Python, and the checks of the layers
# and of the documents.
#   scripts/lint.sh           checks everything
#   scripts/lint.sh --fast    leaves out clang-tidy, which takes most of the time
#   scripts/lint.sh --deep    lets clang's static analyzer follow 15 times as many paths (about 20 minutes)
#   scripts/lint.sh --format  formats instead
set -euo pipefail
cd "$(dirname "$0")/.."
tools=$(dirname "$(scripts/setup.sh --print-python)")

mapfile -t sources < <(git ls-files --cached --others --exclude-standard -- '*.h' '*.cpp' '*.cu' '*.cuh')
if [[ ${1:-} == --format ]]; then
  "$tools/clang-format" -i "${sources[@]}"
  exit
fi

echo "lint: clang-format on ${#sources[@]} files"
printf '%s\0' "${sources[@]}" | xargs -0 -n 50 -P "$(nproc)" "$tools/clang-format" --dry-run --Werror

echo "lint: ruff"
"$tools/ruff" check --quiet
echo "lint: mypy"
"$tools/mypy"

echo "lint: layers"
python3 tests/check_layers.py --self-test
python3 tests/check_types.py --self-test
echo "lint: documents"
python3 tests/check_docs.py --self-test

[[ ${1:-} == --fast ]] && exit

nodes=15000
[[ ${1:-} == --deep ]] && nodes=225000  # the analyzer's own default
# clang-tidy needs how each source is compiled by itself, not what comes of it.
cmake --preset core -B build/lint -DESPALIER_JOIN=OFF -DESPALIER_TESTS=OFF -DESPALIER_BINDINGS=OFF >/dev/null
mapfile -t core < <(git ls-files --cached --others --exclude-standard -- \
                      src/espalier/{base,tree,config,plan,data,inspect}/'*.cpp')
echo "lint: clang-tidy on ${#core[@]} files"
printf '%s\0' "${core[@]}" |
  xargs -0 -n 1 -P "$(nproc)" "$tools/clang-tidy" -p build/lint --quiet --warnings-as-errors='*' \
    --extra-arg=-Wno-unknown-warning-option `# the compile commands may be those of GCC` \
    --extra-arg=-Xclang --extra-arg=-analyzer-config --extra-arg=-Xclang --extra-arg=max-nodes=$nodes
