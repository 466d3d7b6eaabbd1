"""The manifests are valid by Kubernetes' own schemas, and agree with each other and with the server.

There is no package with the schemas of ServiceMonitor, PrometheusRule and InferencePool, so only the fields of these
that the other manifests rely on are checked.
"""

import kubernetes_validate
import pytest
import yaml

from deploy.kubernetes import build
from oaiserve.app import TELEMETRY_CLOSE_SECONDS, routes
from oaiserve.config import Config, ServerOptions
from oaiserve.http.server import CUT_SECONDS
from oaiserve.telemetry import names, vllm_names
from tests.deploy import promql
from tests.deploy.manifests import CONTAINER, DEPLOYMENT, FOLDER, KUBERNETES, MANIFESTS, POD, WITH_SCHEMA, manifest


@pytest.mark.parametrize("name", WITH_SCHEMA)
def test_the_manifest_is_valid_by_the_schema_of_kubernetes(name: str) -> None:
    """Those of the gateway are among them."""
    kubernetes_validate.validate(manifest(name), KUBERNETES, strict=True)


def test_the_kustomization_names_every_manifest_but_the_pool() -> None:
    kustomization = manifest("kustomization.yaml")
    assert set(kustomization["resources"]) == set(MANIFESTS) - {"inferencepool.yaml"}
    assert [image["name"] for image in kustomization["images"]] == [CONTAINER["image"].split(":")[0]]


