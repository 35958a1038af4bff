{{/* AppConfig: the user's, and what only the chart knows. JSON, for YAML would write large whole numbers as 1e+07. */}}
{{- define "sluice.appArgs" -}}
{{- $args := deepCopy .Values.app -}}
{{- if not (hasKey $args "name") -}}
{{- $_ := set $args "name" (include "sluice.fullname" .) -}}
{{- end -}}
{{- $apart := include "sluice.prefillPods" . | eq "true" -}}
{{- range $model := prepend ($args.more_models | default list) $args -}}
{{- $engine := $model.engine | default dict -}}
{{- $_ := set $engine "num_cpus" 0 -}}
{{- $ours := ne ($engine.kind | default "") "openai" -}}
{{- if $ours -}}
{{- $_ := set $engine "num_gpus" ($.Values.gpusPerEngine | int) -}}
{{- $_ := set $engine "resources" (dict "sluice_engine" 1) -}}
{{- end -}}
{{- if and $ours (gt (int $.Values.nodesPerEngine) 1) -}}
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
{{- with include "sluice.batchesFolder" . -}}
{{- $_ := set $args "batches" (set ($args.batches | default dict) "folder" .) -}}
{{- end -}}
{{- if and (ne .Values.redis.mode "none") .Values.redis.tls.enabled -}}
{{- $_ := set $args "redis_ca_certs" (include "sluice.redisCa" .) -}}
{{- end -}}
{{- toJson $args -}}
{{- end -}}

{{/* Moves what changes live out of .args into .live, as .keys names it; a section of nothing else is as one that is not there. */}}
{{- define "sluice.moveLive" -}}
{{- range $name, $inside := .keys -}}
{{- if hasKey $.args $name -}}
{{- $value := get $.args $name -}}
{{- if not (kindIs "map" $inside) -}}
{{- $_ := set $.live $name $value -}}
{{- $_ := unset $.args $name -}}
{{- else if kindIs "map" $value -}}
{{- $live := dict -}}
{{- include "sluice.moveLive" (dict "args" $value "live" $live "keys" $inside) -}}
{{- if $live -}}
{{- $_ := set $.live $name $live -}}
{{- end -}}
{{- if not $value -}}
{{- $_ := unset $.args $name -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What engines start with stays in args: replicas of their own, with the classes that they serve, and the names of all
classes where a policy of one's own counts them. And the default class, which must be among them. */}}
{{- define "sluice.keepClasses" -}}
{{- $kept := dict -}}
{{- range $name, $class := .live.classes | default dict -}}
{{- if kindIs "map" $class -}}
{{- $own := $class.own_replicas | default 0 -}}
{{- $_ := unset $class "own_replicas" -}}
{{- if or $own $.counted -}}
{{- $_ := set $kept $name (ternary (dict "own_replicas" $own) dict (ne ($own | int) 0)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $kept -}}
{{- $default := .live.default_class | default .defaultClass -}}
{{- if not (hasKey $kept $default) -}}
{{- $_ := set $kept $default dict -}}
{{- end -}}
{{- $_ := set .args "classes" $kept -}}
{{- $_ := set .args "default_class" $default -}}
{{- end -}}
{{- end -}}

{{- define "sluice.serveConfig" -}}
{{- $args := include "sluice.appArgs" . | fromJson -}}
{{- $of := .Files.Get "files/live-keys.json" | fromJson -}}
{{- $live := dict -}}
{{- include "sluice.moveLive" (dict "args" $args "live" $live "keys" $of.keys) -}}
{{- $counted := (($args.engine).scheduler).policy -}}
{{- $others := list -}}
{{- $any := false -}}
{{- range $model := $args.more_models | default list -}}
{{- $counted = or $counted (($model.engine).scheduler).policy -}}
{{- $own := dict -}}
{{- include "sluice.moveLive" (dict "args" $model "live" $own "keys" (dict "engine" $of.keys.engine "candidate" $of.keys.more_models.candidate)) -}}
{{- $others = append $others $own -}}
{{- $any = or $any (not (empty $own)) -}}
{{- end -}}
{{- if $any -}}
{{- $_ := set $live "more_models" $others -}}
{{- end -}}
{{- include "sluice.keepClasses" (dict "args" $args "live" $live "counted" $counted "defaultClass" $of.default_class) -}}
{{- $application := dict "name" "sluice" "route_prefix" "/" "import_path" "deployments.app:build" "args" $args -}}
{{- if $live -}}
{{- $_ := set $application "deployments" (list (dict "name" "Router" "user_config" $live)) -}}
{{- end -}}
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
