#!/bin/sh
# Make the user of the images and the folder for its state.
set -eu

groupadd --gid 10001 flotilla
useradd --uid 10001 --gid 10001 --home-dir /var/lib/flotilla --no-create-home --shell /usr/sbin/nologin flotilla
# Every user may begin here, because a secret belongs to one user and the container runs as that one. The folder of a
# stack inside it is its owner's alone.
install -d -m 1777 /var/lib/flotilla
