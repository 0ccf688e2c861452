#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Configures a CMake preset where that is needed, and builds it: scripts/build.sh PRESET [TARGET...]
# PRESET release also leaves bin/espalier. ESPALIER_JOBS sets the number of compilers that run at once. ESPALIER_CUDA (ON, OFF)
# says whether CUDA kernels are built; unset, they are where the machine has a GPU and nvcc.
set -euo pipefail
cd "$(dirname "$0")/.."
preset=${1:?usage: scripts/build.sh PRESET [TARGET...]}
shift
folder=build/$preset

# A compiler that reads LibTorch's headers takes up to 2 GB.
jobs() {
  local cores memory_gb
  cores=$(nproc)
  memory_gb=$(awk '/^MemAvailable/ { print int($2 / 1048576) }' /proc/meminfo)
  local by_memory=$((memory_gb / 2 > 0 ? memory_gb / 2 : 1))
  echo "${ESPALIER_JOBS:-$((cores < by_memory ? cores : by_memory))}"
}

# Two builds of one folder wait for each other.
mkdir -p "$folder"
exec {lock}>"$folder/.lock"
flock "$lock"

settings=()
if [[ $preset == release || $preset == dev || $preset == asan-train ]]; then
  settings+=("-DESPALIER_PYTHON=$(scripts/setup.sh --print-python)")
fi
if [[ $preset == release || $preset == dev ]]; then
  # The kernels take minutes to compile, and nothing here could run them without a GPU.
  has_gpu=OFF
  [[ -e /dev/nvidiactl || -e /dev/dxg ]] && has_gpu=AUTO
  settings+=("-DESPALIER_CUDA=${ESPALIER_CUDA:-$has_gpu}")
fi
# Warnings stop the build where changes are judged, not where a user has a newer compiler.
if [[ -n ${CI:-} ]]; then
  settings+=(-DESPALIER_WERROR=ON)
fi
if command -v ccache >/dev/null; then
  settings+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache)
  # ccache keeps objects that use a precompiled header only when it may look past the header's time stamp.
  export CCACHE_SLOPPINESS=${CCACHE_SLOPPINESS:-pch_defines,time_macros,include_file_mtime,include_file_ctime}
  export CCACHE_BASEDIR=${CCACHE_BASEDIR:-$PWD}  # build folders share objects that are compiled with the same flags
fi

# ninja runs CMake again by itself when its files change; only other settings have to be told.
configured="$preset ${settings[*]}"
if [[ ! -f $folder/build.ninja || ! -f $folder/.configured || $(<"$folder/.configured") != "$configured" ]]; then
  cmake --preset "$preset" "${settings[@]}"
  echo "$configured" >"$folder/.configured"
fi

# The number of steps comes first, because in a log the first line of ninja stands when a step is done, which takes up to
# half a minute.
compilers=$(jobs)
steps=$(cmake --build "$folder" ${1:+--target "$@"} -- -n | sed -n 's,^\[[0-9]*/\([0-9]*\)\].*,\1,p' | tail -n 1)
if [[ -n $steps ]]; then
  echo "build: $steps steps, $compilers at a time"
fi
NINJA_STATUS=${NINJA_STATUS:-[%f/%t, %e s] } cmake --build "$folder" --parallel "$compilers" ${1:+--target "$@"}

if [[ $preset == release ]]; then
  mkdir -p bin
  ln -sfn ../build/release/bin/espalier bin/espalier
fi
