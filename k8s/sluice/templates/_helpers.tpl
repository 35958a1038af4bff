{{- define "sluice.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride }}
{{- else if contains .Chart.Name .Release.Name -}}
{{ .Release.Name }}
{{- else -}}
{{ printf "%s-%s" .Release.Name .Chart.Name }}
{{- end -}}
{{- end -}}

{{/* What selects pods: never a version, for pods keep it. */}}
{{- define "sluice.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{/* For objects, not for pods. */}}
{{- define "sluice.labels" -}}
{{- $labels := include "sluice.selectorLabels" . | fromYaml -}}
{{- $_ := set $labels "app.kubernetes.io/version" .Chart.AppVersion -}}
{{- $_ := set $labels "app.kubernetes.io/managed-by" .Release.Service -}}
{{- $_ := set $labels "helm.sh/chart" (printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_") -}}
{{- range $name, $value := .Values.commonLabels -}}
{{- $_ := set $labels $name $value -}}
{{- end -}}
{{- toYaml $labels -}}
{{- end -}}

{{/* With .root and .name, a name of ours with a suffix, and .labels if there are more: one of each name, for those of values may meet. */}}
{{- define "sluice.metadata" -}}
name: {{ .name | quote }}
namespace: {{ .root.Release.Namespace | quote }}
{{- $labels := include "sluice.labels" .root | fromYaml }}
{{- range $name, $value := .labels }}
{{- $_ := set $labels $name $value }}
{{- end }}
labels:
  {{- toYaml $labels | nindent 2 }}
{{- end -}}

{{/* With .root and .image. Without a tag of its own it is Sluice's, which has a build for CPUs and one for GPUs. */}}
{{- define "sluice.image" -}}
{{- $image := .image -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{- $build := ternary "gpu" "cpu" (gt (int .root.Values.gpusPerEngine) 0) -}}
{{ $image.repository }}:{{ $image.tag | default (printf "%s-%s" .root.Chart.AppVersion $build) }}
{{- end -}}
{{- end -}}

{{/* The service that KubeRay makes, except for NewClusterWithIncrementalUpgrade. */}}
{{- define "sluice.serveService" -}}
{{ include "sluice.fullname" . }}-serve-svc
{{- end -}}

{{/* The Gateway that KubeRay makes for NewClusterWithIncrementalUpgrade, on port 80. */}}
{{- define "sluice.gateway" -}}
{{ include "sluice.fullname" . }}-gateway
{{- end -}}

{{- define "sluice.redisHost" -}}
{{- if eq .Values.redis.mode "internal" -}}
{{ include "sluice.fullname" . }}-redis
{{- else -}}
{{ .Values.redis.external.host }}
{{- end -}}
{{- end -}}

{{- define "sluice.redisPort" -}}
{{- if eq .Values.redis.mode "internal" -}}6379{{- else -}}{{ .Values.redis.external.port | int }}{{- end -}}
{{- end -}}

{{/* Of servers that run already, of all models: a list of ports in YAML, empty without any. */}}
{{- define "sluice.serverPorts" -}}
{{- $ports := list -}}
{{- range $model := prepend (.Values.app.more_models | default list) .Values.app -}}
{{- range $url := dig "engine" "openai" "urls" list $model -}}
{{- $parts := urlParse $url -}}
{{- $port := regexFind ":[0-9]+$" $parts.host | trimPrefix ":" | default (ternary "443" "80" (eq $parts.scheme "https")) -}}
{{- $ports = append $ports (dict "port" (int $port)) -}}
{{- end -}}
{{- end -}}
{{- if $ports -}}{{- $ports | uniq | toYaml -}}{{- end -}}
{{- end -}}

{{- define "sluice.redisScheme" -}}
{{ ternary "rediss" "redis" .Values.redis.tls.enabled }}
{{- end -}}

{{/* Empty where Redis has no password. */}}
{{- define "sluice.redisSecret" -}}
{{- $redis := .Values.redis -}}
{{- if $redis.auth.existingSecret -}}
{{ $redis.auth.existingSecret }}
{{- else if or (eq $redis.mode "internal") $redis.auth.password -}}
{{ include "sluice.fullname" . }}-redis
{{- end -}}
{{- end -}}

{{- define "sluice.redisSecretKey" -}}
{{ ternary .Values.redis.auth.key "password" (ne .Values.redis.auth.existingSecret "") }}
{{- end -}}

{{- define "sluice.redisCa" -}}
{{ ternary "/etc/sluice/redis-ca/ca.crt" "/etc/ssl/certs/ca-certificates.crt" (ne .Values.redis.tls.existingSecret "") }}
{{- end -}}

{{- define "sluice.apiKeysSecret" -}}
{{- $keys := .Values.auth.apiKeys -}}
{{- if $keys.existingSecret -}}
{{ $keys.existingSecret }}
{{- else if $keys.entries -}}
{{ include "sluice.fullname" . }}-api-keys
{{- end -}}
{{- end -}}

{{- define "sluice.hubSecret" -}}
{{- $hub := .Values.huggingface -}}
{{- if $hub.existingSecret -}}
{{ $hub.existingSecret }}
{{- else if $hub.token -}}
{{ include "sluice.fullname" . }}-hub
{{- end -}}
{{- end -}}

{{/* A claim that stays. With .root, .name and .volume (accessModes, storageClass and size). */}}
{{- define "sluice.claim" -}}
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  {{- include "sluice.metadata" . | nindent 2 }}
  annotations:
    # What is in it outlives the release: delete the claim yourself.
    helm.sh/resource-policy: keep
spec:
  accessModes:
    {{- toYaml .volume.accessModes | nindent 4 }}
  {{- with .volume.storageClass }}
  storageClassName: {{ . | quote }}
  {{- end }}
  resources: {requests: {storage: {{ .volume.size | quote }}}}
{{- end -}}

{{- define "sluice.batchesClaim" -}}
{{ .Values.batches.volume.existingClaim | default (printf "%s-batches" (include "sluice.fullname" .)) }}
{{- end -}}

{{/* Empty where there is no Batch API. */}}
{{- define "sluice.batchesFolder" -}}
{{- $batches := .Values.batches -}}
{{- if $batches.volume.enabled -}}
{{ $batches.volume.mountPath }}
{{- else -}}
{{ $batches.url | default (dig "batches" "folder" "" .Values.app | default "") }}
{{- end -}}
{{- end -}}

{{- define "sluice.modelClaim" -}}
{{ .Values.modelCache.existingClaim | default (printf "%s-models" (include "sluice.fullname" .)) }}
{{- end -}}
