"""The chart, rendered by helm: it changes the manifests of deploy/kubernetes as its values say, and nothing else."""

import subprocess
from typing import Any

import kubernetes_validate
import pytest
import yaml

from oaiserve import __version__
from tests.deploy.manifests import FOLDER, KUBERNETES, NO_SCHEMA, NOT_MANIFESTS, OF_KEDA
from tests.deploy.paths import DEPLOY

CHART = DEPLOY / "helm"
OPTIONAL = ("autoscaling", "gateway", "inferencePool", "prometheusOperator")
ALL = {name: {"enabled": True} for name in OPTIONAL}
KINDS_WITHOUT_SCHEMA = {"ServiceMonitor", "PrometheusRule", "InferencePool", "ScaledObject", "InterceptorRoute"}
MANIFESTS = sorted(at for at in FOLDER.rglob("*.yaml") if at.name not in NOT_MANIFESTS | OF_KEDA)
TO_ZERO = {"gateway": {"enabled": True}, "scaleToZero": {"enabled": True}}
KEYS = {"oaiserve": "OAISERVE_API_KEY", "oaiserve-gateway": "OAISERVE_REPLICA_KEY"}  # of each deployment
Objects = dict[tuple[str, str], dict[str, Any]]  # by kind and name

pytestmark = pytest.mark.helm


def rendered(values: dict[str, Any] | None = None, release: str = "oaiserve") -> Objects:
    command = ["helm", "template", release, str(CHART), "--values", "-"]
    done = subprocess.run(command, input=yaml.safe_dump(values or {}), capture_output=True, text=True, check=True)
    return by_name(yaml.safe_load_all(done.stdout))


def by_name(objects: Any) -> Objects:
    return {(each["kind"], each["metadata"]["name"]): each for each in objects if each}


def without_release(node: Any) -> Any:
    """Return the same tree without what the chart always adds: the label of the release, and the label of the job."""
    if isinstance(node, list):
        return [without_release(each) for each in node]
    if isinstance(node, dict):
        added = ("app.kubernetes.io/instance", "jobLabel")
        return {key: without_release(value) for key, value in node.items() if key not in added}
    return node


def test_the_chart_renders_the_manifests() -> None:
    expected = by_name(yaml.safe_load(at.read_text()) for at in MANIFESTS)
    assert without_release(rendered(ALL)) == expected


