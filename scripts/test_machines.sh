#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the C++ tests as other machines would run them: with fewer vector instructions in LibTorch, MKL, oneDNN and
# our own kernels, with other numbers of threads, on other random numbers, and on a machine that is busy.
#   scripts/test_machines.sh             all tests under every setting (about an hour on 2 cores)
#   scripts/test_machines.sh --short     the numeric tests under one combined setting, a machine with AVX2 (about five minutes)
#   scripts/test_machines.sh --list      names the settings and runs nothing
#   scripts/test_machines.sh --only RE   the settings whose names match, of either form
# Settings that this machine cannot have are left out, by name. Prints a table and the tests that failed; exits with
# status 1 if any did. Output of the tests is kept in build/test-machines. The tests have to be built (make build).
set -euo pipefail
cd "$(dirname "$0")/.."

tests=build/release/tests
logs=build/test-machines
limit=1800  # seconds for one setting, after which a test that hangs is named

# What depends on the CPU or on random numbers. The emulator's tests of attention kernels do on neither the libraries
# nor the threads, and take minutes.
core_numeric='InstructionSet*:TileMath*:LogitMath*:PanelMath*:ProductChoice*:Recurrence*:Rng*'
torch_numeric='AttentionContext*:*Decoder*:EdgeDistribution*:EdgeLogprobs*:Elementwise*:*Exactness*:MatrixProduct*:*NegativeControl*'
torch_numeric+=':*Objective*:*Optimizer*:ParameterOps*:*Partition*:RandomForests*:TreeAttention*:*Verify*'
torch_numeric+=':Activations*:CausalConv*:Moe*:*Routers*:*Scan*:SlidingWindow*:Softcap*'
# Left out of the short form: tests that force every instruction set or number of threads themselves.
torch_numeric+='-*EveryInstructionSet*:*AnyNumberOfThreads*'

# name | variables of the environment; `busy` is no variable, but a load beside the tests.
long_settings() {
  cat <<END
as it is          |
aten default      | ATEN_CPU_CAPABILITY=default
aten avx2         | ATEN_CPU_CAPABILITY=avx2
mkl avx2          | MKL_ENABLE_INSTRUCTIONS=AVX2
mkl cbwr compat   | MKL_CBWR=COMPATIBLE
mkl cbwr avx2     | MKL_CBWR=AVX2
onednn avx2       | ONEDNN_MAX_CPU_ISA=AVX2
onednn avx512     | ONEDNN_MAX_CPU_ISA=AVX512_CORE
onednn bf16       | ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16
espalier default  | ESPALIER_CPU=default
espalier avx2     | ESPALIER_CPU=avx2
espalier avx512   | ESPALIER_CPU=avx512
espalier bf16     | ESPALIER_CPU=avx512_bf16
espalier amx      | ESPALIER_CPU=amx
library products  | ESPALIER_FLOAT32_PRODUCTS=library ESPALIER_BF16_PRODUCTS=library
upcast products   | ESPALIER_FLOAT32_PRODUCTS=library ESPALIER_BF16_PRODUCTS=upcast
own products      | ESPALIER_FLOAT32_PRODUCTS=panels ESPALIER_BF16_PRODUCTS=native
1 thread          | OMP_NUM_THREADS=1
2 threads         | OMP_NUM_THREADS=2
8 threads         | OMP_NUM_THREADS=8
seed 1            | ESPALIER_TEST_SEED=1
seed 2            | ESPALIER_TEST_SEED=2
seed 3            | ESPALIER_TEST_SEED=3
busy              | OMP_NUM_THREADS=2 busy
old machine       | ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41 ESPALIER_CPU=default ESPALIER_TEST_SEED=1
END
}

short_settings() {
  cat <<END
avx2 machine      | ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 MKL_CBWR=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 ESPALIER_CPU=avx2 ESPALIER_FLOAT32_PRODUCTS=panels ESPALIER_BF16_PRODUCTS=native ESPALIER_TEST_SEED=2
END
}

usage() { sed -n '3,/^set -/{/^set -/d;s/^# \{0,1\}//;p}' "$0"; }

form=long
list=
only=.
while (($#)); do
  case $1 in
    --short) form=short ;;
    --list) list=yes ;;
    --only) only=${2:?--only: expected a regular expression}; shift ;;
    --help | -h) usage; exit ;;
    *) echo "test_machines: expected --short, --list, --only RE or --help, received $1" >&2; exit 2 ;;
  esac
  shift
done

trim() { sed 's/^ *//; s/ *$//' <<<"$1"; }

# Whether the CPU has what `variables` force. The others only say what not to use.
possible() {
  local needed=()
  case $1 in
    *ESPALIER_CPU=amx*) needed=(avx512f avx512vl avx512bw avx512dq amx_tile amx_bf16) ;;
    *ESPALIER_CPU=avx512_bf16*) needed=(avx2 fma avx512f avx512vl avx512bw avx512dq avx512_bf16) ;;
    *ESPALIER_CPU=avx512*) needed=(avx2 fma avx512f avx512vl avx512bw avx512dq) ;;
    *ESPALIER_CPU=avx2*) needed=(avx2 fma) ;;
  esac
  local flag
  for flag in "${needed[@]}"; do
    grep -qw "$flag" /proc/cpuinfo || return 1
  done
}

