#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the wheels of espalier-train and espalier-torch for the Python and the PyTorch of the environment, and tests them in clean
# environments: scripts/wheels.sh [FOLDER], by default dist. These see what the environment has, and install what it lacks; with
# ESPALIER_INDEX=1 they see nothing of it. ESPALIER_JOBS sets the number of compilers that run at once, and
# ESPALIER_CUDA=ON builds CUDA kernels.
set -euo pipefail
cd "$(dirname "$0")/.."
dist=${1:-dist}
python=$(scripts/setup.sh --print-python)
folder=build/wheels

say() { printf '\n== %s\n' "$*"; }
wheel() {  # PROJECT SETTING...
  local project=$1
  shift
  PYTHONPATH=$PWD/build/python-tools:${PYTHONPATH:-} "$python" -m pip wheel --disable-pip-version-check --no-build-isolation \
    --no-deps --no-index --wheel-dir "$dist" "${@/#/--config-settings=cmake.define.}" "$project"
}

if command -v ccache >/dev/null; then
  export CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache CMAKE_CUDA_COMPILER_LAUNCHER=ccache
  export CCACHE_SLOPPINESS=${CCACHE_SLOPPINESS:-pch_defines,time_macros,include_file_mtime,include_file_ctime}
  export CCACHE_BASEDIR=${CCACHE_BASEDIR:-$PWD}
fi
export CMAKE_BUILD_PARALLEL_LEVEL=${ESPALIER_JOBS:-$(nproc)} ESPALIER_RELEASE=1
mkdir -p "$dist" "$folder"
rm -f "$dist"/espalier_{train,torch}-*.whl

say "espalier-train"
wheel . "ESPALIER_WERROR=${CI:+ON}"
say "espalier-torch"
wheel packaging/torch "ESPALIER_WERROR=${CI:+ON}" "ESPALIER_CUDA=${ESPALIER_CUDA:-OFF}"
train=$(ls "$dist"/espalier_train-*.whl)
torch=$(ls "$dist"/espalier_torch-*.whl)

# Of what is not of every Linux, only the libraries of the package torch may be missing from a wheel.
if "$python" -m auditwheel --version >/dev/null 2>&1; then
  say "auditwheel"
  "$python" -m auditwheel show "$train" | grep -A 1 'consistent with'
  libraries=$(dirname "$(echo "$("$python" -c 'import importlib.util; print(importlib.util.find_spec("torch").origin)')")")/lib
  outside=$("$python" -m auditwheel show --json --ldpaths "$libraries" "$torch" | grep -oE '"lib[^"/]*\.so[^"]*"' | tr -d '"' | sort -u)
  echo "espalier-torch takes from outside: $(tr '\n' ' ' <<<"$outside")"
fi

install() {  # ENVIRONMENT REQUIREMENT...
  local environment=$1
  shift
  "$python" -m venv --clear --without-pip "$environment"
  if [[ -z ${ESPALIER_INDEX:-} ]]; then
    "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$(echo "$environment"/lib/python*/site-packages)/environment.pth"
  fi
  "$python" -m pip --python "$environment/bin/python" install --quiet --disable-pip-version-check --find-links "$dist" "$@"
}
say "clean environments"
install "$folder/torch" "$train[hf,server]" "$torch" "$(grep -o '^tinker==[^ ]*' requirements.txt)"
install "$folder/train" "$train[prepare]"
"$folder/torch/bin/python" scripts/check_wheels.py "$folder/torch" "$folder/train"
say "wheels in $dist"
ls -sh "$train" "$torch"
