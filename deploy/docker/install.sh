#!/bin/sh
# Build /opt/flotilla inside an image: `install.sh lock NAME`, then `install.sh packages FOLDER...`, or
# `install.sh service NAME` for the package of a service with all that it needs of ours; pip knows what that is.
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

into_environment() { pip --python "$venv/bin/python" install --no-compile "$@"; }

build_wheels() {
    # A wheel takes its license from the folder of its package alone.
    for folder in "$@"; do ln -sf "$source/LICENSE" "$folder"; done
    # Wheels of ours need these to be built; constraints.txt pins them as it pins all else.
    grep -E '^(hatchling|packaging|pathspec|pluggy|trove-classifiers)==' "$source/requirements/constraints.txt" >/opt/build.txt
    pip install --no-deps --requirement /opt/build.txt
    PATH="$tools/bin:$PATH" pip wheel --no-deps --no-build-isolation --wheel-dir /opt/wheels "$@"
}

case $1 in
lock)
    into_environment --no-deps --requirement "$source/requirements/$2.txt"
    ;;
packages)
    shift
    build_wheels "$@"
    into_environment --no-deps --no-index /opt/wheels/*.whl
    ;;
service)
    build_wheels "$source"/libs/* "$source/services/$2"
    into_environment --no-index --find-links /opt/wheels "flotilla-$2"
    ;;
*)
    echo "usage: install.sh lock NAME | packages FOLDER... | service NAME" >&2
    exit 2
    ;;
esac