# Whether the variables are read by LibTorch and its libraries alone, which core_tests do not link.
libraries_only() {
  local word
  for word in $1; do
    [[ $word =~ ^(ATEN|MKL|ONEDNN)_ ]] || return 1
  done
  [[ -n $1 ]]
}

busy_pids=()
stop_busy() {
  ((${#busy_pids[@]} == 0)) || kill "${busy_pids[@]}" 2>/dev/null || true
  busy_pids=()
}
trap stop_busy EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

start_busy() {
  local i
  for ((i = 0; i < 2 * $(nproc); ++i)); do
    (while :; do :; done) &
    busy_pids+=($!)
  done
}

# run_shard LOG SHARD PROGRAM FILTER VARIABLE...: one part of a program's tests.
run_shard() {
  local log=$1 shard=$2 program=$3 filter=$4 status=0
  shift 4
  env -u ATEN_CPU_CAPABILITY -u MKL_ENABLE_INSTRUCTIONS -u MKL_CBWR -u ONEDNN_MAX_CPU_ISA -u ESPALIER_CPU \
    -u ESPALIER_TEST_SEED -u ESPALIER_FLOAT32_PRODUCTS -u ESPALIER_BF16_PRODUCTS OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive "$@" GTEST_TOTAL_SHARDS="$(nproc)" GTEST_SHARD_INDEX="$shard" \
    timeout --kill-after=10 "$limit" "$tests/$program" --gtest_filter="$filter" --gtest_color=no >"$log" 2>&1 || status=$?
  # One line for each test that failed; where the program ended early, for the one that it was in.
  local failed
  failed=$(sed -n "s/^\[  FAILED  \] \([^ ,]*\.[^ ,]*\).*/$program \1/p" "$log" | sort -u)
  [[ -z $failed ]] || echo "$failed"
  if ((status > 1)) || { ((status == 1)) && [[ -z $failed ]]; }; then
    echo "$program ended with status $status in $(sed -n 's/^\[ RUN      \] //p' "$log" | tail -n 1)"
  fi
}

# run_setting NAME VARIABLES: leaves the failures in `failures`.
run_setting() {
  local folder=$logs/${1// /-} variables=() word program filter shard pids=()
  for word in $2; do
    if [[ $word == busy ]]; then start_busy; else variables+=("$word"); fi
  done
  rm -rf "$folder"
  mkdir -p "$folder"
  for program in core_tests torch_tests; do
    [[ $program == core_tests ]] && libraries_only "$2" && continue
    filter='*'
    if [[ $form == short ]]; then
      filter=$core_numeric
      [[ $program == torch_tests ]] && filter=$torch_numeric
    fi
    pids=()
    for ((shard = 0; shard < $(nproc); ++shard)); do
      run_shard "$folder/$program.$shard.log" "$shard" "$program" "$filter" "${variables[@]}" \
        >"$folder/$program.$shard.failures" &
      pids+=($!)
    done
    wait "${pids[@]}"
  done
  stop_busy
  failures=$(cat "$folder"/*.failures)
}

settings=$(if [[ $form == short ]]; then short_settings; else long_settings; fi)
if [[ $list ]]; then
  echo "$settings"
  exit
fi
for program in core_tests torch_tests; do
  [[ -x $tests/$program ]] || { echo "test_machines: expected $tests/$program, found none; run make build" >&2; exit 2; }
done

# A pattern that names no test any more would leave its tests out without a word.
check_patterns() {
  local pattern patterns
  IFS=: read -ra patterns <<<"$2"
  for pattern in "${patterns[@]}"; do
    # Not grep -q, which leaves before the program has written all and makes it fail.
    "$tests/$1" --gtest_list_tests --gtest_filter="$pattern" | grep '^  ' >/dev/null ||
      { echo "test_machines: expected tests of $1 that match $pattern, found none" >&2; exit 2; }
  done
}
check_patterns core_tests "$core_numeric"
check_patterns torch_tests "${torch_numeric%%-*}"
check_patterns torch_tests "${torch_numeric#*-}"

failed=0
ran=0
printf '%-18s %-8s %7s  %s\n' setting result seconds 'set in the environment'
while IFS='|' read -r name variables; do
  name=$(trim "$name")
  variables=$(trim "$variables")
  [[ $name =~ $only ]] || continue
  if ! possible "$variables"; then
    printf '%-18s %-8s %7s  %s\n' "$name" 'not here' '' "$variables"
    continue
  fi
  began=$SECONDS
  run_setting "$name" "$variables"
  ran=$((ran + 1))
  result=pass
  if [[ -n $failures ]]; then
    result=FAIL
    failed=$((failed + 1))
  fi
  printf '%-18s %-8s %7d  %s\n' "$name" "$result" $((SECONDS - began)) "$variables"
  [[ -z $failures ]] || sed "s|^|    |; \$s|\$|\n    output: $logs/${name// /-}|" <<<"$failures"
done <<<"$settings"
((ran > 0)) || { echo "test_machines: expected a setting whose name matches '$only' (--list), found none" >&2; exit 2; }
((failed == 0)) || { echo "test_machines: tests failed under $failed of $ran settings"; exit 1; }
