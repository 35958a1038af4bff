{{/* What the schema cannot say. Each message names the values and the way out. */}}
{{- define "sluice.checks" -}}
{{- $name := include "sluice.fullname" . -}}
{{- if or (gt (len $name) 47) (not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name)) -}}
{{- fail (printf "the name %q must be at most 47 lower-case letters, digits and -, beginning with a letter (KubeRay's limit): set fullnameOverride" $name) -}}
{{- end -}}
{{- include "sluice.checkRedis" . -}}
{{- include "sluice.checkGroups" . -}}
{{- include "sluice.checkModels" . -}}
{{- include "sluice.checkGpus" . -}}
{{- include "sluice.checkNodes" . -}}
{{- include "sluice.checkCapacity" . -}}
{{- include "sluice.checkKubeRay" . -}}
{{- include "sluice.checkUpgrade" . -}}
{{- include "sluice.checkBatches" . -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) -}}
{{- fail "ingress.enabled needs rules: set ingress.hosts, one name at least" -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.enabled attaches to nothing: set httpRoute.parentRefs, one Gateway at least" -}}
{{- end -}}
{{- if and .Values.auth.apiKeys.entries .Values.auth.apiKeys.existingSecret -}}
{{- fail "auth.apiKeys: set entries or existingSecret, not both" -}}
{{- end -}}
{{- if and .Values.auth.rayToken (semverCompare "<2.52.0" .Values.rayVersion) -}}
{{- fail "auth.rayToken needs Ray 2.52 or newer: set rayVersion, or auth.rayToken: false" -}}
{{- end -}}
{{- if and .Values.modelFetch.enabled (not (and .Values.modelCache.enabled .Values.modelCache.existingClaim)) -}}
{{- fail "modelFetch.enabled runs before anything of this release is there: make the claim yourself, and set modelCache.enabled and modelCache.existingClaim" -}}
{{- end -}}
{{- if and .Values.modelFetch.enabled .Values.huggingface.token -}}
{{- fail "modelFetch.enabled runs before the Secret of huggingface.token is there: set huggingface.existingSecret" -}}
{{- end -}}
{{- if and .Values.huggingface.token .Values.huggingface.existingSecret -}}
{{- fail "huggingface: set token or existingSecret, not both" -}}
{{- end -}}
{{- end -}}

{{- define "sluice.checkRedis" -}}
{{- $redis := .Values.redis -}}
{{- if and $redis.auth.password $redis.auth.existingSecret -}}
{{- fail "redis.auth: set password or existingSecret, not both" -}}
{{- end -}}
{{- if and (eq $redis.mode "external") (not $redis.external.host) -}}
{{- fail "redis.mode is external: set redis.external.host" -}}
{{- end -}}
{{- if and (eq $redis.mode "internal") $redis.tls.enabled (not $redis.tls.existingSecret) -}}
{{- fail "redis.tls.enabled with redis.mode internal: set redis.tls.existingSecret, a Secret with ca.crt, tls.crt and tls.key" -}}
{{- end -}}
{{- if and (eq $redis.mode "internal") $redis.auth.username -}}
{{- fail "redis.auth.username is for redis.mode external: the internal Redis has its default user only" -}}
{{- end -}}
{{- if and $redis.auth.username (not (include "sluice.redisSecret" .)) -}}
{{- fail "redis.auth.username goes with redis.auth.password or redis.auth.existingSecret" -}}
{{- end -}}
{{- end -}}

{{- define "sluice.checkBatches" -}}
{{- $batches := .Values.batches -}}
{{- if and $batches.volume.enabled $batches.url -}}
{{- fail "batches: set volume.enabled or url, not both" -}}
{{- end -}}
{{- if and (or $batches.volume.enabled $batches.url) (dig "batches" "folder" nil .Values.app) -}}
{{- fail "app.batches.folder is set by batches.volume and batches.url: leave it out, or leave them out" -}}
{{- end -}}
{{- if and $batches.existingSecret (not (contains "://" (include "sluice.batchesFolder" .))) -}}
{{- fail "batches.existingSecret is for a store of objects: set batches.url" -}}
{{- end -}}
{{- end -}}

{{- define "sluice.checkGroups" -}}
{{- $groups := .Values.engineGroups -}}
{{- if and (eq .Values.redis.mode "none") $groups -}}
{{- fail "redis.mode none keeps everything in the head's pod: set engineGroups to [], or redis.mode to internal" -}}
{{- end -}}
{{- if and (eq .Values.redis.mode "none") .Values.autoscaler.enabled -}}
{{- fail "autoscaler.enabled needs pods to scale: not with redis.mode none" -}}
{{- end -}}
{{- $seen := dict "router" true "head" true -}}
{{- range $group := $groups -}}
{{- if hasKey $seen $group.name -}}
{{- fail (printf "engineGroups: the name %q is taken: every group needs one of its own, other than router and head" $group.name) -}}
{{- end -}}
{{- $_ := set $seen $group.name true -}}
{{- end -}}
{{- range $group := append $groups .Values.routerGroup -}}
{{- $least := hasKey $group "minReplicas" | ternary $group.minReplicas $group.replicas | int -}}
{{- $most := hasKey $group "maxReplicas" | ternary $group.maxReplicas $group.replicas | int -}}
{{- if gt $least $most -}}
{{- fail (printf "group %s: minReplicas (%d) is above maxReplicas (%d)" ($group.name | default "router") $least $most) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Of every model. */}}
{{- define "sluice.checkModels" -}}
{{- range $index, $model := prepend (.Values.app.more_models | default list) .Values.app -}}
{{- $at := eq $index 0 | ternary "app.engine" (printf "app.more_models[%d].engine" (sub $index 1)) -}}
{{- $drain := dig "engine" "drain_timeout_s" 3600.0 $model -}}
{{- if gt (float64 $drain) (float64 $.Values.drainSeconds) -}}
{{- fail (printf "%s.drain_timeout_s (%v, 3600 if it is not set) is above drainSeconds (%v), after which pods are killed: lower the one or raise the other" $at $drain $.Values.drainSeconds) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* With .args: into how many parts these arguments of vLLM split an engine; empty where they do not say. */}}
{{- define "sluice.engineParts" -}}
{{- $parts := 1 -}}
{{- $sizes := dict "-dp" 1 "--data-parallel-size" 1 "-tp" 1 "--tensor-parallel-size" 1 "-pp" 1 "--pipeline-parallel-size" 1 "-pcp" 1 "--prefill-context-parallel-size" 1 -}}
{{- $elsewhere := list "--config" "--distributed-executor-backend" -}}
{{- $said := true -}}
{{- range $index, $arg := .args -}}
{{- if hasPrefix "-" $arg -}}
{{- $name := $arg | splitList "=" | first | replace "_" "-" -}}
{{- $said = and $said (not (has $name $elsewhere)) -}}
{{- if hasKey $sizes $name -}}
{{- $value := "" -}}
{{- if contains "=" $arg -}}
{{- $value = $arg | splitList "=" | last -}}
{{- else if lt (add1 $index) (len $.args) -}}
{{- $value = index $.args (add1 $index) -}}
{{- end -}}
{{- if regexMatch "^[0-9]{1,6}$" $value -}}
{{- $parts = mul $parts (int $value) -}}
{{- else -}}
{{- $said = false -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $said -}}{{- $parts -}}{{- end -}}
{{- end -}}

{{/* The application says the same, but not before pods hold the GPUs. */}}
{{- define "sluice.checkGpus" -}}
{{- $gpus := .Values.gpusPerEngine | int -}}
{{- range $index, $model := prepend (.Values.app.more_models | default list) .Values.app -}}
{{- $at := eq $index 0 | ternary "app.vllm_args" (printf "app.more_models[%d].vllm_args" (sub $index 1)) -}}
{{- $parts := include "sluice.engineParts" (dict "args" ($model.vllm_args | default list)) -}}
{{- $vllm := eq (dig "engine" "kind" "vllm" $model) "vllm" -}}
{{- if and $gpus $vllm $parts (ne $parts (toString $gpus)) -}}
{{- fail (printf "gpusPerEngine is %d, and by %s an engine uses %s: set gpusPerEngine, or --tensor-parallel-size times --pipeline-parallel-size, so that they are the same" $gpus $at $parts) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Of engines over several pods. Ray fills whole pods with the GPUs of one: so nothing else may take part of them. */}}
{{- define "sluice.checkNodes" -}}
{{- $nodes := int .Values.nodesPerEngine -}}
{{- $gpus := int .Values.gpusPerEngine -}}
{{- if gt $nodes 1 -}}
{{- if or (not $gpus) (mod $gpus $nodes) -}}
{{- fail (printf "nodesPerEngine is %d, and gpusPerEngine %d: each pod has the same number of an engine's GPUs, so set gpusPerEngine to a multiple of nodesPerEngine" $nodes $gpus) -}}
{{- end -}}
{{- if ne (len .Values.engineGroups) 1 -}}
{{- fail (printf "nodesPerEngine is %d, and there are %d engineGroups: the pods of an engine are of one kind, so name one group (not with redis.mode none)" $nodes (len .Values.engineGroups)) -}}
{{- end -}}
{{- $group := first .Values.engineGroups -}}
{{- if gt ($group.enginesPerPod | default 1 | int) 1 -}}
{{- fail (printf "nodesPerEngine is %d, and engineGroups[0].enginesPerPod %d: an engine has its pods to itself, set enginesPerPod to 1" $nodes (int $group.enginesPerPod)) -}}
{{- end -}}
{{- range $index, $model := prepend (.Values.app.more_models | default list) .Values.app -}}
{{- if kindIs "map" (dig "engine" "prefill" nil $model) -}}
{{- fail (printf "nodesPerEngine is %d, and %s.engine.prefill hands caches from pod to pod: leave one of them out" $nodes (eq $index 0 | ternary "app" (printf "app.more_models[%d]" (sub $index 1)))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "sluice.checkCapacity" -}}
{{- $own := 0 -}}
{{- range $class := .Values.app.classes -}}
{{- $own = add $own ($class.own_replicas | default 0 | int) -}}
{{- end -}}
{{- $needed := 0 -}}
{{- $reading := 0 -}}
{{- range $model := prepend (.Values.app.more_models | default list) .Values.app -}}
{{- $engine := $model.engine | default dict -}}
{{- $shared := dig "autoscaling" "max_replicas" ($engine.replicas | default 1) $engine | int -}}
{{- if ne ($engine.kind | default "") "openai" -}}
{{- $needed = add $needed $shared $own -}}
{{- end -}}
{{- with $engine.prefill -}}
{{- $reading = add $reading (dig "autoscaling" "max_replicas" (.replicas | default 1) . | int) -}}
{{- end -}}
{{- end -}}
{{- $apart := include "sluice.prefillPods" . | eq "true" -}}
{{- if and $apart (not $reading) -}}
{{- fail "engineGroups: a group has the role prefill, and no model has app.engine.prefill: nothing would run there" -}}
{{- end -}}
{{- if not $apart -}}
{{- $needed = add $needed $reading -}}
{{- end -}}
{{- $room := ternary (int .Values.head.enginesPerPod) 0 (eq .Values.redis.mode "none") -}}
{{- $readingRoom := 0 -}}
{{- range $group := .Values.engineGroups -}}
{{- $pods := and $.Values.autoscaler.enabled (hasKey $group "maxReplicas") | ternary $group.maxReplicas $group.replicas | int -}}
{{- $more := div (mul $pods ($group.enginesPerPod | default 1 | int)) (int $.Values.nodesPerEngine) -}}
{{- if eq ($group.role | default "") "prefill" -}}
{{- $readingRoom = add $readingRoom $more -}}
{{- else -}}
{{- $room = add $room $more -}}
{{- end -}}
{{- end -}}
{{- if and $apart (gt $reading $readingRoom) -}}
{{- fail (printf "app.engine.prefill asks for up to %d replicas, and the groups of role prefill have room for %d (pods x enginesPerPod)" $reading $readingRoom) -}}
{{- end -}}
{{- if and $needed (ne .Values.redis.mode "none") (not .Values.engineGroups) -}}
{{- fail "engineGroups is empty: name at least one group of pods for engines, or set redis.mode to none" -}}
{{- end -}}
{{- if gt $needed $room -}}
{{- fail (printf "app asks for up to %d engine replicas, and there is room for %d (pods x enginesPerPod / nodesPerEngine): raise engineGroups[].replicas, maxReplicas with the autoscaler, or head.enginesPerPod with redis.mode none" $needed $room) -}}
{{- end -}}
{{- $routers := dig "router" "replicas" 1 .Values.app -}}
{{- with dig "router" "autoscaling" nil .Values.app -}}
{{- $routers = .max_replicas -}}
{{- end -}}
{{- /* One more: a redeploy starts a new router before it stops an old one, and without room it would wait for ever. */ -}}
{{- $cpus := mulf (dig "router" "num_cpus" 1.0 .Values.app) (add1 $routers) -}}
{{- if and (not $cpus) (ne .Values.redis.mode "none") -}}
{{- fail "app.router.num_cpus is 0: only CPUs keep routers on their own pods, and others do not hold the file of keys: set a little, say 0.1" -}}
{{- end -}}
{{- $who := "app.router asks for" -}}
{{- $predictor := .Values.app.predictor | default dict -}}
{{- $kind := $predictor.kind | default "auto" -}}
{{- $learned := eq $kind "bert" -}}
{{- range .Values.app.classes | default dict -}}
{{- if and (eq $kind "auto") (dig "e2e_s" 0.0 (. | default dict)) -}}{{- $learned = true -}}{{- end -}}
{{- end -}}
{{- $predictorGpus := mulf (dig "num_gpus" 0.0 $predictor) (dig "replicas" 1 $predictor) -}}
{{- /* Pods of routers have no GPUs, and those of engines no CPUs: only with redis.mode none has a pod both. */ -}}
{{- $left := ternary (mul (sub $room $needed) (int .Values.gpusPerEngine)) 0 (eq .Values.redis.mode "none") -}}
{{- if and $learned (gt $predictorGpus (float64 $left)) -}}
{{- fail (printf "app.predictor asks for %v GPUs (replicas x num_gpus), and engines leave %d: set num_gpus to 0, or raise head.enginesPerPod with redis.mode none" $predictorGpus $left) -}}
{{- end -}}
{{- if and $learned (eq ($predictor.place | default "replicas") "replicas") -}}
{{- $who = "app.router and app.predictor, which run on the same pods, ask for" -}}
{{- $predictorCpus := mulf (dig "num_cpus" 1.0 $predictor) (dig "replicas" 1 $predictor) -}}
{{- if and (not $predictorCpus) (ne .Values.redis.mode "none") -}}
{{- fail "app.predictor.num_cpus is 0: only CPUs keep predictors on the pods of routers, off the head and the engines: set a little, say 0.1" -}}
{{- end -}}
{{- $cpus = addf $cpus $predictorCpus -}}
{{- end -}}
{{- $batches := .Values.app.batches | default dict -}}
{{- if include "sluice.batchesFolder" . -}}
{{- $batchCpus := dig "num_cpus" 0.1 $batches -}}
{{- if and (not $batchCpus) (ne .Values.redis.mode "none") -}}
{{- fail "app.batches.num_cpus is 0: only CPUs keep what runs batches on the pods of routers, off the head and the engines: set a little, say 0.1" -}}
{{- end -}}
{{- $who = printf "app.batches and %s" ($who | replace "asks for" "ask for") -}}
{{- $cpus = addf $cpus $batchCpus -}}
{{- end -}}
{{- $pods := and .Values.autoscaler.enabled (hasKey .Values.routerGroup "maxReplicas") | ternary .Values.routerGroup.maxReplicas .Values.routerGroup.replicas -}}
{{- $pods = eq .Values.redis.mode "none" | ternary 1 $pods -}}
{{- if gt (float64 $cpus) (mulf $pods .Values.routerGroup.rayCpus) -}}
{{- fail (printf "%s %v CPUs (replicas x num_cpus, one router more for redeploys), and routerGroup has %v (replicas x rayCpus): raise routerGroup.replicas or rayCpus" $who $cpus (mulf $pods .Values.routerGroup.rayCpus)) -}}
{{- end -}}
{{- end -}}

{{/* What a KubeRay does not know, its CRD drops without a word. */}}
{{- define "sluice.checkKubeRay" -}}
{{- $version := .Values.kuberayVersion -}}
{{- if semverCompare "<1.4.0" $version -}}
{{- fail (printf "kuberayVersion is %s: the chart needs KubeRay 1.4 or later" $version) -}}
{{- end -}}
{{- if and .Values.auth.rayToken (semverCompare "<1.5.1" $version) -}}
{{- fail (printf "auth.rayToken needs KubeRay 1.5.1, and kuberayVersion is %s: upgrade KubeRay, or set auth.rayToken: false" $version) -}}
{{- end -}}
{{- if and .Values.rayService.suspend (semverCompare "<1.7.0" $version) -}}
{{- fail (printf "rayService.suspend needs KubeRay 1.7, and kuberayVersion is %s: upgrade KubeRay, or helm uninstall" $version) -}}
{{- end -}}
{{- end -}}

{{- define "sluice.checkUpgrade" -}}
{{- $upgrade := .Values.upgrade -}}
{{- if eq $upgrade.type "NewClusterWithIncrementalUpgrade" -}}
{{- if semverCompare "<1.7.0" .Values.kuberayVersion -}}
{{- fail (printf "upgrade.type NewClusterWithIncrementalUpgrade needs KubeRay 1.7, and kuberayVersion is %s: 1.4 refuses it, 1.5 and 1.6 never apply a change of pods, for its feature gate is off there: set upgrade.type to NewCluster or None" .Values.kuberayVersion) -}}
{{- end -}}
{{- if not .Values.autoscaler.enabled -}}
{{- fail "upgrade.type NewClusterWithIncrementalUpgrade needs autoscaler.enabled: true" -}}
{{- end -}}
{{- if not $upgrade.gatewayClassName -}}
{{- fail "upgrade.type NewClusterWithIncrementalUpgrade needs upgrade.gatewayClassName" -}}
{{- end -}}
{{- if gt (int $upgrade.stepSizePercent) (int $upgrade.maxSurgePercent) -}}
{{- fail (printf "upgrade.stepSizePercent (%d) is above upgrade.maxSurgePercent (%d)" (int $upgrade.stepSizePercent) (int $upgrade.maxSurgePercent)) -}}
{{- end -}}
{{- $gateway := include "sluice.gateway" . -}}
{{- if or .Values.ingress.enabled .Values.httpRoute.enabled -}}
{{- fail (printf "upgrade.type NewClusterWithIncrementalUpgrade: there is no service for ingress or httpRoute then, for KubeRay makes one for each Ray cluster, under a name of its own: set ingress.enabled and httpRoute.enabled to false, and let clients come to KubeRay's Gateway %s" $gateway) -}}
{{- end -}}
{{- if or (ne .Values.service.type "ClusterIP") .Values.service.annotations -}}
{{- fail (printf "upgrade.type NewClusterWithIncrementalUpgrade: KubeRay ignores what service says then: leave service.type and service.annotations out, and let clients come to KubeRay's Gateway %s" $gateway) -}}
{{- end -}}
{{- if and .Values.tests.enabled (not .Values.tests.address) -}}
{{- fail (printf "upgrade.type NewClusterWithIncrementalUpgrade: `helm test` must go to KubeRay's Gateway %s, whose address the chart does not know: set tests.address, or tests.enabled: false" $gateway) -}}
{{- end -}}
{{- end -}}
{{- end -}}
