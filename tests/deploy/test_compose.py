"""The compose files are valid by the schema of compose, their parts fit together, and the health check works."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from oaiserve import cli
from oaiserve.app import TELEMETRY_CLOSE_SECONDS, create_app
from oaiserve.config import Config, ServerOptions
from oaiserve.http.server import CUT_SECONDS
from tests.certificates import certificates
from tests.deploy.paths import DEPLOY, ROOT
from tests.routes.doubles import FakeEngine, FakeTelemetry
from tests.serving import RunningServer

__all__ = ["certificates"]

FOLDER = DEPLOY / "compose"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
STAGES = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]


@pytest.mark.parametrize("name", ["compose.yaml", "compose.cuda.yaml"])
def test_the_file_is_valid_by_the_schema_of_compose(name: str) -> None:
    jsonschema.validate(yaml.safe_load((FOLDER / name).read_text()), get_builtin_schema("vendor.compose-spec"))


def test_mounted_and_built_files_exist() -> None:
    for service in SERVICES.values():
        for source in (volume.split(":")[0] for volume in service.get("volumes", [])):
            assert (FOLDER / source).exists() if source.startswith(".") else source in COMPOSE["volumes"]
    build = SERVICES["oaiserve"]["build"]
    context = FOLDER / build["context"]
    assert context.resolve() == ROOT
    assert (context / build["dockerfile"]).resolve() == FOLDER / "Dockerfile"


def test_addresses_name_services_of_the_compose_file() -> None:
    prometheus = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    targets = [t for job in prometheus["scrape_configs"] for c in job["static_configs"] for t in c["targets"]]
    sources = yaml.safe_load((DEPLOY / "grafana" / "provisioning" / "datasources" / "oaiserve.yml").read_text())
    urls = [source["url"].removeprefix("http://") for source in sources["datasources"]]
    collector = yaml.safe_load((FOLDER / "collector.yaml").read_text())
    urls += [exporter["endpoint"] for exporter in collector["exporters"].values()]
    urls += [SERVICES["oaiserve"]["environment"]["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"].split("/")[2]]
    hosts = {url.split(":")[0] for url in (*targets, *urls)}
    assert hosts == {*SERVICES, "localhost"} - {"grafana"}
    assert urls[-1].split(":")[1] == collector["receivers"]["otlp"]["protocols"]["http"]["endpoint"].split(":")[1]


def test_the_collector_has_all_parts_of_its_pipelines() -> None:
    collector = yaml.safe_load((FOLDER / "collector.yaml").read_text())
    for pipeline in collector["service"]["pipelines"].values():
        for kind, parts in pipeline.items():
            assert set(parts) <= set(collector[kind])


def test_images_have_versions_and_ports_are_on_loopback() -> None:
    for service in SERVICES.values():
        assert re.fullmatch(r"[\w/-]+:(?!latest)[\w.]+", service["image"])
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def test_all_containers_run_with_few_rights_and_the_server_cannot_change_its_files() -> None:
    for service in SERVICES.values():
        assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
    server = SERVICES["oaiserve"]
    assert (server["read_only"], server["ulimits"]) == (True, {"core": 0})


def test_prometheus_keeps_exemplars_and_grafana_has_its_home_dashboard() -> None:
    assert "--enable-feature=exemplar-storage" in SERVICES["prometheus"]["command"]
    mounts = dict(volume.split(":")[:2][::-1] for volume in SERVICES["grafana"]["volumes"])
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (FOLDER / mounts[str(home.parent)] / home.name).is_file()
    providers = yaml.safe_load((DEPLOY / "grafana" / "provisioning" / "dashboards" / "oaiserve.yml").read_text())
    assert [provider["options"]["path"] for provider in providers["providers"]] == [str(home.parent)]


def test_the_container_gives_a_shutdown_enough_time() -> None:
    takes = ServerOptions().drain_timeout_seconds + CUT_SECONDS + TELEMETRY_CLOSE_SECONDS
    assert int(SERVICES["oaiserve"]["stop_grace_period"].removesuffix("s")) >= takes + 5


# -- the image --------------------------------------------------------------------------------------------------------


def test_the_image_has_two_stages_and_runs_as_an_unprivileged_user() -> None:
    assert len(STAGES) == 2
    assert "COPY --from=build" in STAGES[1]
    assert re.search(r"^USER 10001:10001$", STAGES[1], re.MULTILINE)
    assert "uv" not in STAGES[1]


def test_copied_files_exist_and_are_not_ignored() -> None:
    copied = {
        name for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE) for name in line.split()[:-1]
    }
    allowed = re.findall(r"^!(.*)$", (FOLDER / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    assert copied == set(allowed)
    assert all((ROOT / name).exists() for name in copied)


def test_an_image_has_the_labels_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', STAGES[1]))
    assert labels == {
        "title": project["name"],
        "description": project["description"],
        "licenses": project["license"],
        "source": project["urls"]["Source"],
        "documentation": project["urls"]["Documentation"],
        "version": "$VERSION",
        "revision": "$REVISION",
    }
    assert {"VERSION", "REVISION"} <= {*re.findall(r"^ARG (\w+)=", STAGES[1], re.MULTILINE)}


def runs(stage: str) -> list[str]:
    """Return the scripts of the RUN instructions, without docker's own options."""
    lines = re.findall(r"^RUN ((?:.*\\\n)*.*)$", stage, re.MULTILINE)
    return [re.sub(r"--mount=\S+|\\\n", "", line).strip() for line in lines]


