#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One call that builds Espalier on a machine with a GPU, runs what needs one, and measures.
#
#   bench/gpu_suite.sh [OPTIONS] [OUT]
#
# OUT: folder for what it finds (default: $OUT, else runs/gpu-suite in the repository): report.md has all tables, results.json all figures,
# build.log, checks.log and suite.log what was printed. All are written as results come. A short table comes last on standard
# output; exit status 1 when a stage failed.
#
#   --seconds N      stop after so long (default 570). Stages run in the order below, each bounded; those for which no time
#                    is left are marked "left out", and can be run by another call with --stages
#   --stages LIST    comma-separated, of:
#                      build        CMake and ninja into build/gpu, for the GPU of this machine; the modules of Python where it has nanobind
#                      libraries    bench/gpu_attention.py --libraries: cuDNN, ours, FlexAttention and TRL's gather on three trees,
#                                   with errors against float64 and shares of dense FlashAttention
#                      waves        bench/gpu_waves.py: libraries of recurrences in waves beside the composed form, on those trees
#                                   and others. Libraries are those of that Python; PYTHONPATH may add a folder of them
#                      qualify      bench/gpu_qualify.py: which kernels are right here, as later stages read it. What fails is named and not measured
#                      tests        GoogleTest programs, restricted to tests that need a GPU; 1,000 random forests
#                      verify       espalier verify --device cuda: dtypes x strategies; equal bits of two runs; a rank for each GPU over NCCL
#                      sanitizer    compute-sanitizer memcheck and racecheck on small tests; these three beside each other
#                      models       tests/python/test_on_gpu.py: patched models and espalier.Engine against float64 on the CPU
#                      attention    bench/gpu_attention.py, without what stage qualify found wrong
#                      step         bench/gpu_step.py, shape of Qwen3-0.6B: trees against packing, long prompts
#                      step4b       the same, shape of Qwen3-4B: two of the long prompts, two ratios
#                      head         bench/gpu_head.py
#                      patched      bench/gpu_patched.py: patched models beside espalier.Step, with Liger where that Python has it
#                      step4b_rest  the other prompts and ratios of Qwen3-4B, activations of layers computed again
#                      attention_flex  bench/gpu_attention.py with FlexAttention on every tree, most of which is compiling
#                      papers       bench/papers at full size: peers.py with FlexAttention, long_prompts.py for three kinds of models. Tables
#                                   and pictures in OUT/papers. peers.py needs Transformers there, and takes TRL, PrefixGrouper and
#                                   flash-preference where that Python has them
#                    The last three seldom get a turn in a call with all stages: they are for a separate call.
#                    (default: all; without build, build/gpu is used as it is)
#   --kinds LIST     values of ESPALIER_ATTENTION that stage attention compares (default: see above)
#   --attention KIND ESPALIER_ATTENTION in steps (default: what qualify found right)
#   --jobs N         compilers at once (default: all cores)
#   --architectures LIST  CMake's names of the GPUs to build for (default: that of this machine, 90-real where it has none)
#   --bundle-folder DIR   where the packages of --bundle are (default: .gpu-bundle)
#   --bundle         on a machine with the packages of scripts/setup.sh: collect them in .gpu-bundle and stop
#   --dry-run        print the commands
#
# It needs g++, CMake >= 3.25, ninja, nvcc and a python3 with torch; no network, no root. Where scripts/setup.sh cannot install
# the other packages, make .gpu-bundle elsewhere and take it along:
#
#   bench/gpu_suite.sh --bundle                           here, once
#   bench/gpu_suite.sh out                                there, with .gpu-bundle in the repository
#
# Git ignores .gpu-bundle. What copies the files that git knows, from a copy of Espalier within another repository too, leaves it
# out: rename it, and say --bundle-folder. Reports name the commit; where the history is not there, ESPALIER_COMMIT gives it.
set -euo pipefail
called_from=$PWD
cd "$(dirname "$0")/.."

all_stages=build,libraries,waves,qualify,tests,verify,sanitizer,models,attention,step,step4b,head,patched,step4b_rest,attention_flex,papers
stages=$all_stages
seconds=570
jobs=$(nproc)
kinds=
attention=
dry_run=false
architectures=
bundle=.gpu-bundle
out=${OUT:-$PWD/runs/gpu-suite}

