"""The manifests of the gateway agree with each other and with the servers behind it."""

from typing import Any

import yaml

from oaiserve.plugins.gateway.app import create_gateway
from oaiserve.plugins.gateway.options import RouteOptions
from tests.deploy.manifests import CONTAINER as SERVER
from tests.deploy.manifests import MANIFESTS as SERVERS
from tests.deploy.manifests import POD as SERVER_POD
from tests.deploy.paths import DEPLOY

FOLDER = DEPLOY / "kubernetes" / "gateway"
MANIFESTS: dict[str, Any] = {file.name: yaml.safe_load(file.read_text()) for file in sorted(FOLDER.glob("*.yaml"))}
KUSTOMIZATION = MANIFESTS.pop("kustomization.yaml")
POD = MANIFESTS["deployment.yaml"]["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]


def test_the_kustomization_names_every_manifest() -> None:
    assert {*KUSTOMIZATION["resources"]} == {*MANIFESTS}
    assert [image["name"] for image in KUSTOMIZATION["images"]] == [CONTAINER["image"].split(":")[0]]


def test_the_gateway_asks_the_servers_by_their_headless_service() -> None:
    replicas = MANIFESTS["replicas.yaml"]
    (port,) = replicas["spec"]["ports"]
    (server_port,) = SERVER["ports"]
    assert replicas["spec"]["clusterIP"] == "None"
    assert replicas["spec"]["selector"].items() <= SERVER_POD["metadata"]["labels"].items()
    assert (port["targetPort"], port["port"]) == (server_port["name"], server_port["containerPort"])
    arguments = CONTAINER["args"]
    url = arguments[arguments.index("--replica") + 1]
    assert url == f"http://{replicas['metadata']['name']}:{port['port']}"
    assert RouteOptions(replica=(url,)).replica == (url,)
    monitored = SERVERS["servicemonitor.yaml"]["spec"]["selector"]["matchLabels"]
    assert not monitored.items() <= replicas["metadata"]["labels"].items()
    own = MANIFESTS["servicemonitor.yaml"]["spec"]["selector"]["matchLabels"]
    assert own.items() <= MANIFESTS["service.yaml"]["metadata"]["labels"].items()


def test_selectors_match_the_gateways_own_pods_and_no_servers() -> None:
    labels = POD["metadata"]["labels"]
    for selector in (
        MANIFESTS["deployment.yaml"]["spec"]["selector"]["matchLabels"],
        MANIFESTS["service.yaml"]["spec"]["selector"],
        MANIFESTS["networkpolicy.yaml"]["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector == labels
        assert not selector.items() <= SERVER_POD["metadata"]["labels"].items()
    _, to_servers, to_collectors = MANIFESTS["networkpolicy.yaml"]["spec"]["egress"]
    assert [port["port"] for port in to_collectors["ports"]] == [4317]
    (peer,) = to_servers["to"]
    assert peer["podSelector"]["matchLabels"].items() <= SERVER_POD["metadata"]["labels"].items()


def test_probes_and_settings_are_those_of_the_gateway() -> None:
    app, _ = create_gateway(RouteOptions(replica=("http://a:1",)))
    paths = {CONTAINER[f"{kind}Probe"]["httpGet"]["path"] for kind in ("readiness", "liveness")}
    assert paths <= {route.path for route in app.routes}  # type: ignore[attr-defined]
    command, *arguments = CONTAINER["args"]
    flags = {argument for argument in arguments if argument.startswith("--")}
    fields = RouteOptions.__dataclass_fields__
    assert command == "route"
    assert {flag.removeprefix("--").replace("-", "_") for flag in flags} <= fields.keys()
    settings = {variable["name"].removeprefix("OAISERVE_").lower() for variable in CONTAINER["env"]}
    assert settings == {"replica_key"} <= fields.keys()


def test_the_pod_gives_a_shutdown_enough_time() -> None:
    arguments = CONTAINER["args"]
    drain_seconds = int(arguments[arguments.index("--drain-timeout-seconds") + 1])
    _, pause_seconds = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
    assert POD["spec"]["terminationGracePeriodSeconds"] >= int(pause_seconds) + drain_seconds + 10
