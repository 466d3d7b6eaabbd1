{{- /* Returns the object in a file of deploy/kubernetes as YAML. Its name begins with that of the release. */ -}}
{{- define "oaiserve.read" -}}
{{- $object := .root.Files.Get (printf "manifests/%s" .file) | fromYaml -}}
{{- $_ := set $object.metadata "name" (include "oaiserve.named" (dict "root" .root "name" $object.metadata.name)) -}}
{{- include "oaiserve.labelled" (dict "root" .root "node" $object) | fromYaml | toYaml -}}
{{- end -}}

{{- define "oaiserve.named" -}}
{{- .name | replace "oaiserve" .root.Release.Name -}}
{{- end -}}

{{- /* Returns the same tree with the release's label next to each label with an app's name, also in selectors. */ -}}
{{- define "oaiserve.labelled" -}}
{{- $root := .root -}}
{{- $node := dict -}}
{{- range $key, $value := .node -}}
  {{- if kindIs "map" $value -}}
    {{- $value = include "oaiserve.labelled" (dict "root" $root "node" $value) | fromYaml -}}
  {{- else if and (kindIs "slice" $value) $value (kindIs "map" (first $value)) -}}
    {{- $items := list -}}
    {{- range $value -}}
      {{- $items = append $items (include "oaiserve.labelled" (dict "root" $root "node" .) | fromYaml) -}}
    {{- end -}}
    {{- $value = $items -}}
  {{- end -}}
  {{- $_ := set $node $key $value -}}
{{- end -}}
{{- if hasKey $node "app.kubernetes.io/name" -}}
  {{- $_ := set $node "app.kubernetes.io/instance" $root.Release.Name -}}
{{- end -}}
{{- toYaml $node -}}
{{- end -}}

{{- /* Returns `env`: a container's variables with the key from the secret, which must exist, or without it if open. */ -}}
{{- define "oaiserve.keyed" -}}
{{- $values := .root.Values -}}
{{- $env := .env -}}
{{- if not (kindIs "bool" $values.open) -}}
  {{- fail (printf "open is %v, but must be true or false." (toJson $values.open)) -}}
{{- else if and $values.open $values.apiKeySecret -}}
  {{- fail (printf "open is true, but apiKeySecret is '%v': a server with a key is not open. Set one of the two." $values.apiKeySecret) -}}
{{- else if $values.open -}}
  {{- $env = rest $env -}}
{{- else if $values.apiKeySecret -}}
  {{- $_ := set (first $env).valueFrom.secretKeyRef "name" $values.apiKeySecret -}}
{{- end -}}
{{- toYaml (dict "env" $env) -}}
{{- end -}}
