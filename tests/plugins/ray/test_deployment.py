"""The files for Ray agree with each other and with the server, and with Ray where it is installed."""

import importlib
import inspect
import warnings
from typing import Any

import kubernetes_validate
import pytest
import yaml

from oaiserve.plugins.ray.settings import config_of
from tests.deploy.manifests import KUBERNETES
from tests.deploy.paths import DEPLOY

FOLDER = DEPLOY / "ray"
SERVE: dict[str, Any] = yaml.safe_load((FOLDER / "serve.yaml").read_text())
SERVICE: dict[str, Any] = yaml.safe_load((FOLDER / "rayservice.yaml").read_text())
(APPLICATION,) = SERVE["applications"]
CLUSTER = SERVICE["spec"]["rayClusterConfig"]
GROUPS = [CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"]]
PODS = [group["template"] for group in GROUPS]


def test_the_rayservice_runs_what_the_serve_file_says() -> None:
    assert yaml.safe_load(SERVICE["spec"]["serveConfigV2"]) == SERVE


def test_the_arguments_are_settings_of_the_server() -> None:
    config_of(APPLICATION["args"])


def test_the_file_names_a_function_of_oaiserve() -> None:
    module, name = APPLICATION["import_path"].split(":")
    assert inspect.isfunction(getattr(importlib.import_module(module), name))


def test_every_pod_is_valid_and_leaves_replicas_their_priority() -> None:
    for template in PODS:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, "spec": template["spec"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
        (container,) = template["spec"]["containers"]
        assert container["env"] == [{"name": "RAY_worker_niceness", "value": "0"}]


def test_a_pod_is_not_killed_while_a_replica_drains() -> None:
    drain = config_of(APPLICATION["args"]).server.drain_timeout_seconds
    assert PODS[1]["spec"]["terminationGracePeriodSeconds"] > drain


def test_ray_takes_the_file() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of Ray itself
        schema = pytest.importorskip("ray.serve.schema", reason="not installed: oaiserve[ray]")
    schema.ServeDeploySchema.model_validate(SERVE)
    assert CLUSTER["rayVersion"] == importlib.import_module("ray").__version__
