{{- define "toolkit.selector" -}}
app.kubernetes.io/name: toolkit
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "toolkit.labels" -}}
{{ include "toolkit.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}
