"""KEDA's objects are valid by the fields of its custom resource definitions, and follow metrics of server and gateway.

No package of the schemas can be installed next to the others, so `keda.schema.yaml` has the fields that may be used.
"""

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from oaiserve.plugins.gateway.metrics import Ending
from oaiserve.telemetry import names
from tests.deploy import promql
from tests.deploy.manifests import CONTAINER, DEPLOYMENT, MANIFESTS, manifest

SCHEMA = yaml.safe_load((Path(__file__).parent / "keda.schema.yaml").read_text())
OBJECTS = ("keda/scaledobject.yaml", "keda-http/scaledobject.yaml", "keda-http/interceptorroute.yaml")
SCALED = OBJECTS[:2]
VERSIONS = {"ScaledObject": "keda.sh/v1alpha1", "InterceptorRoute": "http.keda.sh/v1beta1"}


def check(given: dict[str, Any]) -> None:
    assert given["apiVersion"] == VERSIONS[given["kind"]]
    assert given.keys() == {"apiVersion", "kind", "metadata", "spec"}
    jsonschema.validate(given["spec"], {"$defs": SCHEMA["$defs"], **SCHEMA[given["kind"]]})


@pytest.mark.parametrize("name", OBJECTS)
def test_the_object_is_valid(name: str) -> None:
    check(manifest(name))


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [(SCALED[0], "minReplicas", 0), (SCALED[0], "minReplicaCount", "0"), (OBJECTS[2], "timeouts", {"readiness": 60})],
)
def test_a_wrong_field_would_be_noticed(name: str, field: str, value: object) -> None:
    given = manifest(name)
    with pytest.raises(jsonschema.ValidationError):
        check({**given, "spec": {**given["spec"], field: value}})


@pytest.mark.parametrize("name", SCALED)
def test_the_deployment_is_scaled_from_zero_as_the_autoscaler_would_scale_it(name: str) -> None:
    spec = manifest(name)["spec"]
    autoscaler = MANIFESTS["horizontalpodautoscaler.yaml"]["spec"]
    assert spec["scaleTargetRef"] == {"name": DEPLOYMENT["metadata"]["name"]}
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (0, autoscaler["maxReplicas"])
    assert spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == autoscaler["behavior"]


@pytest.mark.parametrize("folder", ["keda", "keda-http"])
def test_the_component_replaces_the_autoscaler(folder: str) -> None:
    component = manifest(f"{folder}/kustomization.yaml")
    assert {f"{folder}/{name}" for name in component["resources"]} == {
        name for name in OBJECTS if name.startswith(f"{folder}/")
    }
    (patch,) = (yaml.safe_load(each["patch"]) for each in component["patches"])
    autoscaler = MANIFESTS["horizontalpodautoscaler.yaml"]
    assert patch == {"$patch": "delete", **{key: autoscaler[key] for key in ("apiVersion", "kind", "metadata")}}


def test_queries_name_metrics_that_exist_and_any_request_starts_a_server() -> None:
    waiting, asked = manifest("keda/scaledobject.yaml")["spec"]["triggers"]
    for trigger in (waiting, asked):
        query = trigger["metadata"]["query"].replace("service=", "job=")  # The operator adds both labels of a target.
        assert promql.unknown_names(query) == []
    autoscaler = MANIFESTS["horizontalpodautoscaler.yaml"]["spec"]["metrics"][0]["pods"]
    assert autoscaler["metric"]["name"] == names.ENGINE["num_waiting"].name in waiting["metadata"]["query"]
    assert waiting["metadata"]["threshold"] == autoscaler["target"]["averageValue"]
    # Requests that found no server count, too, and those that run keep theirs.
    assert Ending.NO_REPLICA in Ending
    assert "oaiserve_gateway_requests_total" in asked["metadata"]["query"]
    assert "ending" not in asked["metadata"]["query"]
    assert names.ENGINE["num_running"].name in asked["metadata"]["query"]
    assert asked["metadata"]["activationThreshold"] == "0"


def test_a_request_waits_as_long_as_a_server_may_take_to_start() -> None:
    route = manifest("keda-http/interceptorroute.yaml")
    service = MANIFESTS["service.yaml"]
    (port,) = service["spec"]["ports"]
    assert route["spec"]["target"] == {"service": service["metadata"]["name"], "port": port["port"]}
    probe = CONTAINER["startupProbe"]
    assert route["spec"]["timeouts"]["readiness"] == f"{probe['periodSeconds'] * probe['failureThreshold'] // 60}m"
    (trigger,) = manifest("keda-http/scaledobject.yaml")["spec"]["triggers"]
    assert trigger["metadata"]["interceptorRoute"] == route["metadata"]["name"]