usage() { sed -n '3,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "$0"; }

fail() {
  echo "gpu_suite: $*" >&2
  exit 2
}

while [[ $# -gt 0 ]]; do
  case $1 in
    --help | -h) usage; exit ;;
    --bundle) exec "$(scripts/setup.sh --print-python)" bench/gpu_bundle.py ;;
    --dry-run) dry_run=true ;;
    --seconds | --stages | --jobs | --kinds | --attention | --architectures | --bundle-folder)
      [[ $# -ge 2 ]] || fail "$1 needs a value"
      case $1 in
        --seconds) seconds=$2 ;;
        --stages) stages=$2 ;;
        --jobs) jobs=$2 ;;
        --kinds) kinds=$2 ;;
        --attention) attention=$2 ;;
        --architectures) architectures=$2 ;;
        --bundle-folder)
          bundle=$(cd "$called_from" && realpath -m "$2")
          [[ -d $bundle ]] || fail "--bundle-folder: no folder $2"
          ;;
      esac
      shift
      ;;
    -*) fail "unknown option $1; --help lists them" ;;
    *) out=$1 ;;
  esac
  shift
done
[[ $out == /* ]] || out=$called_from/$out
[[ $seconds =~ ^[1-9][0-9]*$ ]] || fail "--seconds: expected a number of seconds, received $seconds"
[[ $jobs =~ ^[1-9][0-9]*$ ]] || fail "--jobs: expected a number, received $jobs"
for stage in ${stages//,/ }; do
  [[ ",$all_stages," == *",$stage,"* ]] || fail "--stages: expected names of $all_stages, received $stage"
done

# The Python whose torch is built against, and run: that of the machine where it has torch, else the project's own.
find_python() {
  if python3 -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' 2>/dev/null; then
    command -v python3
  else
    scripts/setup.sh --print-python
  fi
}

# CMake's name of the first GPU, by its compute capability.
architecture_here() {
  local capability
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d ' ')
  case $capability in
    "") echo 90-real ;;
    *) echo "${capability/./}-real" ;;
  esac
}

architectures=${architectures:-$(architecture_here)}
python=$(find_python)
build=build/gpu
work=$build/suite
# Models of up to 8 GB are written, read a few times and removed: in memory where there is plenty.
models=$work/models
if (($(df --output=avail /dev/shm 2>/dev/null | tail -n 1 || echo 0) > 24000000)); then
  models=/dev/shm/espalier-gpu-suite-$$
fi
# CMake and ninja may have come as packages of that Python.
PATH=$PATH:/usr/local/cuda/bin:$(dirname "$python")
export XDG_CACHE_HOME=$PWD/$work/cache PYTHONUNBUFFERED=1
if $dry_run; then
  echo "gpu_suite: would build for $architectures with the packages of $bundle, and write to $out" >&2
else
  mkdir -p "$work" "$out"
  rm -f "$work"/*.md "$work"/*.json "$work"/*.log "$work"/*.last "$work"/*.failed "$work"/stages.tsv
  : >"$out/suite.log"
  : >"$out/checks.log"
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader >>"$out/suite.log" 2>&1 || true
  trap 'rm -rf "$models"' EXIT
fi

# Seconds for a stage that may take $1 at most; some are kept for the report.
limit() {
  local left=$((seconds - SECONDS - 8))
  echo $(($1 < left ? $1 : left))
}

note() {
  printf '%s\t%s\t%s\n' "$1" "$2" "$3" >>"$work/stages.tsv"
  "$python" bench/gpu_summary.py "$work" --out "$out" >/dev/null || true  # a failed stage; what follows still runs
  echo "gpu_suite: $1: $2, $3 s ($SECONDS s of $seconds)"
}

# run NAME MOST_SECONDS COMMAND...: @S in the command stands for the seconds it is given. What it prints goes to suite.log.
run() {
  local name=$1 most=$2 given status=0 began=$SECONDS
  shift 2
  given=$(limit "$most")
  if $dry_run; then
    echo "[$name, at most $most s] ${*//@S/$((most - 10))}"
    return
  fi
  if ((given < 25)); then
    note "$name" "left out" 0
    return
  fi
  timeout --kill-after=10 "$given" "${@//@S/$((given - 10))}" >"$work/$name.log" 2>&1 || status=$?
  grep -v '^ *$' "$work/$name.log" | tail -n 1 | cut -c 1-200 >"$work/$name.last" || true
  { echo "---- $name" && cat "$work/$name.log"; } >>"$out/suite.log"
  case $status in
    0) note "$name" passed $((SECONDS - began)) ;;
    124 | 137) note "$name" "out of time" $((SECONDS - began)) ;;
    *) note "$name" FAILED $((SECONDS - began)) ;;
  esac
}

