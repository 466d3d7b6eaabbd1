"""Models of the Hugging Face hub are fetched, no more of them than is read, and found again where the hub is away."""

import hashlib
import json
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote, urlsplit

import pytest

from oaiserve.errors import StartupError
from oaiserve.files.hub import fetched, files_of_model, gguf_files, local_source
from oaiserve.files.source import ModelSource, find_model
from tests.plain_http import Handler, running_http

REPOSITORY, COMMIT = "someone/model", "0" * 40
GGUFS = [
    "model-Q4_K_M.gguf",
    "model-IQ4_XS.gguf",
    "model-UD-Q4_K_XL.gguf",
    "Q8_0/model-Q8_0-00001-of-00002.gguf",
    "Q8_0/model-Q8_0-00002-of-00002.gguf",
    "mmproj-Q4_K_M.gguf",
]
MODEL = ["config.json", "tokenizer.json", "tokenizer.model", "model.safetensors", "modules.json", "1_Pool/config.json"]
NOT_READ = ["consolidated.safetensors", "onnx/model.onnx", "onnx/config.json", "README.md", "pytorch_model.bin", "x.py"]


class Hub(Handler):
    """A double of the Hugging Face hub: it serves a folder of files as one repository, to the hub's own client."""

    protocol_version = "HTTP/1.1"
    folder: ClassVar[Path]
    sent: ClassVar[list[str]]  # the names of the files
    hostile: ClassVar[list[str]] = []  # further names, of files that it sends, too

    def do_HEAD(self) -> None:
        self.do_GET(has_body=False)

    def do_GET(self, *, has_body: bool = True) -> None:
        path, headers, status, data = unquote(urlsplit(self.path).path), {}, 200, b""
        digests = {
            str(file.relative_to(self.folder)): hashlib.sha1(file.read_bytes()).hexdigest()
            for file in sorted(self.folder.rglob("*"))
            if file.is_file()
        } | dict.fromkeys(self.hostile, "0" * 40)
        if path.startswith(f"/api/models/{REPOSITORY}/tree/"):
            tree = [{"type": "file", "path": name, "size": 1, "oid": digest} for name, digest in digests.items()]
            data = json.dumps(tree).encode()
        elif path.startswith(f"/api/models/{REPOSITORY}"):
            siblings = [{"rfilename": name} for name in digests]
            data = json.dumps({"id": REPOSITORY, "sha": COMMIT, "siblings": siblings}).encode()
        elif (name := path.removeprefix(f"/{REPOSITORY}/resolve/{COMMIT}/")) in digests:
            self.sent += [name] * has_body
            data = b"{}" if name in self.hostile else (self.folder / name).read_bytes()
            headers = {"ETag": f'"{digests[name]}"', "X-Repo-Commit": COMMIT}
        elif path != "/":
            status, data, headers = 404, b"{}", {"X-Error-Code": "RepoNotFound"}
        self.send_response(status)
        for header, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(header, value)
        self.end_headers()
        if has_body:
            self.wfile.write(data)


def send_files_from(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.file_download.HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, list[str]]]:
    """Run a hub, and return the folder of its repository, and the names of what it has sent."""
    Hub.folder, Hub.sent = tmp_path / "repository", []
    Hub.folder.mkdir()
    with running_http(Hub) as address:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        send_files_from(address, monkeypatch)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        yield Hub.folder, Hub.sent


def put(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"content of {name}")


def away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oaiserve.files.hub.is_reachable", lambda: False)


