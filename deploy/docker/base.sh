#!/bin/sh
# Make a base image from Debian's packages, for a host that reaches no registry of images.
# Usage: base.sh NAME:TAG (as root; needs debootstrap). Build with --build-arg BASE=NAME:TAG afterwards.
set -eu

image=$1
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$root"
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
tar -C "$root" --one-file-system -c . | ${DOCKER:-docker} import - "$image"
