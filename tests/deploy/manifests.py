"""The manifests of the server for Kubernetes, with which those of the gateway and of Ray must agree."""

from typing import Any

import yaml

from tests.deploy.paths import DEPLOY

FOLDER = DEPLOY / "kubernetes"
KUBERNETES = "1.37.0"
NOT_MANIFESTS = {"kustomization.yaml", "prometheus-adapter.yaml"}


def manifest(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    return loaded


MANIFESTS = {file.name: manifest(file.name) for file in sorted(FOLDER.glob("*.yaml")) if file.name not in NOT_MANIFESTS}
OF_KEDA = {"scaledobject.yaml", "interceptorroute.yaml"}  # `test_keda.py` checks them
NO_SCHEMA = {"servicemonitor.yaml", "prometheusrule.yaml", "inferencepool.yaml", *OF_KEDA, *NOT_MANIFESTS}
WITH_SCHEMA = [f"{at.relative_to(FOLDER)}" for at in sorted(FOLDER.rglob("*.yaml")) if at.name not in NO_SCHEMA]
DEPLOYMENT = MANIFESTS["deployment.yaml"]
POD = DEPLOYMENT["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]
