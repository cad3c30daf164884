#!/bin/sh
# Build /opt/flotilla inside an image: `install.sh lock NAME`, then `install.sh packages FOLDER...`.
#
# Pip stays outside of what is built. The secrets `pip` (a pip.conf) and `ca` (a bundle of certificates) configure it; neither
# remains in a layer.
set -eu

tools=/opt/tools
venv=/opt/flotilla
source=/source
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_CACHE_DIR=/var/cache/pip
if [ -f /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi
if [ -f /run/secrets/pip ]; then export PIP_CONFIG_FILE=/run/secrets/pip; fi

[ -d "$tools" ] || python3.11 -m venv "$tools"
[ -d "$venv" ] || python3.11 -m venv --without-pip "$venv"
pip() { "$tools/bin/python" -m pip "$@"; }

case $1 in
lock)
    pip --python "$venv/bin/python" install --no-deps --no-compile --requirement "$source/requirements/$2.txt"
    ;;
packages)
    shift
    # Wheels of ours need these to be built; constraints.txt pins them as it pins all else.
    grep -E '^(hatchling|packaging|pathspec|pluggy|trove-classifiers)==' "$source/requirements/constraints.txt" >/opt/build.txt
    pip install --no-deps --requirement /opt/build.txt
    PATH="$tools/bin:$PATH" pip wheel --no-deps --no-build-isolation --wheel-dir /opt/wheels "$@"
    pip --python "$venv/bin/python" install --no-deps --no-compile --no-index /opt/wheels/*.whl
    ;;
*)
    echo "usage: install.sh lock NAME | packages FOLDER..." >&2
    exit 2
    ;;
esac
