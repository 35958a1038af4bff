{{/* AppConfig: the user's, and what only the chart knows. JSON, for YAML would write large whole numbers as 1e+07. */}}
{{- define "sluice.appArgs" -}}
{{- $args := deepCopy .Values.app -}}
{{- if not (hasKey $args "name") -}}
{{- $_ := set $args "name" (include "sluice.fullname" .) -}}
{{- end -}}
{{- $apart := include "sluice.prefillPods" . | eq "true" -}}
{{- range $model := prepend ($args.more_models | default list) $args -}}
{{- $engine := $model.engine | default dict -}}
{{- $_ := set $engine "num_gpus" ($.Values.gpusPerEngine | int) -}}
{{- $_ := set $engine "num_cpus" 0 -}}
{{- $_ := set $engine "resources" (dict "sluice_engine" 1) -}}
{{- if gt (int $.Values.nodesPerEngine) 1 -}}
{{- $_ := set $engine "placement_group_bundles" (include "sluice.bundles" $ | fromJsonArray) -}}
{{- end -}}
{{- if and $apart $engine.prefill -}}
{{- $_ := set $engine.prefill "resources" (dict "sluice_prefill" 1) -}}
{{- end -}}
{{- $_ := set $model "engine" $engine -}}
{{- end -}}
{{- if include "sluice.apiKeysSecret" . -}}
{{- $_ := set $args "keys" (set ($args.keys | default dict) "file" "/etc/sluice/keys/keys.yaml") -}}
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

{{/* Of an engine over several pods: one for each GPU, as vLLM wants them. The replica itself runs in the first. */}}
{{- define "sluice.bundles" -}}
{{- $bundles := list (dict "GPU" 1 "sluice_engine" 1) -}}
{{- range until (sub (int .Values.gpusPerEngine) 1 | int) -}}
{{- $bundles = append $bundles (dict "GPU" 1) -}}
{{- end -}}
{{- toJson $bundles -}}
{{- end -}}
