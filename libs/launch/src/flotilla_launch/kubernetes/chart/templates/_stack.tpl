{{/*
The stack file of all services: .Values.stack, and below it what follows from the release.
A key of .Values.stack wins over the one that the chart would write.
*/}}
{{- define "flotilla.stack" -}}
{{- $bind := dict "credential_file" (ternary "/etc/flotilla/credential/credential.pem" "/etc/flotilla/credential" (empty (include "flotilla.tlsSecretName" .))) -}}
{{- /* Kubernetes moves a coordinator without its users having stopped anything. */ -}}
{{- $ours := dict "placement" "separate" "bind" $bind "coordinator" (dict "keep_runs" true) -}}
{{- if .root.Values.nats.enabled -}}
{{- $replicas := ternary 3 1 (ge (int .root.Values.nats.replicas) 3) -}}
{{- $_ := set $ours "nats" (dict "url" (printf "nats://%s:4222" (include "flotilla.natsHost" .)) "credentials_file" "/etc/flotilla/secrets/nats-credentials" "replicas" $replicas) -}}
{{- end -}}
{{- merge (deepCopy .root.Values.stack) $ours | toYaml -}}
{{- end -}}

{{- define "flotilla.port" -}}{{ int .root.Values.stack.bind.port }}{{- end -}}

{{/* Gangs as JSON: {role: {replicas, nproc}}, the policy's first, of those that the stack has. */}}
{{- define "flotilla.gangs" -}}
{{- $stack := .root.Values.stack -}}
{{- $gangs := dict "trainer" (dict "replicas" (dig "trainer" "replicas" 1 $stack) "nproc" (dig "trainer" "nproc" 1 $stack)) -}}
{{- range $role := list "critic" "reference" "teacher" -}}
{{- $_ := set $gangs $role (dict "replicas" (dig $role "replicas" 0 $stack) "nproc" (dig $role "nproc" 1 $stack)) -}}
{{- end -}}
{{- range $name, $gang := (dig "teachers" (dict) $stack) -}}
{{- $_ := set $gangs (printf "teacher-%s" $name) (dict "replicas" (dig "replicas" 0 $gang) "nproc" (dig "nproc" 1 $gang)) -}}
{{- end -}}
{{- range $name, $gang := (dig "reward_models" (dict) $stack) -}}
{{- $_ := set $gangs (printf "reward_model-%s" $name) (dict "replicas" (dig "replicas" 1 $gang) "nproc" (dig "nproc" 1 $gang)) -}}
{{- end -}}
{{- range $role, $gang := $gangs -}}
{{- if not (int $gang.replicas) }}{{- $_ := unset $gangs $role -}}{{- end -}}
{{- end -}}
{{- $gangs | toJson -}}
{{- end -}}

{{/* What no schema can say. It is included by the ConfigMap, so nothing renders that it refuses. */}}
{{- define "flotilla.checks" -}}
{{- $values := .root.Values -}}
{{- $stack := $values.stack -}}
{{- if has $stack.bind.host (list "127.0.0.1" "localhost" "::1") -}}
{{- fail (printf "stack.bind.host is %s: services of other pods cannot dial it; set it to 0.0.0.0" $stack.bind.host) -}}
{{- end -}}
{{- if not $stack.bind.port -}}
{{- fail "stack.bind.port is 0: Services, probes and policies need a number; 7070 is usual" -}}
{{- end -}}
{{- if eq (dig "placement" "auto" $stack) "colocated" -}}
{{- fail "stack.placement is colocated: a GPU cannot be shared between pods; set it to separate" -}}
{{- end -}}
{{- if eq (dig "autoscale" "mode" "advise" $stack) "act" -}}
{{- fail "stack.autoscale.mode is act: there is no launcher here that could; set it to advise, and generator.autoscaling.kind" -}}
{{- end -}}
{{- if and $values.tls.certManager.enabled (not $values.tls.certManager.issuer.name) -}}
{{- fail "tls.certManager.issuer.name is empty: name the issuer of your certificates" -}}
{{- end -}}
{{- if and (not $values.nats.enabled) (not (dig "nats" "url" "" $stack)) -}}
{{- fail "nats.enabled is false: name your server in stack.nats.url and stack.nats.credentials_file" -}}
{{- end -}}
{{- if and (eq $values.generator.autoscaling.kind "keda") (not $values.generator.autoscaling.keda.triggers) -}}
{{- fail "generator.autoscaling.kind is keda: name at least one of generator.autoscaling.keda.triggers" -}}
{{- end -}}
{{- if not (or $values.auth.existingSecret (and $values.auth.natsPassword $values.auth.natsCoordinatorPassword $values.auth.natsRoutePassword)) -}}
{{- fail "no secrets: name a Secret in auth.existingSecret, or give auth.natsPassword, auth.natsCoordinatorPassword and auth.natsRoutePassword" -}}
{{- end -}}
{{- if not (or (include "flotilla.tlsSecretName" .) $values.auth.existingSecret $values.auth.credential) -}}
{{- fail "no credential: give auth.credential, or name a Secret in auth.existingSecret or tls.existingSecret, or set tls.certManager" -}}
{{- end -}}
{{- range $word := list $values.auth.natsPassword $values.auth.natsCoordinatorPassword $values.auth.natsRoutePassword -}}
{{- if and $word (not (regexMatch "^[A-Za-z0-9_-]{32,}$" $word)) -}}
{{- fail "auth.natsPassword, auth.natsCoordinatorPassword and auth.natsRoutePassword are words of at least 32 letters, digits, _ and -: openssl rand -hex 32" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The stack file without the numbers of replicas that scale: another one of these replaces no pod. */}}
{{- define "flotilla.stackThatPodsKeep" -}}
{{- $stack := include "flotilla.stack" . | fromYaml -}}
{{- range $kind := include "flotilla.kinds" (dict "root" .root "which" "scales") | fromJsonArray -}}
{{- with index $stack $kind -}}{{- $_ := unset . "replicas" -}}{{- end -}}
{{- end -}}
{{- $stack | toYaml -}}
{{- end -}}