def test_all_selectors_match_the_pods() -> None:
    labels = POD["metadata"]["labels"].items()
    service = MANIFESTS["service.yaml"]
    for selector in (
        DEPLOYMENT["spec"]["selector"]["matchLabels"],
        service["spec"]["selector"],
        MANIFESTS["poddisruptionbudget.yaml"]["spec"]["selector"]["matchLabels"],
        MANIFESTS["inferencepool.yaml"]["spec"]["selector"]["matchLabels"],
        MANIFESTS["networkpolicy.yaml"]["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= labels
    monitor = MANIFESTS["servicemonitor.yaml"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()


def test_all_manifests_use_the_same_port_name_and_number() -> None:
    (container,) = CONTAINER["ports"]
    (service,) = MANIFESTS["service.yaml"]["spec"]["ports"]
    (endpoint,) = MANIFESTS["servicemonitor.yaml"]["spec"]["endpoints"]
    (pool,) = MANIFESTS["inferencepool.yaml"]["spec"]["targetPorts"]
    assert container["name"] == service["targetPort"] == endpoint["port"] == service["name"]
    assert container["containerPort"] == pool["number"] == ServerOptions().port


def test_probes_and_scrapes_use_routes_of_the_server() -> None:
    served = {route.path for route in routes(Config("demo"))}
    probes = {kind: CONTAINER[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert probes == {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}
    assert {*probes.values(), MANIFESTS["servicemonitor.yaml"]["spec"]["endpoints"][0]["path"]} <= served


def test_the_pod_gives_a_shutdown_enough_time() -> None:
    arguments = CONTAINER["args"]
    drain_seconds = int(arguments[arguments.index("--drain-timeout-seconds") + 1])
    sleep, pause_seconds = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
    takes = int(pause_seconds) + drain_seconds + CUT_SECONDS + TELEMETRY_CLOSE_SECONDS
    assert sleep == "sleep"
    assert POD["spec"]["terminationGracePeriodSeconds"] >= takes + 5


def test_the_environment_has_only_settings_of_the_server() -> None:
    settings = {variable["name"].removeprefix("OAISERVE_").lower() for variable in CONTAINER["env"]}
    assert settings == {"api_key"} <= set(ServerOptions.__dataclass_fields__)


@pytest.mark.parametrize("name", ["deployment.yaml", "gateway/deployment.yaml"])
def test_no_pod_starts_without_the_secret_of_its_key(name: str) -> None:
    (container,) = manifest(name)["spec"]["template"]["spec"]["containers"]
    (variable,) = container["env"]
    assert variable["valueFrom"]["secretKeyRef"] == {"name": "oaiserve", "key": "api-key"}


def test_the_component_open_removes_the_variable_of_each_key_and_nothing_else() -> None:
    component = manifest("open/kustomization.yaml")
    deployments = {each["metadata"]["name"]: each for each in (DEPLOYMENT, manifest("gateway/deployment.yaml"))}
    assert [patch["target"]["name"] for patch in component["patches"]] == [*deployments]
    for patch in component["patches"]:
        (container,) = deployments[patch["target"]["name"]]["spec"]["template"]["spec"]["containers"]
        path = "/spec/template/spec/containers/0/env/0"
        (variable,) = container["env"]
        assert yaml.safe_load(patch["patch"]) == [
            {"op": "test", "path": f"{path}/name", "value": variable["name"]},
            {"op": "remove", "path": path},
        ]


def test_the_container_runs_with_few_rights() -> None:
    assert POD["spec"]["securityContext"]["runAsNonRoot"]
    assert POD["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert POD["spec"]["automountServiceAccountToken"] is False
    assert CONTAINER["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounted = {mount["name"] for mount in CONTAINER["volumeMounts"]}
    assert mounted == {volume["name"] for volume in POD["spec"]["volumes"]}


def test_kubernetes_sets_no_variables_that_the_server_would_refuse() -> None:
    """Kubernetes would set OAISERVE_PORT and OAISERVE_SERVICE_HOST for a service with the name oaiserve."""
    assert MANIFESTS["service.yaml"]["metadata"]["name"] == "oaiserve"
    assert POD["spec"]["enableServiceLinks"] is False


def test_the_network_policy_opens_the_port_of_the_api_and_few_ways_out() -> None:
    policy = MANIFESTS["networkpolicy.yaml"]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert [port["port"] for rule in policy["ingress"] for port in rule["ports"]] == [CONTAINER["ports"][0]["name"]]
    assert {port["port"] for rule in policy["egress"] for port in rule["ports"]} == {53, 443, 4317}


def test_the_autoscaler_follows_a_metric_of_the_server() -> None:
    autoscaler = MANIFESTS["horizontalpodautoscaler.yaml"]["spec"]
    (metric,) = autoscaler["metrics"]
    assert metric["pods"]["metric"]["name"] == names.ENGINE["num_waiting"].name
    target = {key: autoscaler["scaleTargetRef"][key] for key in ("apiVersion", "kind")}
    assert target == {key: DEPLOYMENT[key] for key in ("apiVersion", "kind")}
    assert autoscaler["scaleTargetRef"]["name"] == DEPLOYMENT["metadata"]["name"]
    (rule,) = manifest("prometheus-adapter.yaml")["rules"]["custom"]
    assert rule["seriesQuery"].split("{")[0] == names.ENGINE["num_waiting"].name
    # Of several models in a pod, the adapter would otherwise take any.
    assert rule["metricsQuery"].startswith("sum by (<<.GroupBy>>)")


def test_the_autoscaler_alone_sets_the_number_of_pods() -> None:
    """`kubectl apply` of a number would end all pods beyond it."""
    assert "replicas" not in DEPLOYMENT["spec"]


def test_the_pods_have_the_labels_and_metrics_that_an_endpoint_picker_reads() -> None:
    labels = POD["metadata"]["labels"]
    assert labels["llm-d.ai/engine-type"] == labels["inference.networking.k8s.io/engine-type"] == "vllm"
    read = ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info")
    assert {f"vllm:{name}" for name in read} <= {metric.name for metric in vllm_names.METRICS}


def test_the_operator_names_the_job_as_the_alerts_expect() -> None:
    """The operator uses the name of the service as the job, unless the ServiceMonitor has a `jobLabel`."""
    assert MANIFESTS["service.yaml"]["metadata"]["name"] == "oaiserve"
    assert "jobLabel" not in MANIFESTS["servicemonitor.yaml"]["spec"]


def test_the_prometheusrule_has_the_rules_of_prometheus() -> None:
    rule = MANIFESTS["prometheusrule.yaml"]
    assert (FOLDER / "prometheusrule.yaml").read_text() == build.page(), "run python -m deploy.kubernetes.build"
    assert [rule_written for group in rule["spec"]["groups"] for rule_written in group["rules"]] == promql.rules()
    assert rule["metadata"] == MANIFESTS["servicemonitor.yaml"]["metadata"]
    assert rule["apiVersion"] == MANIFESTS["servicemonitor.yaml"]["apiVersion"]
