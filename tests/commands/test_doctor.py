"""What a machine means for serving is said in sentences, and the exit code says whether it can serve."""

import errno
import os
import resource
import socket
import tempfile
from pathlib import Path
from typing import BinaryIO

import pytest

from oaiserve import cli
from oaiserve.checkpoints import hub
from oaiserve.commands import doctor
from oaiserve.plugin import Plugin
from oaiserve.plugin.parts import InnerParts


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "is_reachable", lambda: False)
    monkeypatch.setattr(doctor, "container_bytes", lambda: None)
    monkeypatch.setattr(doctor, "free_bytes", lambda: 30_000_000_000)


def test_each_part_has_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in ("machine", "instructions", "memory 30 GB", "open files", "versions oaiserve", "compiler", "GPU"):
        assert f" {part} " in f" {shown} "
    assert "The Hugging Face hub cannot be reached" in shown
    assert shown.endswith("This machine can serve models. Try it: oaiserve serve demo")


def test_a_machine_on_which_serving_fails_has_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "free_bytes", lambda: 1_000_000_000)
    monkeypatch.setattr(doctor, "PACKAGES", ("torch", "no-such-package"))
    assert cli.main(["doctor"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "Even the demo model needs 1.5 GB." in shown
    assert "Missing: no-such-package. Install them with: pip install" in shown
    assert shown.endswith("This machine cannot serve models: see memory, versions.")


def test_findings_of_plugins_are_listed_and_one_that_fails_has_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> list[tuple[str, str]]:
        raise RuntimeError("no such boiler")

    broken = Plugin(name="broken", inner=InnerParts(findings=fail))
    boiler = Plugin(name="boiler", inner=InnerParts(findings=lambda: [("boiler", "The water is hot.")]))
    monkeypatch.setattr(doctor, "own_plugins", lambda: [broken, boiler])
    assert cli.main(["doctor"]) == 0
    assert "boiler The water is hot." in " ".join(capsys.readouterr().out.split())
    assert "Plug-in 'broken' could not make its findings, and has none" in caplog.text


def test_a_cgroup_counts_where_it_leaves_less() -> None:
    assert doctor.memory(30_000_000_000, 3_000_000_000).sentences.startswith(
        "3 GB are free of 30 GB, as the container's limit leaves no more: enough for a model of about 1 billion"
    )
    assert doctor.memory(3_000_000_000, 30_000_000_000).sentences.startswith("3 GB are free: ")


@pytest.mark.parametrize(
    ("features", "said"),
    [({"avx512f", "amx_bf16"}, "AMX:"), ({"avx2", "avx512f"}, "AVX-512:"), ({"avx2"}, "AVX2:"), (set(), "has no AVX2")],
)
def test_instruction_sets_say_how_fast_it_will_be(features: set[str], said: str) -> None:
    assert said in doctor.instruction_sets("x86_64", frozenset(features)).sentences


@pytest.mark.parametrize(
    ("soft", "hard", "said", "fails"),
    [
        (
            1024,
            20_000,
            "20,000 files and connections can be open at once: a server raises its limit of 1,024.",
            False,
        ),
        (20_000, 20_000, "At most 20,000 files and connections can be open at once.", False),
        (1024, resource.RLIM_INFINITY, "There is no limit.", False),
        (32, 32, "That is few, because each connection takes one. Raise it, as with: ulimit -n 1024", True),
    ],
)
def test_limit_of_open_files_is_reported_in_a_sentence(soft: int, hard: int, said: str, fails: bool) -> None:
    finding = doctor.open_files(soft, hard)
    assert finding.sentences.endswith(said)
    assert finding.fails == fails


def test_a_file_where_the_cache_should_be_is_named_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes").write_text("mine")
    monkeypatch.setenv("OAISERVE_CACHE", str(tmp_path / "notes"))
    cli.main(["doctor"])
    assert "notes cannot be used" in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "notes").read_text() == "mine"


@pytest.mark.parametrize(
    ("variable", "part"), [("OAISERVE_CACHE", "cache"), ("HF_HUB_CACHE", "hub's cache")], ids=["ours", "the hub's"]
)
def test_cache_that_cannot_be_written_to_has_exit_code_1(
    variable: str, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = tmp_path / "full"
    full.mkdir(mode=0o700)
    monkeypatch.setenv("OAISERVE_CACHE", str(tmp_path))
    monkeypatch.setenv(variable, str(full))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", os.environ.get("HF_HUB_CACHE", str(tmp_path)))
    temporary_file = tempfile.TemporaryFile

    def write(dir: Path) -> BinaryIO:  # The tests may run as root, to whom no folder is forbidden.
        if dir == full:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return temporary_file(dir=dir)

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", write)
    assert cli.main(["doctor"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{part} {full} cannot be used: no file can be written in {full} (Read-only file system)." in shown
    assert shown.endswith(f"models that are on its disk, but it cannot store others: see {part}.")


def test_unreachable_hub_is_blamed_on_the_proxy_that_is_set(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://hub.test")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with socket.socket() as closed:  # It has the port, on which nothing listens.
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        monkeypatch.setenv("https_proxy", f"http://user:secret@127.0.0.1:{port}")
        cli.main(["doctor"])
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        f"The proxy that https_proxy names, http://127.0.0.1:{port}, does not answer (Connection refused): "
        "correct https_proxy, or unset it"
    ) in shown
    assert "set HTTPS_PROXY" not in shown


def test_models_that_are_not_downloaded_because_of_a_setting_are_not_blamed_on_the_hub(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    cli.main(["doctor"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "HF_HUB_OFFLINE is set, so no others are downloaded." in shown
    assert "cannot be reached" not in shown
