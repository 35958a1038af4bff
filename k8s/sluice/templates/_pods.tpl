{{/* `python -m tests.k8s.refresh` writes files/ray-env.json from deployments/process/environment.py. Streams have drainSeconds. */}}
{{- define "sluice.env" -}}
{{- range $name, $value := .Files.Get "files/ray-env.json" | fromJson }}
- {name: {{ $name }}, value: {{ ternary ($.Values.drainSeconds | int | toString) $value (eq $name "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S") | quote }}}
{{- end }}
- {name: RAY_SERVE_HAPROXY_BINARY_PATH, value: /etc/sluice/scripts/haproxy.sh}
{{- if not .Values.auth.rayToken }}
- {name: RAY_AUTH_MODE, value: disabled}
{{- end }}
- {name: SLUICE_LOG_LEVEL, value: {{ .Values.logLevel }}}
- {name: VLLM_LOGGING_LEVEL, value: {{ .Values.logLevel }}}
- {name: HF_HOME, value: {{ .Values.modelCache.mountPath | quote }}}
{{- if and .Values.modelCache.enabled .Values.modelCache.compileCache }}
- {name: VLLM_CACHE_ROOT, value: "{{ .Values.modelCache.mountPath | trimSuffix "/" }}/vllm"}
{{- end }}
{{- include "sluice.hubEnv" . }}
{{- if ne .Values.redis.mode "none" }}
{{- include "sluice.redisEnv" . }}
{{- end }}
{{- end -}}

{{- define "sluice.hubEnv" -}}
{{- with include "sluice.hubSecret" . }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: {{ ternary $.Values.huggingface.key "token" (ne $.Values.huggingface.existingSecret "") | quote }}}}
{{- end }}
{{- end -}}

{{- define "sluice.redisEnv" -}}
{{- $user := "" -}}
{{- with include "sluice.redisSecret" . }}
- name: SLUICE_REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: {{ include "sluice.redisSecretKey" $ | quote }}}}
{{- $user = printf "%s:$(SLUICE_REDIS_PASSWORD)@" $.Values.redis.auth.username }}
{{- end }}
- name: SLUICE_REDIS_URL
  value: {{ printf "%s://%s%s:%s/%d" (include "sluice.redisScheme" .) $user (include "sluice.redisHost" .) (include "sluice.redisPort" .) (.Values.redis.database | int) | quote }}
{{- if .Values.redis.tls.enabled }}
- {name: RAY_REDIS_CA_CERT, value: {{ include "sluice.redisCa" . }}}
{{- end }}
{{- end -}}

{{- define "sluice.volumes" -}}
- name: dshm
  emptyDir: {medium: Memory, sizeLimit: {{ .pod.shmSize | default "2Gi" | quote }}}
# KubeRay's name for it, so that it adds none of its own; further containers read it.
- name: ray-logs
  emptyDir: {}
- name: scripts
  configMap: {name: {{ include "sluice.fullname" .root }}-scripts, defaultMode: 0555}
