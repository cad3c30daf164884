{{/* Names, labels and images. Every helper takes a dict with `root`, and `component` where it is about one. */}}

{{/* The names of the kinds of services as JSON: all, or those that are as `which` says (scales, loadsModel). */}}
{{- define "flotilla.kinds" -}}
{{- $names := list -}}
{{- range $kind := .root.Files.Get "kinds.json" | fromJsonArray -}}
{{- if or (not $.which) (index $kind $.which) }}{{- $names = append $names $kind.name -}}{{- end -}}
{{- end -}}
{{- $names | toJson -}}
{{- end -}}

{{- define "flotilla.fullname" -}}
{{- $name := .root.Release.Name -}}
{{- if not (contains "flotilla" $name) -}}{{- $name = printf "%s-flotilla" $name -}}{{- end -}}
{{- $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "flotilla.selector" -}}
app.kubernetes.io/name: flotilla
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end -}}

{{- define "flotilla.labels" -}}
{{ include "flotilla.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "flotilla.metadata" -}}
name: {{ include "flotilla.fullname" . }}{{ with .suffix }}-{{ . }}{{ end }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "flotilla.labels" . | nindent 2 }}
{{- end -}}

{{- define "flotilla.image" -}}
{{- $image := index .root.Values.images .component | default dict -}}
{{- with .root.Values.image.registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{- $image.repository | default (printf "flotilla-%s" .component) -}}
{{- $flavour := ternary "-gpu" "" (and .root.Values.gpu.enabled (has .component (include "flotilla.kinds" (dict "root" .root "which" "loadsModel") | fromJsonArray))) -}}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $image.tag | default (printf "%s%s" .root.Chart.AppVersion $flavour) }}{{ end -}}
{{- end -}}

{{- define "flotilla.coordinatorHost" -}}
{{ include "flotilla.fullname" . }}-coordinator.{{ .root.Release.Namespace }}.svc
{{- end -}}

{{- define "flotilla.natsHost" -}}
{{ include "flotilla.fullname" . }}-nats.{{ .root.Release.Namespace }}.svc
{{- end -}}

{{- define "flotilla.secretName" -}}
{{ .root.Values.auth.existingSecret | default (printf "%s-auth" (include "flotilla.fullname" .)) }}
{{- end -}}

{{/* The Secret with a credential in three keys; empty where it is one key of the Secret of `auth`. */}}
{{- define "flotilla.tlsSecretName" -}}
{{ .root.Values.tls.existingSecret | default (ternary (printf "%s-tls" (include "flotilla.fullname" .)) "" .root.Values.tls.certManager.enabled) }}
{{- end -}}

{{- define "flotilla.runsClaim" -}}
{{ .root.Values.storage.runs.existingClaim | default (printf "%s-runs" (include "flotilla.fullname" .)) }}
{{- end -}}

{{- define "flotilla.priorityClassName" -}}
{{- $own := ternary (include "flotilla.fullname" .) "" (and .root.Values.priorityClass.create (has .component (list "coordinator" "trainer" "nats"))) -}}
{{ (index .root.Values .component | default dict).priorityClassName | default $own }}
{{- end -}}