def test_the_chart_without_values_needs_no_operator_and_no_extension() -> None:
    kinds = {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"}
    assert rendered().keys() == {(kind, "oaiserve") for kind in kinds}
    assert ("NetworkPolicy", "oaiserve") not in rendered({"networkPolicy": {"enabled": False}})


def test_two_releases_share_no_name_and_no_pod() -> None:
    objects = rendered(ALL, "second")
    assert len(objects) == len(MANIFESTS)
    assert all(name.startswith("second") for _, name in objects)
    selectors = [selector for each in objects.values() for selector in selectors_of(each)]
    assert len(selectors) >= 10
    assert all(selector["app.kubernetes.io/instance"] == "second" for selector in selectors)
    assert objects["HorizontalPodAutoscaler", "second"]["spec"]["scaleTargetRef"]["name"] == "second"
    (gateway,) = objects["Deployment", "second-gateway"]["spec"]["template"]["spec"]["containers"]
    assert "http://second-replicas:8000" in gateway["args"]
    assert ("Service", "second-replicas") in objects


def selectors_of(node: Any) -> list[dict[str, str]]:
    """Return the labels that select pods or services anywhere in the tree."""
    if isinstance(node, list):
        return [selector for each in node for selector in selectors_of(each)]
    if not isinstance(node, dict):
        return []
    here = [node["matchLabels"]] if "matchLabels" in node else []
    if node.get("kind") == "Service":
        here.append(node["spec"]["selector"])
    return here + [selector for value in node.values() for selector in selectors_of(value)]


def test_jobs_keep_the_names_that_alerts_expect_in_each_release() -> None:
    objects = rendered(ALL, "second")
    for suffix in ("", "-gateway"):
        monitor = objects["ServiceMonitor", f"second{suffix}"]
        service = objects["Service", f"second{suffix}"]
        labels = service["metadata"]["labels"]
        assert labels[monitor["spec"]["jobLabel"]] == f"oaiserve{suffix}"
        assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_values_replace_those_of_the_manifests() -> None:
    values = {
        "image": "registry/oaiserve:1",
        "args": ["serve", "m"],
        "env": [{"name": "HF_TOKEN", "value": "t"}],
        "replicas": 3,
        "resources": {"limits": {"nvidia.com/gpu": 1}},
        "apiKeySecret": "keys",
        "cache": {"persistentVolumeClaim": {"claimName": "models"}},
        "service": {"type": "LoadBalancer"},
        "nodeSelector": {"gpu": "yes"},
        "tolerations": [{"operator": "Exists"}],
        "autoscaling": {"maxReplicas": 9},
        "prometheusOperator": {"enabled": True, "labels": {"release": "p"}},
        "gateway": {"enabled": True, "image": "registry/oaiserve:gateway", "replicas": 5, "trustedProxy": "10.0.0.0/8"},
    }
    objects = rendered(values)
    deployment = objects["Deployment", "oaiserve"]["spec"]
    pod = deployment["template"]["spec"]
    (container,) = pod["containers"]
    assert (deployment["replicas"], container["image"], container["args"]) == (3, values["image"], values["args"])
    assert container["resources"] == values["resources"]
    assert [variable["name"] for variable in container["env"]] == [
        "OAISERVE_API_KEY",
        "HF_TOKEN",
        "OAISERVE_TRUSTED_PROXY",
    ]
    assert {volume["name"]: volume for volume in pod["volumes"]}["cache"] == {"name": "cache"} | values["cache"]  # type: ignore[operator]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert (pod["nodeSelector"], pod["tolerations"]) == (values["nodeSelector"], values["tolerations"])
    service = objects["Service", "oaiserve"]["spec"]
    assert (service["type"], service["ports"][0]["port"]) == ("LoadBalancer", 80)
    gateway = objects["Deployment", "oaiserve-gateway"]["spec"]
    assert (gateway["replicas"], gateway["template"]["spec"]["containers"][0]["image"]) == (
        5,
        "registry/oaiserve:gateway",
    )
    for name in ("oaiserve", "oaiserve-gateway"):
        (variable, *_) = objects["Deployment", name]["spec"]["template"]["spec"]["containers"][0]["env"]
        assert variable["valueFrom"]["secretKeyRef"]["name"] == "keys"
    assert objects["PrometheusRule", "oaiserve"]["metadata"]["labels"]["release"] == "p"
    scaled = rendered({"autoscaling": {"enabled": True, "maxReplicas": 9}})
    assert scaled["HorizontalPodAutoscaler", "oaiserve"]["spec"]["maxReplicas"] == 9
    assert "replicas" not in scaled["Deployment", "oaiserve"]["spec"]


@pytest.mark.parametrize("values", [{}, {"apiKeySecret": "keys"}])
def test_a_pod_needs_the_secret_that_its_key_is_in(values: dict[str, Any]) -> None:
    objects = rendered(values | {"gateway": {"enabled": True}})
    for name, variable in KEYS.items():
        first = env_of(objects, name)[0]
        secret = values.get("apiKeySecret", "oaiserve")
        assert first == {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": "api-key"}}}


def test_only_open_true_starts_servers_without_a_key() -> None:
    variable = {"name": "HF_TOKEN", "value": "t"}
    objects = rendered({"open": True, "env": [variable], "gateway": {"enabled": True}})
    assert (env_of(objects, "oaiserve"), env_of(objects, "oaiserve-gateway")) == ([variable], [])
    kubernetes_validate.validate(rendered({"open": True})["Deployment", "oaiserve"], KUBERNETES, strict=True)
    for values, reason in (
        ({"open": "false"}, 'open is "false", but must be true or false.'),
        ({"open": None}, "open is null, but must be true or false."),
        ({"open": True, "apiKeySecret": "keys"}, "open is true, but apiKeySecret is 'keys'"),
    ):
        with pytest.raises(subprocess.CalledProcessError) as error:
            rendered(values)
        assert reason in error.value.stderr


def env_of(objects: Objects, name: str) -> list[dict[str, Any]]:
    (container,) = objects["Deployment", name]["spec"]["template"]["spec"]["containers"]
    env: list[dict[str, Any]] = container["env"]
    return env


def test_zero_replicas_are_not_those_of_the_manifests() -> None:
    objects = rendered({"replicas": 0, "gateway": {"enabled": True, "replicas": 0}})
    for name in ("oaiserve", "oaiserve-gateway"):
        assert objects["Deployment", name]["spec"]["replicas"] == 0


def test_a_chart_that_scales_to_zero_renders_the_manifest_of_keda() -> None:
    objects = without_release(rendered(TO_ZERO))
    expected = yaml.safe_load((FOLDER / "keda/scaledobject.yaml").read_text())
    scaled = objects["ScaledObject", "oaiserve"]
    assert scaled == expected
    assert ("HorizontalPodAutoscaler", "oaiserve") not in objects
    assert "replicas" not in objects["Deployment", "oaiserve"]["spec"]


def test_values_of_a_chart_that_scales_to_zero() -> None:
    values = {"enabled": True, "maxReplicas": 9, "cooldownSeconds": 60, "prometheus": "http://p:9090"}
    spec = rendered({**TO_ZERO, "replicas": 2, "scaleToZero": values}, "second")["ScaledObject", "second"]["spec"]
    assert (spec["scaleTargetRef"], spec["maxReplicaCount"], spec["cooldownPeriod"]) == ({"name": "second"}, 9, 60)
    waiting, asked = (trigger["metadata"] for trigger in spec["triggers"])
    assert waiting["serverAddress"] == asked["serverAddress"] == "http://p:9090"
    assert waiting["query"] == 'sum(avg_over_time(oaiserve_requests_waiting{service="second"}[1m]))'
    assert 'oaiserve_gateway_requests_total{service="second-gateway"}' in asked["query"]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"gateway": {"enabled": False}}, "scaleToZero needs the gateway"),
        ({"autoscaling": {"enabled": True}}, "autoscaling and scaleToZero"),
    ],
)
def test_scaling_to_zero_is_refused_where_it_cannot_work(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as error:
        rendered({**TO_ZERO, **values})
    assert reason in error.value.stderr


def test_the_objects_are_valid_by_the_schema_of_kubernetes() -> None:
    for (kind, _), each in rendered(ALL).items():
        if kind not in KINDS_WITHOUT_SCHEMA:
            kubernetes_validate.validate(each, KUBERNETES, strict=True)
    assert len(KINDS_WITHOUT_SCHEMA) == len(NO_SCHEMA - NOT_MANIFESTS)


def test_helm_has_nothing_to_object_to() -> None:
    done = subprocess.run(["helm", "lint", "--strict", str(CHART)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["version"] == __version__
