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

# By authority.pem, which no container gets, flotilla token create makes credentials for people (README.md).
make_credential() {
    made=$(mktemp -d)
    trap 'rm -r "$made"' EXIT
    cat >"$made/conf" <<END
[req]
distinguished_name = name
[name]
[authority]
basicConstraints = critical, CA:TRUE
subjectKeyIdentifier = hash
[service]
basicConstraints = critical, CA:FALSE
subjectAltName = DNS:service.flotilla
extendedKeyUsage = serverAuth, clientAuth
END
    for one in authority service; do
        openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$made/$one.key"
    done
    openssl req -x509 -config "$made/conf" -extensions authority -key "$made/authority.key" -days 3650 \
        -subj "/CN=Flotilla compose $(word | cut -c -6)" -out "$made/authority.crt"
    openssl req -new -config "$made/conf" -key "$made/service.key" -subj /CN=service |
        openssl x509 -req -extfile "$made/conf" -extensions service -days 3650 -out "$made/service.crt" \
            -CA "$made/authority.crt" -CAkey "$made/authority.key" -CAcreateserial
    cat "$made/authority.crt" "$made/authority.key" >"$folder/authority.pem"
    cat "$made/service.crt" "$made/service.key" "$made/authority.crt" >"$folder/credential"
}
[ -s "$folder/credential" ] || make_credential
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
