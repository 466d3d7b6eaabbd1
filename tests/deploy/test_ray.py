"""The files for Ray agree with each other and with the server, and with Ray where it is installed."""

import importlib
import warnings
from typing import Any

import kubernetes_validate
import pytest
import yaml

from oaiserve.scale.on_ray.settings import config_of
from tests.deploy.manifests import KUBERNETES
from tests.deploy.paths import DEPLOY

FOLDER = DEPLOY / "ray"
SERVE: dict[str, Any] = yaml.safe_load((FOLDER / "serve.yaml").read_text())
SERVICE: dict[str, Any] = yaml.safe_load((FOLDER / "rayservice.yaml").read_text())
LINES = [line for line in (FOLDER / "ray.env").read_text().splitlines() if line and not line.startswith("#")]
SETTINGS = dict(line.split("=", 1) for line in LINES)
(APPLICATION,) = SERVE["applications"]
CLUSTER = SERVICE["spec"]["rayClusterConfig"]
GROUPS = [CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"]]
PODS = [group["template"] for group in GROUPS]


def test_the_rayservice_runs_what_the_serve_file_says() -> None:
    assert yaml.safe_load(SERVICE["spec"]["serveConfigV2"]) == SERVE


def test_the_arguments_are_settings_of_the_server() -> None:
    config_of(APPLICATION["args"])


def test_every_pod_is_valid_and_has_these_settings() -> None:
    for template in PODS:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, "spec": template["spec"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
        (container,) = template["spec"]["containers"]
        assert container["envFrom"] == [{"configMapRef": {"name": "oaiserve-ray"}}]


def test_a_pod_is_not_killed_while_a_replica_drains() -> None:
    notice = float(SETTINGS["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"])
    drain = notice + config_of(APPLICATION["args"]).server.drain_timeout_seconds
    assert PODS[1]["spec"]["terminationGracePeriodSeconds"] > drain


def test_ray_knows_these_settings_and_takes_the_file() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of Ray itself
        constants = pytest.importorskip("ray.serve._private.constants", reason="not installed: oaiserve[ray]")
        schema = importlib.import_module("ray.serve.schema")
    with open(constants.__file__) as source:
        text = source.read()
    of_serve = [name for name in SETTINGS if name.startswith("RAY_SERVE_")]  # Ray's core has the others
    assert [name for name in of_serve if f'"{name}"' not in text] == []
    schema.ServeDeploySchema.model_validate(SERVE)
    assert CLUSTER["rayVersion"] == importlib.import_module("ray").__version__
