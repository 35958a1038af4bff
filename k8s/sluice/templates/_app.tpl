{{/* AppConfig: the user's, and what only the chart knows. JSON, for YAML would write large whole numbers as 1e+07. */}}
{{- define "sluice.appArgs" -}}
{{- $args := deepCopy .Values.app -}}
{{- if not (hasKey $args "name") -}}
{{- $_ := set $args "name" (include "sluice.fullname" .) -}}
{{- end -}}
{{- $place := dict "num_gpus" .Values.gpusPerEngine "num_cpus" 0 "resources" (dict "sluice_engine" 1) -}}
{{- $apart := include "sluice.prefillPods" . | eq "true" -}}
{{- range $model := prepend ($args.more_models | default list) $args -}}
{{- $_ := set $model "engine" (merge (deepCopy $place) ($model.engine | default dict)) -}}
{{- if and $apart $model.engine.prefill -}}
{{- $_ := set $model.engine "prefill" (merge (dict "resources" (dict "sluice_prefill" 1)) $model.engine.prefill) -}}
{{- end -}}
{{- end -}}
{{- if include "sluice.apiKeysSecret" . -}}
{{- $_ := set $args "keys" (merge (dict "file" "/etc/sluice/keys/keys.yaml") ($args.keys | default dict)) -}}
{{- end -}}
{{- if and (ne .Values.redis.mode "none") .Values.redis.tls.enabled -}}
{{- $_ := set $args "redis_ca_certs" (include "sluice.redisCa" .) -}}
{{- end -}}
{{- toJson $args -}}
{{- end -}}

{{- define "sluice.serveConfig" -}}
{{- $application := dict "name" "sluice" "route_prefix" "/" "import_path" "deployments.app:build" -}}
{{- $_ := set $application "args" (include "sluice.appArgs" . | fromJson) -}}
{{- $http := dict "host" "0.0.0.0" "port" 8000 -}}
{{- dict "proxy_location" "EveryNode" "http_options" $http "applications" (list $application) | toPrettyJson -}}
{{- end -}}

{{/* Whether some pods are for replicas that only prefill. */}}
{{- define "sluice.prefillPods" -}}
{{- $found := false -}}
{{- range $group := .Values.engineGroups -}}
{{- $found = or $found (eq ($group.role | default "") "prefill") -}}
{{- end -}}
{{- $found -}}
{{- end -}}
