#!/usr/bin/env bash
# Build an environment from the lock and install every package of this repository in it, editable.
# Usage: PYTHON=python3.11 scripts/setup.sh .venv [LOCK]
#
# Installs nothing when lock and packages are what the environment was built from. One lock holds every service;
# a machine with an NVIDIA GPU gets the GPU lock.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:?usage: scripts/setup.sh ENVIRONMENT}
python=${PYTHON:-python3.11}
lock=requirements/dev.txt
command -v nvidia-smi >/dev/null && lock=requirements/dev-gpu.txt
lock=${2:-$lock}
packages=(libs/*/pyproject.toml services/*/pyproject.toml)
packages=("${packages[@]%/pyproject.toml}")

wanted_lock=$(sha256sum "$lock")
wanted_packages=$(sha256sum VERSION "${packages[@]/%//pyproject.toml}")
lock_stamp=$venv/.lock-stamp
packages_stamp=$venv/.packages-stamp
log=$venv/setup.log

holds() { [ -f "$1" ] && [ "$(<"$1")" = "$2" ]; }

fail() {
    echo "setup failed: $1" >&2
    exit 1
}

run_pip() {
    if ! "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off \
        --no-deps "$@" >"$log" 2>&1; then
        grep -E '^ERROR|error:' "$log" >&2 || tail -n 20 "$log" >&2
        fail "pip could not install; its whole output is in $log"
    fi
}

torch_loads() { "$venv/bin/python" -c 'import torch' 2>>"$log"; }

# pip compiles what it installs, but nothing that is editable. Where PYTHONDONTWRITEBYTECODE is set, each start of a
# service would compile our sources again, for a third of a second. A tree that cannot be written is only slower.
compile() { "$venv/bin/python" -m compileall -qq libs/*/src services/*/src || true; }

# A wheel takes its license from the folder of its package alone.
for package in "${packages[@]}"; do [ -e "$package/LICENSE" ] || ln -s ../../LICENSE "$package" 2>/dev/null || true; done

if holds "$lock_stamp" "$wanted_lock" && holds "$packages_stamp" "$wanted_packages"; then
    compile
    exit 0
fi

if [ ! -x "$venv/bin/python" ]; then
    command -v "$python" >/dev/null && "$python" --version >/dev/null 2>&1 ||
        fail "'$python' does not run. Install Python 3.11 or 3.12, or name one: make setup PYTHON=/path/to/python3.11"
    "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' ||
        fail "'$python' is $("$python" --version 2>&1), but Flotilla runs on Python 3.11 and 3.12"
    echo "==> setup: creating $venv with $("$python" --version)"
    "$python" -m venv "$venv"
fi

if ! holds "$lock_stamp" "$wanted_lock"; then
    echo "==> setup: installing $(grep -c '==' "$lock") packages from $lock (one to three minutes)"
    run_pip "$(grep '^pip==' "$lock")"
    run_pip -r "$lock"
    if grep -q '^torch==' "$lock" && ! torch_loads; then
        echo "==> setup: pip offers the CUDA build of torch here: adding the libraries that it loads (about 3 GB)"
        run_pip -r requirements/torch-cuda.txt
        torch_loads || fail "the installed torch does not load; see $log"
    fi
    echo "$wanted_lock" >"$lock_stamp"
fi

echo "==> setup: installing ${#packages[@]} packages of this repository, editable"
run_pip --no-build-isolation "${packages[@]/#/--editable=./}"
echo "$wanted_packages" >"$packages_stamp"
compile
echo "==> setup: $venv is ready"