def test_of_a_repository_only_what_is_read_is_fetched(
    hub: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, sent = hub
    put(folder, MODEL + NOT_READ)
    found = local_source(REPOSITORY)
    assert found == ModelSource(found.location, None, is_local=True)
    assert sorted(sent) == sorted(MODEL)
    assert all((Path(found.location) / name).read_text() == f"content of {name}" for name in MODEL)
    away(monkeypatch)
    assert local_source(REPOSITORY) == found
    assert len(sent) == len(MODEL)


def test_the_gguf_file_that_is_named_is_fetched(hub: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, sent = hub
    put(folder, GGUFS)
    found = local_source(f"{REPOSITORY}:q4_k_m")
    assert sorted(sent) == ["mmproj-Q4_K_M.gguf", "model-Q4_K_M.gguf"]  # the former reads images
    assert found.path.name == "model-Q4_K_M.gguf"
    assert found.path.read_text() == "content of model-Q4_K_M.gguf"
    parts = local_source(f"{REPOSITORY}:Q8_0")
    assert sorted(sent[2:]) == GGUFS[3:5]
    assert parts.path.name == "model-Q8_0-00001-of-00002.gguf"
    fetched(find_model(f"{REPOSITORY}:UD-Q4_K_XL"), with_media=False)
    assert sent[4:] == ["model-UD-Q4_K_XL.gguf"]
    away(monkeypatch)
    assert local_source(f"{REPOSITORY}:Q4_K_M") == found
    with pytest.raises(
        StartupError, match=r"not answer\. In its cache, .* no GGUF file of the name 'IQ4_XS': it has Q8_0"
    ):
        local_source(f"{REPOSITORY}:IQ4_XS")


@pytest.mark.parametrize("seed", range(20))
def test_no_name_in_a_repository_leads_out_of_the_cache(
    hub: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int
) -> None:
    rng, (folder, _) = random.Random(seed), hub
    put(folder, MODEL)
    parts = ("..", "../..", "../../../..", "x", str(tmp_path)[1:], "..\\..", "%2e%2e", ".", "")
    ways = ["/".join(rng.choices(parts, k=rng.randint(1, 6))) for _ in range(10)]
    monkeypatch.setattr(Hub, "hostile", [f"{way}/{rng.choice(('evil.json', 'config.json'))}" for way in ways])
    before = {path for path in tmp_path.parent.rglob("*") if path.is_file()}
    with suppress(StartupError, ValueError, OSError):
        local_source(REPOSITORY)
    new = {path for path in tmp_path.parent.rglob("*") if path.is_file()} - before
    assert all(path.is_relative_to(tmp_path / "cache") for path in new)


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        ("nothing answers", f"^'{REPOSITORY}' is no folder here, the Hugging Face hub does not"),
        ("no such model", "'someone/other', which is no folder here and so was looked for on the"),
        ("no file can be read", REPOSITORY),
    ],
)
def test_a_download_that_fails_names_what_may_help(
    fails: str, says: str, hub: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(hub[0], MODEL)
    if fails == "nothing answers":
        away(monkeypatch)
    if fails == "no file can be read":
        send_files_from("http://127.0.0.1:1", monkeypatch)
    with pytest.raises(StartupError, match=says) as raised:
        local_source("someone/other" if fails == "no such model" else REPOSITORY)
    said = str(raised.value)
    assert all(word in said for word in ("HTTPS_PROXY", "HF_ENDPOINT", "HF_TOKEN", "a folder", "oaiserve serve demo"))
    assert ".." not in said


@pytest.mark.parametrize(
    ("named", "files"),
    [
        ("Q4_K_M", GGUFS[:1]),
        ("iq4_xs", GGUFS[1:2]),
        ("Q4_K_XL", GGUFS[2:3]),
        ("model-UD-Q4_K_XL.gguf", GGUFS[2:3]),
        ("Q8_0", GGUFS[3:5]),
        ("Q8_0/model-Q8_0-00001-of-00002.gguf", GGUFS[3:5]),
    ],
)
def test_how_a_gguf_file_is_named(named: str, files: list[str]) -> None:
    assert gguf_files("a/b", reversed(GGUFS), named) == files


@pytest.mark.parametrize(
    ("files", "named", "said"),
    [
        *(
            (GGUFS, named, f"'a/b' has no GGUF file of the name '{named}': it has Q8_0/model-Q8_0.gguf, ")
            for named in ("Q4_K", "XS", "Q5_K_M", "model")
        ),
        (["a-Q8.gguf", "b-Q8.gguf"], "Q8", r"more than one GGUF file of the name 'Q8': it has a-Q8.gguf, b-Q8.gguf\."),
        (GGUFS, "", r"behind a colon, .* such as 'a/b:model-Q4_K_M\.gguf': it has Q8_0/"),
        (["config.json", "pytorch_model.bin"], "", "there are neither safetensors nor GGUF files"),
    ],
)
def test_a_repository_in_which_no_one_model_is_meant(files: list[str], named: str, said: str) -> None:
    with pytest.raises(StartupError, match=said):
        gguf_files("a/b", files, named) if named else files_of_model("a/b", files)


def test_weights_of_another_name_are_fetched() -> None:
    assert "gptq-4bit.safetensors" in files_of_model("a/b", ["config.json", "gptq-4bit.safetensors"])


def test_a_local_model_is_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert local_source(tmp_path) == ModelSource(str(tmp_path), None, is_local=True)