- name: models
{{- if .root.Values.modelCache.enabled }}
  persistentVolumeClaim: {claimName: {{ include "sluice.modelClaim" .root | quote }}}
{{- else }}
  emptyDir: {}
{{- end }}
{{- if .runsRouters }}
{{- if .root.Values.batches.volume.enabled }}
- name: batches
  persistentVolumeClaim: {claimName: {{ include "sluice.batchesClaim" .root | quote }}}
{{- end }}
{{- with include "sluice.apiKeysSecret" .root }}
- name: api-keys
  secret:
    secretName: {{ . | quote }}
    items: [{key: {{ ternary $.root.Values.auth.apiKeys.key "keys.yaml" (ne $.root.Values.auth.apiKeys.existingSecret "") | quote }}, path: keys.yaml}]
{{- end }}
{{- end }}
{{- if and (ne .root.Values.redis.mode "none") .root.Values.redis.tls.enabled .root.Values.redis.tls.existingSecret }}
- name: redis-ca
  secret:
    secretName: {{ .root.Values.redis.tls.existingSecret | quote }}
    items: [{key: ca.crt, path: ca.crt}]
{{- end }}
{{- with concat .root.Values.extraVolumes (.pod.extraVolumes | default list) }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "sluice.mounts" -}}
- {name: dshm, mountPath: /dev/shm}
- {name: ray-logs, mountPath: /tmp/ray}
- {name: scripts, mountPath: /etc/sluice/scripts, readOnly: true}
- {name: models, mountPath: {{ .root.Values.modelCache.mountPath | quote }}}
{{- if and .runsRouters .root.Values.batches.volume.enabled }}
- {name: batches, mountPath: {{ .root.Values.batches.volume.mountPath | quote }}}
{{- end }}
{{- if and .runsRouters (include "sluice.apiKeysSecret" .root) }}
- {name: api-keys, mountPath: /etc/sluice/keys, readOnly: true}
{{- end }}
{{- if and (ne .root.Values.redis.mode "none") .root.Values.redis.tls.enabled .root.Values.redis.tls.existingSecret }}
- {name: redis-ca, mountPath: /etc/sluice/redis-ca, readOnly: true}
{{- end }}
{{- with concat .root.Values.extraVolumeMounts (.pod.extraVolumeMounts | default list) }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Requests and limits with the GPUs, which must stand in both. `set` on a copy: `merge` would change what it is given. */}}
{{- define "sluice.resources" -}}
{{- $resources := deepCopy (.pod.resources | default dict) -}}
{{- if .gpus -}}
{{- $name := .pod.gpuResourceName | default "nvidia.com/gpu" -}}
{{- range $part := list "requests" "limits" -}}
{{- $_ := set $resources $part (set (index $resources $part | default dict) $name ($.gpus | toString)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/*
A pod template. With .root, .pod (the group's values), .component, .runsRouters, .gpus and .drains.
Nothing in it may follow from the chart's version: KubeRay would start a second cluster.
*/}}
{{- define "sluice.podTemplate" -}}
{{- $root := .root -}}
{{- $pod := .pod -}}
metadata:
  labels:
    {{- include "sluice.selectorLabels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .component | quote }}
    {{- with $pod.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $pod.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- with $root.Values.serviceAccountName }}
  serviceAccountName: {{ . | quote }}
  {{- end }}
  automountServiceAccountToken: {{ and (eq .component "head") $root.Values.autoscaler.enabled }}
  {{- with $root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- toYaml $root.Values.podSecurityContext | nindent 4 }}
  {{- if .drains }}
  terminationGracePeriodSeconds: {{ add (int $root.Values.drainSeconds) 60 }}
  {{- else }}
  terminationGracePeriodSeconds: {{ $root.Values.head.terminationGracePeriodSeconds | int }}
  {{- end }}
  {{- range $field := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" "runtimeClassName" "initContainers" }}
  {{- with index $pod $field }}
  {{ $field }}:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  containers:
    - name: ray
      image: {{ include "sluice.image" (dict "root" $root "image" $root.Values.image) | quote }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      securityContext:
        {{- toYaml $root.Values.containerSecurityContext | nindent 8 }}
      resources:
        {{- include "sluice.resources" . | nindent 8 }}
      ports:
        {{- if eq .component "head" }}
        - {name: gcs, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        - {name: client, containerPort: 10001}
        - {name: as-metrics, containerPort: 44217}
        - {name: dash-metrics, containerPort: 44227}
        {{- end }}
        - {name: serve, containerPort: 8000}
        - {name: metrics, containerPort: 8080}
      env:
        {{- include "sluice.env" $root | nindent 8 }}
        {{- with concat $root.Values.extraEnv ($pod.extraEnv | default list) }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- $batchesSecret := ternary $root.Values.batches.existingSecret "" .runsRouters }}
      {{- if or $root.Values.extraEnvFrom $batchesSecret }}
      envFrom:
        {{- with $root.Values.extraEnvFrom }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- with $batchesSecret }}
        - secretRef: {name: {{ . | quote }}}
        {{- end }}
      {{- end }}
      volumeMounts:
        {{- include "sluice.mounts" . | nindent 8 }}
      {{- if .drains }}
      lifecycle:
        preStop:
          exec:
            command: [python, /etc/sluice/scripts/drain.py, {{ $root.Values.drainSeconds | int | quote }}]
      {{- end }}
    {{- with concat $root.Values.extraContainers ($pod.extraContainers | default list) }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "sluice.volumes" . | nindent 4 }}
{{- end -}}

{{/* With .root and .pod: how many pods a group has. */}}
{{- define "sluice.replicas" -}}
{{- $count := .pod.replicas | int -}}
{{- if .root.Values.autoscaler.enabled -}}
{{- $least := hasKey .pod "minReplicas" | ternary .pod.minReplicas $count | int -}}
replicas: {{ max $least (min $count (hasKey .pod "maxReplicas" | ternary .pod.maxReplicas $count | int)) }}
minReplicas: {{ $least }}
maxReplicas: {{ hasKey .pod "maxReplicas" | ternary .pod.maxReplicas $count | int }}
{{- with .pod.idleTimeoutSeconds }}
idleTimeoutSeconds: {{ . | int }}
{{- end }}
{{- else -}}
replicas: {{ $count }}
minReplicas: {{ $count }}
maxReplicas: {{ $count }}
{{- end -}}
{{- end -}}
