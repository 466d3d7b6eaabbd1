"""A gateway starts with the packages of deploy/compose/gateway.txt alone, and so without torch."""

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
import urllib.request
from importlib.metadata import packages_distributions, requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.paths import DEPLOY, ROOT

LISTED = [line for line in (DEPLOY / "compose" / "gateway.txt").read_text().splitlines() if line]
# Runs the command line in a process in which other packages cannot be imported.
WITHOUT_OTHERS = """
import json, sys

class OnlyThese:
    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in self.names and top not in sys.stdlib_module_names:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)

sys.meta_path.insert(0, OnlyThese({"oaiserve", *json.loads(sys.argv.pop(1))}))
from oaiserve.cli import main
sys.exit(main())
"""


def installed_with(names: list[str]) -> set[str]:
    """Return the distributions that pip installs for these requirements."""
    found: set[str] = set()
    waiting = [Requirement(name) for name in names]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker is not None and not requirement.marker.evaluate()):
            continue
        found.add(name)
        for text in requires(name) or ():
            needed = Requirement(text)
            extras = requirement.extras or {""}
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                needed.marker = None
                waiting.append(needed)
    return found


def test_packages_of_the_image_are_those_of_the_project_without_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(LISTED) <= set(project["dependencies"])
    assert not {"torch", "transformers", "tokenizers", "safetensors"} & installed_with(LISTED)


def test_a_gateway_serves_without_the_other_packages() -> None:
    installed = installed_with(LISTED)
    modules = [
        module
        for module, names in packages_distributions().items()
        if any(canonicalize_name(name) in installed for name in names)
    ]
    flags = ["route", "--replica", "http://127.0.0.1:9", "--port", "0", "--log-format", "console"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    command = [sys.executable, "-c", WITHOUT_OTHERS, json.dumps(modules), *flags]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = next(found[1] for line in process.stderr if (found := re.search(r" at (http://\S+)/v1", line)))
        with urllib.request.urlopen(f"{url}/metrics") as answer:
            assert b"oaiserve_gateway_requests_total" in answer.read()
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
    assert process.returncode == 0, rest
    assert "Traceback" not in rest
