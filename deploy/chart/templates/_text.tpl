{{- /* A value as the text that a variable or an argument takes: numbers in full, a list with commas.
       Of a dict with `name`, said where it is refused, and `value`. */ -}}
{{- define "hvd.text" -}}
{{- if kindIs "slice" .value -}}
{{- $name := .name -}}
{{- $texts := list -}}
{{- range .value }}{{ $texts = append $texts (include "hvd.scalar" (dict "name" $name "value" .)) }}{{ end -}}
{{- join "," $texts -}}
{{- else -}}
{{- include "hvd.scalar" . -}}
{{- end -}}
{{- end -}}

{{- define "hvd.scalar" -}}
{{- if kindIs "string" .value -}}
{{- .value -}}
{{- else if or (kindIs "map" .value) (kindIs "slice" .value) (kindIs "invalid" .value) -}}
{{- fail (printf "%s takes a text, a number, true, false or a list of these, not %s." .name (toJson .value)) -}}
{{- else if and (kindIs "float64" .value) (or (ge .value 9007199254740992.0) (le .value -9007199254740992.0)) -}}
{{- fail (printf "%s is a number of more digits than YAML keeps: write it in quotes." .name) -}}
{{- else -}}
{{- toJson .value -}}
{{- end -}}
{{- end -}}

{{- /* Texts by name, as JSON, of a dict with `name`, `was` and `given`; a null takes its name away. */ -}}
{{- define "hvd.texts" -}}
{{- $texts := deepCopy .was -}}
{{- range $name, $value := .given -}}
{{- if kindIs "invalid" $value -}}
{{- $_ := unset $texts $name -}}
{{- else -}}
{{- $_ := set $texts $name (include "hvd.text" (dict "name" (printf "%s.%s" $.name $name) "value" $value)) -}}
{{- end -}}
{{- end -}}
{{- toJson $texts -}}
{{- end -}}
