"""The settings in the unit for systemd."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from oaiserve.app import TELEMETRY_CLOSE_SECONDS
from oaiserve.cli import VARIABLES_WITHOUT_FLAG
from oaiserve.config import ServerOptions
from oaiserve.http.server import CUT_SECONDS
from tests.deploy.paths import DEPLOY

LINES = (DEPLOY / "systemd" / "oaiserve.service").read_text().splitlines()
SETTINGS: dict[str, list[str]] = {}
for line in LINES:
    if match := re.fullmatch(r"(\w+)=(.*)", line):
        SETTINGS.setdefault(match[1], []).append(match[2])


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="not installed: systemd-analyze")
def test_systemd_finds_no_mistake(tmp_path: Path) -> None:
    """It says what it ignores, with the exit status 0. Its program has to exist."""
    unit = tmp_path / "oaiserve.service"
    unit.write_text("\n".join(LINES).replace("/opt/oaiserve/bin/oaiserve", sys.executable))
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_restarts_after_a_failure_but_not_after_a_wrong_setting() -> None:
    assert SETTINGS["Restart"] == ["on-failure"]
    assert SETTINGS["RestartPreventExitStatus"] == ["2"]


def test_the_unit_gives_a_shutdown_enough_time() -> None:
    takes = ServerOptions().drain_timeout_seconds + CUT_SECONDS + TELEMETRY_CLOSE_SECONDS
    assert int(SETTINGS["TimeoutStopSec"][0]) >= takes + 5


def test_the_environment_has_only_settings_of_the_server() -> None:
    variables = {pair.split("=")[0] for line in SETTINGS["Environment"] for pair in line.split()}
    settings = {name for name in variables if name.startswith("OAISERVE_")} - VARIABLES_WITHOUT_FLAG
    assert {name.removeprefix("OAISERVE_").lower() for name in settings} <= set(ServerOptions.__dataclass_fields__)
    assert "MODEL" in variables
    assert SETTINGS["ExecStart"][0].endswith("oaiserve serve ${MODEL}")


def test_the_unit_runs_with_few_rights() -> None:
    assert SETTINGS["CapabilityBoundingSet"] == [""]
    for name in ("NoNewPrivileges", "DynamicUser", "PrivateTmp", "ProtectHome", "RestrictSUIDSGID"):
        assert SETTINGS[name] == ["yes"]
    assert SETTINGS["ProtectSystem"] == ["strict"]
    assert (SETTINGS["CacheDirectoryMode"], SETTINGS["UMask"], SETTINGS["LimitCORE"]) == (["0700"], ["0077"], ["0"])
