#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set-up for Debian 12 and Ubuntu 24.04: system packages, and a Python that has torch. Work that was done is not
# repeated. The Python is that of an active environment (VIRTUAL_ENV, CONDA_PREFIX) which has torch >= 2.9, taken
# as it is: what builds need besides goes to build/python-tools. Otherwise it is .venv, made from requirements.txt.
#
#   scripts/setup.sh                 does all of it
#   scripts/setup.sh --core          system packages only (all that the LibTorch-free half needs)
#   scripts/setup.sh --clang         the same, and clang with its sanitizers and its fuzzer
#   scripts/setup.sh --print-python  prints the path of the Python that is used, and does nothing
#   scripts/setup.sh --print-missing prints what tests, demo and lint use and this Python lacks, as arguments of pip install
#   scripts/setup.sh --complete      fails where it lacks any
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(g++ cmake ninja-build ccache libsimdjson-dev
          nlohmann-json3-dev libfmt-dev libzstd-dev zlib1g-dev libxxhash-dev libgtest-dev libboost-context-dev python3-dev
          python3-venv)

say() { echo "setup: $*" >&2; }

missing_packages() {
  local package
  for package in "${packages[@]}"; do
    dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || echo "$package"
  done
}

install_packages() {
  if ! command -v dpkg-query >/dev/null; then
    say "no dpkg here; these must be installed by other means: ${packages[*]}"
    return
  fi
  local -a missing
  mapfile -t missing < <(missing_packages)
  [[ ${#missing[@]} -eq 0 ]] && return
  local -a root=()
  if [[ $EUID -ne 0 ]]; then
    # Without a terminal sudo may only be used where it asks for no password.
    if command -v sudo >/dev/null && { [[ -t 0 ]] || sudo -n true 2>/dev/null; }; then
      root=(sudo)
    else
      say "missing system packages, and no right to install them: apt-get install ${missing[*]}"
      exit 1
    fi
  fi
  say "installing ${missing[*]}"
  if ! { "${root[@]}" apt-get update && "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install --yes \
           --no-install-recommends "${missing[@]}"; } >&2; then
    say "apt-get failed; these system packages are missing: ${missing[*]}"
    exit 1
  fi
}

# Does the environment at $1 have torch >= 2.9? Asked of its metadata, because importing torch takes seconds.
has_torch() {
  [[ -x $1/bin/python ]] && "$1/bin/python" - <<'PYTHON' 2>/dev/null
import importlib.metadata, sys
major, minor = importlib.metadata.version("torch").split(".")[:2]
sys.exit((int(major), int(minor)) < (2, 9))
PYTHON
}

# The active environment that is used as it is; nothing when there is none.
active_environment() {
  local candidate
  for candidate in "${VIRTUAL_ENV:-}" "${CONDA_PREFIX:-}"; do
    if [[ -n $candidate && $candidate != "$PWD/.venv" ]] && has_torch "$candidate"; then
      echo "$candidate"
      return
    fi
  done
}

# Distributions that the Python $1 lacks, as requirements.txt pins them: those named, or without names all that the project uses itself.
missing_distributions() {
  "$1" - "${@:2}" <<'PYTHON'
import importlib.metadata, re, sys
with open("requirements.txt", encoding="utf-8") as file:
    used = re.findall(r"^([\w-]+)==(\S+)", file.read().partition("\n# Then")[0], re.MULTILINE)
installed = {re.sub(r"[-_.]+", "-", each.name).lower(): each.version for each in importlib.metadata.distributions() if each.name}
names = sys.argv[1:]
print(*[f"{name}=={version}" for name, version in used
        if (name in names and installed.get(name) != version if names else name not in installed)])
PYTHON
}

# nanobind and scikit-build-core in the versions of requirements.txt: the active environment is the user's, who may need others.
install_build_tools() {
  local python=$1 folder=build/python-tools stamp missing
  missing=$(missing_distributions "$python" nanobind scikit-build-core)
  if [[ -z $missing ]]; then
    rm -rf "$folder"
    return
  fi
  stamp="$python $missing"
  [[ -f $folder/.installed && $(<"$folder/.installed") == "$stamp" ]] && return
  say "installing $missing into $folder"
  rm -rf "$folder"
  # shellcheck disable=SC2086  # one word each
  if ! "$python" -m pip install --quiet --disable-pip-version-check --target "$folder" $missing >&2; then
    rm -rf "$folder"
    say "cannot install what the build needs; run: $python -m pip install $missing"
    exit 1
  fi
  echo "$stamp" >"$folder/.installed"
}

make_venv() {
  local stamp=.venv/.espalier-requirements wanted
  wanted="$(cat requirements{,-cookbook,-wrappers}.txt | sha256sum | cut -d' ' -f1) $(python3 -c 'import sys; print(sys.version.split()[0])')"
  [[ -f $stamp && $(<"$stamp") == "$wanted" ]] && return
  if ! .venv/bin/python -m pip --version &>/dev/null; then
    say "making .venv"
    python3 -m venv .venv
  fi
  say "installing requirements.txt into .venv (5 GB the first time; unpacking them takes minutes without a word)"
  # Modules are compiled when they are first imported: most never are.
  local -a install=(.venv/bin/python -m pip install --disable-pip-version-check --no-compile)
  "${install[@]}" --requirement requirements.txt >&2
  "${install[@]}" --no-deps --requirement requirements-cookbook.txt >&2
  rm -rf .venv/wrappers
  "${install[@]}" --no-deps --target .venv/wrappers --requirement requirements-wrappers.txt >&2
  echo "$wanted" >"$stamp"
}

# Two set-ups of one clone wait for each other.
if [[ ${1:-} != --print-* ]]; then
  mkdir -p build
  exec {lock}>build/.setup-lock
  flock "$lock"
fi

case "${1:-}" in
  --print-python)
    active=$(active_environment)
    echo "${active:-$PWD/.venv}/bin/python"
    ;;
  --print-missing | --complete)
    active=$(active_environment)
    missing=$(missing_distributions "${active:-$PWD/.venv}/bin/python")
    if [[ $1 == --print-missing ]]; then
      echo "$missing"
    elif [[ -n $missing ]]; then
      say "this takes more than the active environment has; run: $active/bin/python -m pip install $missing"
      exit 1
    fi
    ;;
  --core)
    install_packages
    ;;
  --clang)
    # libclang-rt-dev depends on the runtime libraries of the distribution's own clang.
    packages+=(clang libclang-rt-dev)
    install_packages
    ;;
  "")
    install_packages
    active=$(active_environment)
    unused=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
    if [[ -n $active ]]; then
      say "using the active environment $active as it is"
      install_build_tools "$active/bin/python"
    else
      if [[ -n $unused && $unused != "$PWD/.venv" ]]; then
        say "the active environment $unused has no torch >= 2.9; using .venv (pip install torch there, and start again, to use it)"
      fi
      make_venv
    fi
    ;;
  *)
    echo "usage: scripts/setup.sh [--core | --clang | --print-python | --print-missing | --complete]" >&2
    exit 2
    ;;
esac
