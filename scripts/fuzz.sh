#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the fuzz targets of tests/fuzz from their kept corpus.
#   scripts/fuzz.sh [SECONDS]         all of them, SECONDS each (10)
#   scripts/fuzz.sh SECONDS TARGET... some of them: config, cost_model, jsonl, packed, safetensors
# Inputs with new coverage go to build/fuzz/corpus, from where later runs go on; an input that fails is kept in
# build/fuzz/failures. Such an input becomes a unit test, and a file of tests/fuzz/corpus. The targets have to be built
# (make fuzz builds and runs them).
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-10}
shift || true
targets=("$@")
if ((${#targets[@]} == 0)); then
  for folder in tests/fuzz/corpus/*/; do targets+=("$(basename "$folder")"); done
fi
mkdir -p build/fuzz/failures

run_target() {
  local target=$1 found=build/fuzz/corpus/$1 log=build/fuzz/$1.log runs
  mkdir -p "$found"
  # Half a gigabyte for an input of a few kilobytes, or ten seconds, is a fault.
  if build/asan/tests/fuzz/fuzz_"$target" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=1024 -malloc_limit_mb=512 \
    -max_len=8192 -print_final_stats=1 -artifact_prefix="build/fuzz/failures/$target-" "$found" \
    "tests/fuzz/corpus/$target" >"$log" 2>&1; then
    runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
    echo "fuzz: $target: $runs inputs, no failure"
  else
    printf 'fuzz: %s: failed; see %s\n%s\n' "$target" "$log" "$(tail -n 30 "$log")"
    return 1
  fi
}

# A target takes one core.
export -f run_target
export seconds
printf '%s\0' "${targets[@]}" | xargs -0 -n 1 -P "$(nproc)" bash -c 'run_target "$1"' fuzz ||
  { echo "fuzz: there are failures" >&2; exit 1; }
