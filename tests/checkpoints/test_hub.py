"""Models of the Hugging Face hub are fetched, no more of them than is read, and found again where the hub is away."""

import hashlib
import json
import random
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import ClassVar
from urllib.parse import unquote, urlsplit

import pytest

from oaiserve.checkpoints import hub as hub_files
from oaiserve.checkpoints.hub import fetched, files_of_model, gguf_files, local_source
from oaiserve.checkpoints.source import ModelSource, find_model
from oaiserve.errors import StartupError
from tests.plain_http import Handler, running_http
from tests.waiting import wait_until

REPOSITORY = "someone/model"
COMMIT = "0" * 40
GGUFS = [
    "model-Q4_K_M.gguf",
    "model-IQ4_XS.gguf",
    "model-UD-Q4_K_XL.gguf",
    "Q8_0/model-Q8_0-00001-of-00002.gguf",
    "Q8_0/model-Q8_0-00002-of-00002.gguf",
    "mmproj-Q4_K_M.gguf",
]
MODEL = [
    *("config.json", "tokenizer.json", "tokenizer.model", "model.safetensors", "modules.json", "1_Pool/config.json"),
    "additional_chat_templates/tool_use.jinja",
]
INDEX = "model.safetensors.index.json"
SHARDED = ["config.json", INDEX, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
NOT_READ = ["consolidated.safetensors", "onnx/model.onnx", "onnx/config.json", "README.md", "pytorch_model.bin", "x.py"]


class Hub(Handler):
    """A double of the Hugging Face hub: it serves a folder of files as one repository, to the hub's own client."""

    protocol_version = "HTTP/1.1"
    folder: ClassVar[Path]
    sent: ClassVar[list[str]]  # the names of the files
    hostile: ClassVar[list[str]] = []  # further names, of files that it sends, too
    commit: ClassVar[str] = COMMIT
    refusal: ClassVar[tuple[str, int]] = ("", 200)  # the start of the paths with this status; 0: it never answers
    num_requests: ClassVar[int] = 0  # without those for the list of agents, which the client fetches once a day
    may_answer: ClassVar[Event] = Event()

    def do_HEAD(self) -> None:
        self.do_GET(has_body=False)

    def do_GET(self, *, has_body: bool = True) -> None:
        path = unquote(urlsplit(self.path).path)
        headers = {}
        status = 200
        data = b""
        if path == "/api/agent-harnesses":
            self.send_error(404)
            return
        Hub.num_requests += 1
        digests = {
            str(file.relative_to(self.folder)): hashlib.sha1(file.read_bytes()).hexdigest()
            for file in sorted(self.folder.rglob("*"))
            if file.is_file()
        } | dict.fromkeys(self.hostile, "0" * 40)
        prefix, refused = self.refusal
        if refused != 200 and path.startswith(prefix):
            if not refused:
                self.may_answer.wait()
                self.close_connection = True
                return
            status = refused
            headers = {"Connection": "close"}
        elif path.startswith(f"/api/models/{REPOSITORY}/tree/"):
            tree = [{"type": "file", "path": name, "size": 1, "oid": digest} for name, digest in digests.items()]
            data = json.dumps(tree).encode()
        elif path.startswith(f"/api/models/{REPOSITORY}"):
            siblings = [{"rfilename": name} for name in digests]
            data = json.dumps({"id": REPOSITORY, "sha": self.commit, "siblings": siblings}).encode()
        elif (name := path.removeprefix(f"/{REPOSITORY}/resolve/{self.commit}/")) in digests:
            self.sent += [name] * has_body
            data = b"{}" if name in self.hostile else (self.folder / name).read_bytes()
            headers = {"ETag": f'"{digests[name]}"', "X-Repo-Commit": self.commit}
        elif path != "/":
            status = 404
            data = b"{}"
            headers = {"X-Error-Code": "RepoNotFound"}
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
    Hub.folder = tmp_path / "repository"
    Hub.sent = []
    Hub.num_requests = 0
    monkeypatch.setattr(Hub, "may_answer", Event())
    monkeypatch.setattr(hub_files, "RETRY_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(hub_files, "TIMEOUT_SECONDS", 60.0)  # On a busy machine, answers take long.
    Hub.folder.mkdir()
    with running_http(Hub) as address:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        send_files_from(address, monkeypatch)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        yield Hub.folder, Hub.sent
        Hub.may_answer.set()


def put(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"content of {name}")


def requests_arrive(number: int) -> bool:
    """Wait until this number of requests has arrived, and return whether there were no more.

    A client that stops waiting may be faster than the hub's threads.
    """
    wait_until(lambda: Hub.num_requests >= number)
    return Hub.num_requests == number


TROUBLES = (401, 403, 404, 429, 500, 502, 503, 0, "no such host", "no connection", "HF_HUB_OFFLINE")


def break_hub(trouble: int | str, monkeypatch: pytest.MonkeyPatch, prefix: str = "") -> None:
    if trouble in (0, "no such host"):  # No answer ends the wait.
        monkeypatch.setattr(hub_files, "TIMEOUT_SECONDS", 0.2)
    if isinstance(trouble, int):
        monkeypatch.setattr(Hub, "refusal", (prefix, trouble))
    elif trouble == "HF_HUB_OFFLINE":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    else:
        address = "http://hub.invalid" if trouble == "no such host" else "http://127.0.0.1:1"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)


def test_of_a_repository_only_what_is_read_is_fetched(
    hub: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, sent = hub
    put(folder, MODEL + NOT_READ)
    source = local_source(REPOSITORY)
    assert source == ModelSource(source.location, None, is_local=True)
    assert sorted(sent) == sorted(MODEL)
    assert all((Path(source.location) / name).read_text() == f"content of {name}" for name in MODEL)
    num_requests = Hub.num_requests
    assert local_source(REPOSITORY) == source
    assert (len(sent), Hub.num_requests) == (len(MODEL), num_requests + 1)


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_cached_model_starts_at_once_when_the_hub_has_trouble(
    trouble: int | str, hub: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(hub[0], MODEL + GGUFS)
    models = (REPOSITORY, f"{REPOSITORY}:Q4_K_M", f"{REPOSITORY}:Q8_0")
    sources = [local_source(model) for model in models]
    break_hub(trouble, monkeypatch)
    Hub.num_requests = 0
    caplog.set_level("WARNING", "oaiserve")
    assert [local_source(model) for model in models] == sources
    assert requests_arrive(len(models) if isinstance(trouble, int) else 0)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == (0 if trouble == "HF_HUB_OFFLINE" else len(models))
    assert all("starts from the cache, because the Hugging Face hub" in warning for warning in warnings)
    assert not isinstance(trouble, int) or all(str(trouble or "does not answer") in warning for warning in warnings)


@pytest.mark.parametrize(
    ("trouble", "says", "num_requests"),
    [
        (401, "without a valid token .status 401., and its cache has none such. Check the name, or set HF_TOKEN", 1),
        (403, r"gated .status 403.*Accept its licence at http://127\.0\.0\.1:\d+/someone/model, and set HF_TOKEN", 1),
        (404, "has no such model .status 404.*Check the name", 1),
        (429, "too many requests from here .status 429.*Wait some minutes", 3),
        (500, "trouble of its own .status 500.*Try again later", 3),
        (0, "does not answer .*HTTPS_PROXY.*HF_ENDPOINT", 1),
        ("no such host", "does not answer .*HTTPS_PROXY.*HF_ENDPOINT", 0),
        ("HF_HUB_OFFLINE", "is not asked, because HF_HUB_OFFLINE is set", 0),
    ],
)
def test_trouble_of_the_hub_is_explained_when_nothing_is_cached(
    trouble: int | str,
    says: str,
    num_requests: int,
    hub: tuple[Path, list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put(hub[0], MODEL)
    break_hub(trouble, monkeypatch)
    with pytest.raises(StartupError, match=f"No model could be loaded from '{REPOSITORY}', which is no folder.*{says}"):
        local_source(REPOSITORY)
    assert requests_arrive(num_requests)


def test_files_that_cannot_be_stored_are_no_trouble_of_the_hub(
    hub: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(hub[0], MODEL)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    says = r"the hub sends files that cannot be stored in .*/file/hub/.* \(Not a directory\).* Set HF_HOME to a folder"
    with pytest.raises(StartupError, match=says) as refusal:
        local_source(REPOSITORY)
    assert "HTTPS_PROXY" not in str(refusal.value)


def test_a_gated_file_is_refused_with_its_licence(hub: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    put(hub[0], MODEL)
    break_hub(403, monkeypatch, f"/{REPOSITORY}/resolve/")
    with pytest.raises(StartupError, match="Accept its licence at"):
        local_source(REPOSITORY)


@pytest.mark.parametrize(
    ("files", "lost", "model"),
    [
        (MODEL, "tokenizer.json", REPOSITORY),
        (MODEL, "config.json", REPOSITORY),
        (SHARDED, "model-00002-of-00002.safetensors", REPOSITORY),
        (GGUFS, GGUFS[4], f"{REPOSITORY}:Q8_0"),
    ],
)
@pytest.mark.parametrize("is_listed", [True, False])
def test_a_download_that_was_cut_off_does_not_start(
    files: list[str],
    lost: str,
    model: str,
    is_listed: bool,
    hub: tuple[Path, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Older clients of the hub store no list of a repository's files."""
    put(hub[0], files)
    (hub[0] / INDEX).write_text(json.dumps({"weight_map": {name: name for name in SHARDED if "-of-" in name}}))
    whole = local_source(model)
    (lost_path,) = (tmp_path / "cache").glob(f"*/snapshots/*/{lost}")
    lost_path.unlink()
    if not is_listed:
        shutil.rmtree(next((tmp_path / "cache").glob("*/trees")))
    break_hub(503, monkeypatch)
    if lost != "tokenizer.json" or is_listed:  # A model may lack this file, for all that is known then.
        with pytest.raises(StartupError, match=f"its cache lacks {lost}, as after a download that was cut off"):
            local_source(model)
    monkeypatch.setattr(Hub, "refusal", ("", 200))
    assert local_source(model) == whole
    assert lost_path.is_file()


@pytest.mark.parametrize(
    ("model", "lost", "warns"),
    [
        (REPOSITORY, ("LICENSE.txt", "vocab.json", "other.json"), False),
        (f"{REPOSITORY}:Q4_K_M", ("mmproj-Q4_K_M.gguf",), True),
    ],
)
def test_a_copy_by_another_program_starts_without_what_it_left_out(
    model: str,
    lost: tuple[str, ...],
    warns: bool,
    hub: tuple[Path, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    put(hub[0], [*MODEL, *GGUFS, *lost])
    whole = local_source(model)
    for name in lost:
        next((tmp_path / "cache").glob(f"*/snapshots/*/{name}")).unlink()
    break_hub(429, monkeypatch)
    assert local_source(model) == whole
    assert ("lacks mmproj-Q4_K_M.gguf, so no images are read" in caplog.text) == warns


def test_an_older_copy_starts_when_a_newer_one_was_cut_off(
    hub: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(hub[0], MODEL)
    older = local_source(REPOSITORY)
    monkeypatch.setattr(Hub, "commit", "1" * 40)
    (hub[0] / "config.json").write_text("newer")
    break_hub(403, monkeypatch, f"/{REPOSITORY}/resolve/")
    assert local_source(REPOSITORY) == older
    break_hub(403, monkeypatch)
    assert local_source(REPOSITORY) == older
    monkeypatch.setattr(Hub, "refusal", ("", 200))
    assert local_source(REPOSITORY) != older


def test_a_cached_model_starts_when_the_hub_has_other_files_now(
    hub: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(hub[0], MODEL)
    older = local_source(REPOSITORY)
    monkeypatch.setattr(Hub, "commit", "1" * 40)
    (hub[0] / "model.safetensors").unlink()
    assert local_source(REPOSITORY) == older
    assert "has other files now" in caplog.text


def test_the_gguf_file_that_is_named_is_fetched(hub: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, sent = hub
    put(folder, GGUFS)
    source = local_source(f"{REPOSITORY}:q4_k_m")
    assert sorted(sent) == ["mmproj-Q4_K_M.gguf", "model-Q4_K_M.gguf"]  # the former reads images
    assert source.path.name == "model-Q4_K_M.gguf"
    assert source.path.read_text() == "content of model-Q4_K_M.gguf"
    parts = local_source(f"{REPOSITORY}:Q8_0")
    assert sorted(sent[2:]) == GGUFS[3:5]
    assert parts.path.name == "model-Q8_0-00001-of-00002.gguf"
    fetched(find_model(f"{REPOSITORY}:UD-Q4_K_XL"), with_media=False)
    assert sent[4:] == ["model-UD-Q4_K_XL.gguf"]
    break_hub("no connection", monkeypatch)
    assert local_source(f"{REPOSITORY}:Q4_K_M") == source
    with pytest.raises(StartupError, match=r"not answer.* its cache lacks model-IQ4_XS\.gguf"):
        local_source(f"{REPOSITORY}:IQ4_XS")


def test_no_name_in_a_repository_leads_out_of_the_cache(
    hub: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rng = random.Random(0)
    put(hub[0], MODEL)
    parts = ("..", "../..", "../../../..", "x", str(tmp_path)[1:], "..\\..", "%2e%2e", ".", "")
    before = {path for path in tmp_path.parent.rglob("*") if path.is_file()}
    for number in range(20):
        ways = ["/".join(rng.choices(parts, k=rng.randint(1, 6))) for _ in range(10)]
        monkeypatch.setattr(Hub, "hostile", [f"{way}/{rng.choice(('evil.json', 'config.json'))}" for way in ways])
        monkeypatch.setattr(Hub, "commit", f"{number:040x}")
        with suppress(StartupError, ValueError, OSError):
            local_source(REPOSITORY)
    new = {path for path in tmp_path.parent.rglob("*") if path.is_file()} - before
    assert all(path.is_relative_to(tmp_path / "cache") for path in new)
    assert Hub.num_requests > 20


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
        (GGUFS, "", r"after a colon, .* such as 'a/b:model-Q4_K_M\.gguf': it has Q8_0/"),
        (["config.json", "x.onnx"], "", r"there are neither safetensors nor GGUF files\.$"),
        (["config.json", "pytorch_model.bin"], "", r"files\. It has pickled ones: .* download a/b --local-dir FOLDER"),
    ],
)
def test_a_repository_in_which_no_one_model_is_meant(files: list[str], named: str, said: str) -> None:
    with pytest.raises(StartupError, match=said):
        gguf_files("a/b", files, named) if named else files_of_model("a/b", files)


def test_weights_of_another_name_are_fetched() -> None:
    assert "gptq-4bit.safetensors" in files_of_model("a/b", ["config.json", "gptq-4bit.safetensors"])
    of_bge_m3 = ["colbert_linear.safetensors", "model.safetensors", "onnx.safetensors", "sparse_linear.safetensors"]
    assert files_of_model("a/b", of_bge_m3) == [of_bge_m3[0], of_bge_m3[1], of_bge_m3[3]]


def test_a_local_model_is_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert local_source(tmp_path) == ModelSource(str(tmp_path), None, is_local=True)
