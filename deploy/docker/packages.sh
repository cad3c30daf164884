#!/bin/sh
# Install packages of the system (the arguments), and leave nothing of apt behind.
set -eu

apt-get update -q
DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "$@"
rm -rf /var/lib/apt/lists/* /var/cache/apt /var/log/apt /var/log/dpkg.log
