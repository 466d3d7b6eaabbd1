"""The wheel installs `oaiserve` and `loadtest`, each module of it imports, and the sdist builds the same wheel."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hatchling.builders.plugin.interface import BuilderInterface
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parent.parent
OF_EXTRAS = {"ray", "soundfile", "soxr", "triton"}  # packages that an installation without extras may lack

# Imports each module of the packages, and prints those that come from elsewhere than this environment.
IMPORT_ALL = f"""
import importlib, pkgutil, sys
import loadtest, oaiserve
for package in (oaiserve, loadtest):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name.partition(".")[0] not in {OF_EXTRAS}:
                raise ImportError(f"{{module.name}} needs {{error.name}}, which is not installed") from error
ours = {{name: module for name, module in sys.modules.items() if name.partition(".")[0] in
    ("oaiserve", "loadtest", "tools", "tests")}}
assert len(ours) > 400  # plug-ins may be missing
print(*(name for name, module in ours.items() if not module.__spec__.origin.startswith(sys.prefix)))
"""


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[type[BuilderInterface], Path], Path]:
    def build(builder: type[BuilderInterface], root: Path) -> Path:
        (built,) = builder(str(root)).build(directory=str(tmp_path_factory.mktemp("dist")), versions=["standard"])
        return Path(built)

    return build


@pytest.fixture(scope="module")
def wheel(build: Callable[[type[BuilderInterface], Path], Path]) -> Path:
    return build(WheelBuilder, ROOT)


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_has_two_packages_and_all_that_git_has_of_them(wheel: Path) -> None:
    files = {name for name in contents(wheel) if ".dist-info/" not in name}
    assert {name.partition("/")[0] for name in files} == {"oaiserve", "loadtest"}
    tracked = subprocess.run(["git", "ls-files", "oaiserve", "loadtest"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("this is no checkout of git, which lists what belongs into the wheel: run it in a clone")
    assert {name for name in tracked.stdout.splitlines() if (ROOT / name).exists()} <= files


def test_each_module_of_an_installed_wheel_imports_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """The environment has the wheel, and the packages of this one, but not its checkout."""
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv/bin/python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    (site_packages,) = subprocess.run(ask, check=True, capture_output=True, text=True).stdout.splitlines()
    # Python reads no .pth file in a folder that a .pth file names, so the editable installation there is not seen.
    (Path(site_packages) / "packages.pth").write_text(sysconfig.get_path("purelib"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run(python, "-c", IMPORT_ALL) == "\n"
    assert "Usage: oaiserve bench" in run(tmp_path / "venv/bin/oaiserve", "bench", "--help")
    for missing in ("tools", "tests"):
        assert run(python, "-c", f"import importlib.util; print(importlib.util.find_spec({missing!r}))") == "None\n"


def test_the_sdist_builds_the_same_wheel(
    build: Callable[[type[BuilderInterface], Path], Path], wheel: Path, tmp_path: Path
) -> None:
    sdist = build(SdistBuilder, ROOT)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    assert not (unpacked / "tools").exists()
    assert not (unpacked / "tests").exists()
    again = build(WheelBuilder, unpacked)
    assert again.name == wheel.name
    assert contents(again) == contents(wheel)
