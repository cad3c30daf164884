{{/*
The parts that all pods share. Takes root, component (a section of the values, which may be absent) and, for services,
args.
*/}}

{{- define "flotilla.podAnnotations" -}}
checksum/stack: {{ include "flotilla.stackThatPodsKeep" . | sha256sum }}
checksum/functions: {{ .root.Values.functions | toJson | sha256sum }}
checksum/secrets: {{ .root.Values.auth | toJson | sha256sum }}
{{- with (index .root.Values .component | default dict).podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "flotilla.placement" -}}
serviceAccountName: {{ include "flotilla.fullname" . }}-{{ .component }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "flotilla.priorityClassName" . }}
priorityClassName: {{ . }}
{{- end }}
{{- $section := index .root.Values .component | default dict }}
terminationGracePeriodSeconds: {{ add (int (dig "drainSeconds" .root.Values.otherServices.drainSeconds $section)) 15 }}
{{- with $section.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $section.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $section.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $section.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if and .root.Values.gpu.enabled .root.Values.gpu.runtimeClassName (has .component (include "flotilla.kinds" (dict "root" .root "which" "loadsModel") | fromJsonArray)) }}
runtimeClassName: {{ .root.Values.gpu.runtimeClassName }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
  {{- if .sendsWeights }}
  sysctls:
    # The ports of a weight sync, so that a NetworkPolicy can name them.
    - name: net.ipv4.ip_local_port_range
      value: {{ printf "%d %d" (int .root.Values.networkPolicy.weightPorts.from) (int .root.Values.networkPolicy.weightPorts.to) | quote }}
  {{- end }}
{{- end -}}

{{- define "flotilla.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{/* A kubelet has no certificate to ask for health by gRPC, so the container asks itself. */}}
{{- define "flotilla.probe" -}}
exec: {command: [python, /opt/image/health.py]}
{{- end -}}

{{- define "flotilla.probes" -}}
startupProbe:
  {{- include "flotilla.probe" . | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ div (add (int (dig "ready_timeout_s" 180 .root.Values.stack)) 4) 5 }}
readinessProbe:
  {{- include "flotilla.probe" . | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
livenessProbe:
  {{- include "flotilla.probe" . | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end -}}

{{- define "flotilla.resources" -}}
{{- $resources := deepCopy ((index .root.Values .component | default dict).resources | default .root.Values.otherServices.resources) -}}
{{- if and .gpus .root.Values.gpu.enabled -}}
{{- $_ := set $resources "limits" (merge (dict .root.Values.gpu.resource (int .gpus)) ($resources.limits | default dict)) -}}
{{- end -}}
resources:
  {{- toYaml $resources | nindent 2 }}
{{- end -}}

{{/*
The container of a service. `name` is its slot, `advertise` the host that peers dial (by default the address of its
pod), `spans` where spans go, `loads` whether it reads the model, `keeps` whether it reads and writes run directories.
*/}}
{{- define "flotilla.container" -}}
{{- $section := index .root.Values .component | default dict -}}
- name: {{ .component }}
  image: {{ include "flotilla.image" . | quote }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [flotilla-{{ .component }}]
  args:
    - --name={{ .name }}
    - --stack=/etc/flotilla/config/stack.yaml
    - --advertise-host={{ .advertise | default "$(POD_IP)" }}
    - --otlp=https://{{ .spans }}:{{ include "flotilla.port" . }}
    - --drain-grace={{ int (dig "drainSeconds" .root.Values.otherServices.drainSeconds $section) }}
  env:
    - name: POD_NAME
      valueFrom: {fieldRef: {fieldPath: metadata.name}}
    - name: POD_IP
      valueFrom: {fieldRef: {fieldPath: status.podIP}}
    {{- if .indexed }}
    - name: POD_INDEX
      valueFrom: {fieldRef: {fieldPath: "metadata.labels['apps.kubernetes.io/pod-index']"}}
    {{- end }}
    # For the `flotilla` command and the health check in this container.
    - name: FLOTILLA_STACK
      value: /etc/flotilla/config/stack.yaml
    - name: FLOTILLA_PORT
      value: {{ include "flotilla.port" . | quote }}
    # Whatever a library keeps for later goes to a volume: the root is read-only.
    - name: HOME
      value: /cache
    - name: XDG_CACHE_HOME
      value: /cache
    {{- with $section.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    - name: grpc
      containerPort: {{ include "flotilla.port" . }}
  {{- include "flotilla.probes" . | nindent 2 }}
  {{- include "flotilla.containerSecurity" . | nindent 2 }}
  {{- include "flotilla.resources" . | nindent 2 }}
  volumeMounts:
    - {name: config, mountPath: /etc/flotilla/config, readOnly: true}
    - {name: secrets, mountPath: /etc/flotilla/secrets, readOnly: true}
    - {name: credential, mountPath: /etc/flotilla/credential, readOnly: true}
    {{- if and .root.Values.functions (ne .component "generator") }}
    - {name: functions, mountPath: /etc/flotilla/functions, readOnly: true}
    {{- end }}
    - {name: state, mountPath: {{ include "flotilla.stateFolder" . }}}
    {{- if .keeps }}
    - {name: runs, mountPath: {{ include "flotilla.stateFolder" . }}/runs}
    {{- end }}
    {{- if and .loads .root.Values.model.volume }}
    - {name: models, mountPath: /models, readOnly: true}
    {{- end }}
    {{- if and (eq .component "coordinator") .root.Values.data.volume }}
    - {name: data, mountPath: /data, readOnly: true}
    {{- end }}
    {{- if $section.sharedMemory }}
    - {name: shm, mountPath: /dev/shm}
    {{- end }}
    - {name: cache, mountPath: /cache}
    - {name: tmp, mountPath: /tmp}
{{- end -}}

{{- define "flotilla.stateFolder" -}}
{{ .root.Values.stack.state_dir | default "/var/lib/flotilla" }}/{{ .root.Values.stack.name | default "local" }}
{{- end -}}

{{/* What makes replicas that are all alike. Without `replicas`, others scale. */}}
{{- define "flotilla.replicated" -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  {{- include "flotilla.metadata" . | nindent 2 }}
spec:
  {{- if hasKey . "replicas" }}
  replicas: {{ .replicas }}
  {{- end }}
  # One by one, under running runs, and never more GPUs than there are.
  strategy:
    type: RollingUpdate
    rollingUpdate: {maxUnavailable: 1, maxSurge: 0}
  progressDeadlineSeconds: {{ add (int (dig "ready_timeout_s" 180 .root.Values.stack)) 600 }}
  selector:
    matchLabels:
      {{- include "flotilla.selector" . | nindent 6 }}
  template:
    metadata:
      labels:
        {{- include "flotilla.labels" . | nindent 8 }}
      annotations:
        {{- include "flotilla.podAnnotations" . | nindent 8 }}
    spec:
      {{- include "flotilla.placement" . | nindent 6 }}
      containers:
        {{- include "flotilla.container" . | nindent 8 }}
      volumes:
        {{- include "flotilla.volumes" . | nindent 8 }}
{{- end -}}

{{/* The volumes of a service; the coordinator's state is a claim of its StatefulSet. */}}
{{- define "flotilla.volumes" -}}
{{- $section := index .root.Values .component | default dict -}}
- name: config
  configMap: {name: {{ include "flotilla.fullname" . }}-stack}
- name: secrets
  secret:
    secretName: {{ include "flotilla.secretName" . }}
    defaultMode: 0440
    items:
      # Of the user that may also write the events of runs.
      - {key: {{ ternary "nats-coordinator-credentials" "nats-credentials" (eq .component "coordinator") }}, path: nats-credentials}
{{- $three := include "flotilla.tlsSecretName" . }}
- name: credential
  secret:
    secretName: {{ $three | default (include "flotilla.secretName" .) }}
    defaultMode: 0440
    items:
      {{- range $file := ternary (list "credential.pem") (list "tls.crt" "tls.key" "ca.crt") (empty $three) }}
      - {key: {{ $file }}, path: {{ $file }}}
      {{- end }}
{{- if and .root.Values.functions (ne .component "generator") }}
- name: functions
  configMap: {name: {{ include "flotilla.fullname" . }}-functions}
{{- end }}
{{- if ne .component "coordinator" }}
- name: state
  # What the service fetches from the coordinator lies there, up to file_cache_gib.
  emptyDir: {sizeLimit: {{ add1 (int (dig "file_cache_gib" 256 .root.Values.stack)) }}Gi}
{{- end }}
{{- if .keeps }}
- name: runs
  persistentVolumeClaim: {claimName: {{ include "flotilla.runsClaim" . }}}
{{- end }}
{{- if and .loads .root.Values.model.volume }}
- name: models
  {{- toYaml .root.Values.model.volume | nindent 2 }}
{{- end }}
{{- if and (eq .component "coordinator") .root.Values.data.volume }}
- name: data
  {{- toYaml .root.Values.data.volume | nindent 2 }}
{{- end }}
{{- if $section.sharedMemory }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ $section.sharedMemory }}}
{{- end }}
- name: cache
  emptyDir: {sizeLimit: {{ $section.cache | default "2Gi" }}}
- name: tmp
  emptyDir: {sizeLimit: 2Gi}
{{- end -}}
