#!/bin/sh
# Start the service of this image as a member of the stack that /etc/flotilla/stack.yaml describes, or the given command.
#
# The name of the container's host makes the slot: each further container of an image is one more replica.
set -eu
umask 077

case ${1:-} in
'' | -*) ;;
*) exec "$@" ;;
esac
host=$(uname -n)
set -- --stack "$FLOTILLA_STACK" --name "${FLOTILLA_NAME:-$FLOTILLA_SERVICE-$host}" --port "$FLOTILLA_PORT" \
    --advertise-host "${FLOTILLA_ADVERTISE_HOST:-$host}" "$@"
for collector in ${FLOTILLA_OTLP:-}; do set -- --otlp "$collector" "$@"; done
exec "flotilla-$FLOTILLA_SERVICE" "$@"
