{{/* Services add "-metrics" and "-webhook" to it, and may have 63 characters. */}}
{{- define "rljob.fullname" -}}
{{- printf "%s-operator" .Release.Name | trunc 55 | trimSuffix "-" }}
{{- end }}

{{- define "rljob.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "rljob.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- required "serviceAccount.name: name an existing account, or set serviceAccount.create to true" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "rljob.selectorLabels" -}}
app.kubernetes.io/name: rljob-operator
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "rljob.labels" -}}
{{- include "rljob.labelsWith" (list . dict) }}
{{- end }}

{{/* Labels of an object that has some of its own: (list context own). A key that is also in extraLabels is written once, with its own value:
YAML parsers such as that of Kustomize and Flux reject a key that occurs twice. */}}
{{- define "rljob.labelsWith" -}}
{{- $context := index . 0 }}
{{- include "rljob.selectorLabels" $context }}
app.kubernetes.io/version: {{ $context.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: rljob
app.kubernetes.io/managed-by: {{ $context.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $context.Chart.Name $context.Chart.Version | replace "+" "_" }}
{{- with merge dict (index . 1) $context.Values.extraLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Istio keeps pods with these labels out of its mesh: with a sidecar, or in ambient mode. The network policies of this chart and of jobs know
nothing of a mesh, and a sidecar never ends the pod of `helm test`. podLabels overrides them. */}}
{{- define "rljob.outsideMesh" -}}
sidecar.istio.io/inject: "false"
istio.io/dataplane-mode: none
{{- end }}

{{/* Image reference: (list image-values default-tag). */}}
{{- define "rljob.image" -}}
{{- $image := index . 0 }}
{{- if $image.digest }}
{{- printf "%s@%s" $image.repository $image.digest }}
{{- else }}
{{- printf "%s:%s" $image.repository (default (index . 1) $image.tag) }}
{{- end }}
{{- end }}

{{/* The user's affinity; several replicas prefer different machines unless it says otherwise. */}}
{{- define "rljob.affinity" -}}
{{- $affinity := deepCopy .Values.affinity }}
{{- if and (gt (int .Values.replicas) 1) (not (hasKey $affinity "podAntiAffinity")) }}
{{- $labels := dict "matchLabels" (include "rljob.selectorLabels" . | fromYaml) }}
{{- $term := dict "weight" 100 "podAffinityTerm" (dict "topologyKey" "kubernetes.io/hostname" "labelSelector" $labels) }}
{{- $_ := set $affinity "podAntiAffinity" (dict "preferredDuringSchedulingIgnoredDuringExecution" (list $term)) }}
{{- end }}
{{- toYaml $affinity }}
{{- end }}

{{/* All permissions of the operator, in each namespace it watches; `helm test` checks them. No secrets, no wildcards. */}}
{{- define "rljob.rules" -}}
# The jobs themselves: read, and delete when their TTL has expired.
- apiGroups: [rljob.dev]
  resources: [rljobs]
  verbs: [get, list, watch, delete]
# Conditions. Also granted by the role of each job: nobody can grant permissions they do not have.
- apiGroups: [rljob.dev]
  resources: [rljobs/status]
  verbs: [patch]
# Owner references that block the owner's deletion.
- apiGroups: [rljob.dev]
  resources: [rljobs/finalizers]
  verbs: [update]
# One RayJob per attempt; patch is for suspend and labels.
- apiGroups: [ray.io]
  resources: [rayjobs]
  verbs: [get, list, watch, create, patch, delete]
# Why a cluster is not ready.
- apiGroups: [ray.io]
  resources: [rayclusters]
  verbs: [list, watch]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
# The other objects of a job; Kubernetes garbage-collects them with the RLJob.
# Shared by all attempts; patch restores them if they were modified or created by an earlier version of the operator.
- apiGroups: [""]
  resources: [serviceaccounts]
  verbs: [get, create, patch]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, create, patch]
# Of jobs with refuseEvictions.
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, create, patch]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, create, patch]
# Why Kueue holds a job.
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [list]
# Status transitions; warnings about pods whose containers are not created.
- apiGroups: [""]
  resources: [events]
  verbs: [list, create]
{{- end }}

{{/* Egress rules of jobs as JSON, but for their own pods, which the operator adds; empty: unrestricted. */}}
{{- define "rljob.egress" -}}
{{- if .Values.jobs.egress.restrict }}
{{- if not .Values.jobs.networkPolicy }}
{{- fail "jobs.egress.restrict: needs jobs.networkPolicy: true, which makes the policies" }}
{{- end }}
{{- if not .Values.networkPolicy.apiServerCIDRs }}
{{- fail "jobs.egress.restrict: set networkPolicy.apiServerCIDRs, or port 443 of any address would stay open" }}
{{- end }}
{{- $peers := list }}
{{- range .Values.networkPolicy.apiServerCIDRs }}
{{- $peers = append $peers (dict "ipBlock" (dict "cidr" .)) }}
{{- end }}
{{- $ports := list }}
{{- range .Values.networkPolicy.apiServerPorts | default (list 443 6443) }}
{{- $ports = append $ports (dict "port" . "protocol" "TCP") }}
{{- end }}
{{- $dns := list }}
{{- range .Values.networkPolicy.dnsPorts | default (list 53 5353) }}
{{- $dns = concat $dns (list (dict "port" . "protocol" "UDP") (dict "port" . "protocol" "TCP")) }}
{{- end }}
{{- toJson (concat (list (dict "ports" $dns) (dict "to" $peers "ports" $ports)) .Values.jobs.egress.allow) }}
{{- end }}
{{- end }}

{{/* Permissions in the release namespace; `helm test` checks these, too. */}}
{{- define "rljob.leaseRules" -}}
# Creation cannot be limited to a name.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [{{ include "rljob.fullname" . }}]
  verbs: [get, patch]
{{- end }}
{{- define "rljob.webhookRules" -}}
# The certificates, which the operators share. Creation cannot be limited to a name.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [""]
  resources: [secrets]
  resourceNames: [{{ include "rljob.fullname" . }}-webhook]
  verbs: [get, patch]
{{- end }}
{{/* And in the cluster. */}}
{{- define "rljob.webhookGlobalRules" -}}
- apiGroups: [admissionregistration.k8s.io]
  resources: [validatingwebhookconfigurations]
  resourceNames: [{{ printf "%s-%s-webhook" .Release.Namespace (include "rljob.fullname" .) }}]
  verbs: [get, patch]
{{- end }}
