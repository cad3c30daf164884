#!/bin/sh
# Make the secrets of the stack, and `.env` with the user that its containers run as. What exists stays.
# Usage: secrets.sh [FOLDER]   (secrets/ beside this file; with another folder, `.env` is yours to write)
#
# A secret is used only by the user who owns its file, so the containers run as the user who calls this. Root calls it
# for the user of the images, 10001.
set -eu
umask 077

here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-$here/secrets}
user=$(id -u) group=$(id -g)
if [ "$user" = 0 ]; then user=10001 group=10001; fi
word() { od -An -N32 -tx1 /dev/urandom | tr -d ' \n'; }

mkdir -p "$folder"
[ -s "$folder/token" ] || word >"$folder/token"
# Services keep the registry; the coordinator alone also writes the events of runs.
login() { grep -qs "^$2:" "$folder/$1" || printf '%s:%s\n' "$2" "$(word)" >"$folder/$1"; }
login nats_credentials service
login nats_coordinator_credentials coordinator
password() { cut -d : -f 2 "$folder/$1"; }
cat >"$folder/nats_conf" <<END
host: "0.0.0.0"
port: 4222
http: "127.0.0.1:8222"
max_payload: 1048576
authorization {
  users: [
    {
      user: service
      password: "$(password nats_credentials)"
      permissions {
        publish: [
          "\$KV.registry.*"
          "\$JS.API.INFO"
          "\$JS.API.STREAM.CREATE.KV_registry"
          "\$JS.API.STREAM.INFO.KV_registry"
          "\$JS.API.CONSUMER.CREATE.KV_registry"
          "\$JS.API.CONSUMER.CREATE.KV_registry.>"
          "\$JS.API.CONSUMER.INFO.KV_registry.>"
          "\$JS.API.CONSUMER.DELETE.KV_registry.>"
          "\$JS.FC.KV_registry.>"
        ]
        subscribe: ["_INBOX.>"]
      }
    }
    {
      user: coordinator
      password: "$(password nats_coordinator_credentials)"
      permissions {
        publish: [
          "\$KV.registry.*"
          "\$JS.API.INFO"
          "\$JS.API.STREAM.CREATE.KV_registry"
          "\$JS.API.STREAM.INFO.KV_registry"
          "\$JS.API.CONSUMER.CREATE.KV_registry"
          "\$JS.API.CONSUMER.CREATE.KV_registry.>"
          "\$JS.API.CONSUMER.INFO.KV_registry.>"
          "\$JS.API.CONSUMER.DELETE.KV_registry.>"
          "\$JS.FC.KV_registry.>"
          "run.*.events"
          "\$JS.API.STREAM.CREATE.runs"
          "\$JS.API.STREAM.INFO.runs"
          "\$JS.API.STREAM.DELETE.runs"
          "\$JS.API.CONSUMER.CREATE.runs"
          "\$JS.API.CONSUMER.CREATE.runs.>"
          "\$JS.API.CONSUMER.INFO.runs.>"
          "\$JS.API.CONSUMER.DELETE.runs.>"
          "\$JS.FC.runs.>"
        ]
        subscribe: ["_INBOX.>"]
      }
    }
  ]
}
jetstream {
  store_dir: "/var/lib/flotilla/jetstream"
  sync_interval: always
  max_file_store: 1GB
}
END
[ "$(id -u)" != 0 ] || chown -R "$user:$group" "$folder"

if [ $# = 0 ] && [ ! -e "$here/.env" ]; then
    {
        echo "COMPOSE_PROJECT_NAME=flotilla"
        echo "FLOTILLA_TAG=$(cut -d + -f 1 "$here/../../VERSION")"
        echo "FLOTILLA_UID=$user"
        echo "FLOTILLA_GID=$group"
    } >"$here/.env"
fi
echo "secrets are in $folder, for user $user"