@pytest.mark.parametrize(
    ("variant", "packages"),
    [
        ("cpu", "--torch-backend=cpu --requirement pyproject.toml"),
        ("cuda", "--requirement pyproject.toml"),
        ("gateway", "--requirement gateway.txt"),
        ("rocm", None),
    ],
)
def test_the_scripts_of_the_image_install_by_its_variant(variant: str, packages: str | None, tmp_path: Path) -> None:
    for name in ("apt-get", "pip", "uv", "python", "rm", "useradd", "install"):
        with_native_code = "$HATCH_BUILD_HOOK_ENABLE_CUSTOM"
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{name} $*" {with_native_code} >> {tmp_path}/ran\n')
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}", "VARIANT": variant}
    codes = [subprocess.run(["/bin/sh", "-ec", run], env=env).returncode for stage in STAGES for run in runs(stage)]
    ran = (tmp_path / "ran").read_text()
    if packages is None:
        assert sorted(codes)[-1] == 1
    else:
        assert set(codes) == {0}
        assert f"uv pip install --constraint constraints.txt {packages}\n" in ran
        native = "" if variant == "gateway" else " true"
        assert f"uv pip install --no-deps .{native}\n" in ran
        assert ("install -y --no-install-recommends gcc libc6-dev" in ran) == (variant == "cuda")


def test_the_image_serves_what_its_command_and_its_environment_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for pair in re.findall(r"OAISERVE_\w+=\S+", STAGES[1]):
        monkeypatch.setenv(*pair.split("="))
    (program,), arguments = (
        json.loads(re.findall(rf"^{each} (\[.*\])$", STAGES[1], re.MULTILINE)[0]) for each in ("ENTRYPOINT", "CMD")
    )
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts[program] == "oaiserve.__main__:main"
    monkeypatch.setenv("OAISERVE_PORT", "0")  # The image's own port may be taken here.
    served: list[Config] = []
    assert cli.main(arguments, lambda config, sock: served.append(config) or 0) == 0
    (config,) = served
    assert (config.model, config.server.host, config.server.log_format) == ("demo", "0.0.0.0", "json")
    assert f"EXPOSE {ServerOptions().port}\n" in STAGES[1]


def test_the_environment_has_only_settings_of_the_server() -> None:
    settings = set(re.findall(r"OAISERVE_(\w+)=", DOCKERFILE)) - {"CACHE"}
    settings |= set(re.findall(r"OAISERVE_(\w+):", (FOLDER / "compose.yaml").read_text()))
    assert {name.lower() for name in settings} <= set(ServerOptions.__dataclass_fields__)


def health_of(port: int, **variables: str) -> int:
    """Run the command of the HEALTHCHECK against this port, and return its exit status."""
    command: list[Any] = json.loads(re.findall(r"^HEALTHCHECK .*\\\n +CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)[0])
    assert command[0] == "python"
    env = {**os.environ, "OAISERVE_PORT": str(port), **variables}
    done = subprocess.run([sys.executable, *command[1:]], env=env, capture_output=True, check=False)
    return done.returncode


def test_the_health_check_has_only_flags_that_podman_4_reads() -> None:
    (flags,) = re.findall(r"^HEALTHCHECK (.*)\\$", DOCKERFILE, re.MULTILINE)
    assert set(re.findall(r"--([a-z-]+)=", flags)) <= {"interval", "timeout", "start-period", "retries"}


@pytest.mark.parametrize(("status", "exit_status"), [(200, 0), (503, 1)])
def test_the_health_check_requests_ready_and_fails_if_nothing_listens(status: int, exit_status: int) -> None:
    app = Starlette(routes=[Route("/ready", lambda request: Response(status_code=status))])
    with RunningServer(app, ServerOptions(drain_timeout_seconds=0)) as server:
        assert health_of(server.port) == exit_status
    assert health_of(server.port) == 1


@pytest.mark.openssl
def test_the_health_check_reads_the_key_and_whether_there_is_tls(certificates: dict[str, Path]) -> None:
    tls = {"tls_certificate": certificates["sound"], "tls_key": certificates["sound"]}
    options = ServerOptions(api_key=("secret",), guard_all=True, drain_timeout_seconds=0, **tls)
    app = create_app(Config("demo", options), FakeEngine(), FakeTelemetry())
    with RunningServer(app, options) as server:
        variables = {"OAISERVE_API_KEY": "secret another", "OAISERVE_TLS_CERTIFICATE": "certificate.pem"}
        assert health_of(server.port, **variables) == 0
        assert health_of(server.port, **variables | {"OAISERVE_API_KEY": "other"}) == 1
        assert health_of(server.port, OAISERVE_API_KEY="secret") == 1