# Whether stage qualify found this family of kernels wrong.
failed() { grep -qx "$1" "$work/qualify.failed" 2>/dev/null; }

# What stage attention compares where something is known to be wrong; nothing: its default.
right_kinds() {
  local -a list=()
  if ! failed library && ! failed ampere; then return 0; fi
  failed library || list+=(library)
  failed ampere || list+=(ampere)
  (IFS=, && echo "${list[*]:-masked}")
}

results() { echo "--out $work/$1.md --json $work/$1.json"; }

configure_and_build() {
  local prefixes=""
  if [[ -d $bundle ]]; then
    prefixes=$(printf '%s;' "$(realpath "$bundle")"/*)
  fi
  # The command is Python with compiled modules: they need nanobind and Python's headers.
  local headers version
  local -a more=()
  if [[ -d $bundle/python ]] && ! "$python" -c "import nanobind" 2>/dev/null; then
    PYTHONPATH=$(realpath "$bundle")/python/packages${PYTHONPATH:+:$PYTHONPATH}
    export PYTHONPATH
  fi
  headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
  if [[ ! -f $headers/Python.h && -d $bundle/python/include/$version ]]; then
    more+=("-DPython_INCLUDE_DIR=$(realpath "$bundle/python/include/$version")")
  fi
  # One file that does not compile must not hide what the rest shows.
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DESPALIER_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES="$architectures" \
    -DESPALIER_PYTHON="$python" -DCMAKE_PREFIX_PATH="${prefixes%;}" "${more[@]}" \
    -DCMAKE_GTEST_DISCOVER_TESTS_DISCOVERY_MODE=PRE_TEST &&
    cmake --build "$build" --parallel "$jobs" --target espalier espalier_ops cuda_tests -- -k 0
}

# bin/espalier, which tests and scripts start.
link_command() {
  if ! $dry_run && [[ ! -e bin/espalier ]]; then
    mkdir -p bin && ln -sfn "../$build/bin/espalier" bin/espalier
  fi
}

# $1: the page for its tables. One that fails must not keep the others from being drawn.
draw_papers() {
  local status=0 drawing
  local -a shared=(--full --device cuda --dtype bfloat16 --out "$out/papers")
  : >"$1"
  for drawing in peers long_prompts "long_prompts --models qwen3_moe granite_hybrid"; do
    # shellcheck disable=SC2086  # a script and its options
    set -- "$1" $drawing
    "$python" "bench/papers/$2.py" "${@:3}" "${shared[@]}" >>"$1" || status=$?
    echo >>"$1"
  done
  return "$status"
}

stage() {
  local checks=(env OMP_NUM_THREADS=4 "$python" bench/gpu_checks.py --build "$build" --seconds @S --log "$out/checks.log")
  local steps=(env "ESPALIER_ATTENTION=$attention" "$python" bench/gpu_step.py --scratch "$models"
               --espalier "$build/bin/espalier" --seconds @S)
  local ops=$build/src/espalier/ops/libespalier_ops.so
  local -a output
  read -ra output <<<"$(results "$1")"
  case $1 in
    build)
      if $dry_run; then
        declare -f configure_and_build
      else
        export build python jobs bundle architectures
        export -f configure_and_build
        run build 300 bash -c configure_and_build
        cp "$work/build.log" "$out/build.log" 2>/dev/null || true
      fi
      ;;
    qualify)
      run qualify 300 env -u ESPALIER_ATTENTION -u ESPALIER_HEAD "ESPALIER_OPS=$ops" "$python" bench/gpu_qualify.py \
        --espalier "$build/bin/espalier" --seconds @S --failed "$work/qualify.failed" "${output[@]}"
      ;;
    libraries)
      run libraries 240 "$python" bench/gpu_attention.py --libraries --ops "$ops" --kinds "${kinds:-library,ampere}" --case-seconds 3 \
        --seconds @S "${output[@]}"
      ;;
    waves) run waves 120 "$python" bench/gpu_waves.py --ops "$ops" --seconds @S "${output[@]}" ;;
    tests) run tests 120 "${checks[@]}" --parts tests "${output[@]}" ;;
    verify) run verify 120 "${checks[@]}" --parts verify,determinism,ranks --parallel 4 "${output[@]}" ;;
    attention)
      if [[ -z $kinds ]]; then
        kinds=$(right_kinds)
      fi
      run attention 115 "$python" bench/gpu_attention.py --ops "$ops" ${kinds:+--kinds "$kinds"} --seconds @S "${output[@]}"
      ;;
    step) run step 100 "${steps[@]}" --models 0.6b "${output[@]}" ;;
    step4b)
      run step4b 110 "${steps[@]}" --models 4b --sets prompts,ratios --grid 16384/64,16384/128 --ratios 8,1 --repeats 2 \
        "${output[@]}"
      ;;
    attention_flex)
      if [[ -z $kinds ]]; then
        kinds=$(right_kinds)
      fi
      run attention_flex 550 "$python" bench/gpu_attention.py --ops "$ops" ${kinds:+--kinds "$kinds"} --dense none \
        --flex-everywhere --case-seconds 0.7 --seconds @S "${output[@]}"
      ;;
    step4b_rest)
      run step4b_rest 400 "${steps[@]}" --models 4b --sets prompts,ratios --grid 16384/1024,8192/4096 --ratios 64,2,32,4,16,128 \
        --tree-tokens 4096 --checkpoint-activations layer --token-budget 49152 --repeats 1 "${output[@]}"
      ;;
    head)
      if failed head; then
        echo "its kernels failed in stage qualify" >"$work/head.last"
        note head "left out" 0
        return
      fi
      run head 45 "$python" bench/gpu_head.py --ops "$ops" --case-seconds 1 --seconds @S "${output[@]}"
      ;;
    patched) run patched 90 "$python" bench/gpu_patched.py --ops "$ops" --seconds @S "${output[@]}" ;;
    models)
      link_command
      run models 300 env "ESPALIER_OPS=$ops" "$python" -m pytest -q -rA -p no:cacheprovider tests/python/test_on_gpu.py
      ;;
    papers)
      link_command
      export python out
      export -f draw_papers
      run papers 560 env "ESPALIER_OPS=$ops" "PYTHONPATH=$PWD/python${PYTHONPATH:+:$PYTHONPATH}" bash -c "draw_papers $work/papers.md"
      ;;
    sanitizer) run sanitizer 100 "${checks[@]}" --parts sanitizer --parallel 4 "${output[@]}" ;;
  esac
}

wanted() { [[ ",$stages," == *",$1,"* ]]; }

# Models of steps are made while the GPU is tested, which leaves processors idle. $1: the seconds that it may take.
prepare_models() {
  local -a names=()
  ! wanted step || names+=(0.6b)
  if wanted step4b || wanted step4b_rest; then names+=(4b); fi
  local list
  list=$(IFS=, && echo "${names[*]}")
  if [[ -n $list ]] && (($1 > 0)) && ! $dry_run; then
    timeout "$1" "$python" bench/gpu_step.py --prepare --models "$list" --scratch "$models" \
      --espalier "$build/bin/espalier" >"$work/prepare.log" 2>&1 || true  # steps will say what is wrong
  fi
}

# Stages that are not timed run beside each other: tests, verify and the sanitizer.
beside=()
begin_beside() {
  if wanted "$1"; then
    stage "$1" &
    beside+=($!)
    if $dry_run; then wait "${beside[@]}"; fi
  fi
}
wait_for() { [[ $# -eq 0 ]] || wait "$@" || true; }

for name in ${all_stages//,/ }; do
  case $name in
    qualify)
      prepare_models "$(limit 240)" &
      preparing=$!
      if wanted qualify; then
        stage qualify
      fi
      ;;
    tests)
      begin_beside tests
      begin_beside verify
      first=("${beside[@]}")
      begin_beside sanitizer
      wait_for "${first[@]}"
      ;;
    verify | sanitizer) ;;
    *)
      if [[ $name == attention ]]; then wait_for "${beside[@]}"; fi
      if [[ $name == step* ]]; then wait_for "$preparing"; fi
      if wanted "$name"; then
        stage "$name"
      fi
      ;;
  esac
done
if $dry_run; then
  exit
fi
"$python" bench/gpu_summary.py "$work" --out "$out"
