"""A server with a chat model and an embedding model, as a process: loads, unloads, and a process that is killed."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from openai.types import Completion, CreateEmbeddingResponse

from oaiserve import cli
from tests.e2e.browser import OpenPage
from tests.e2e.live import API_KEY, LiveServer, serve_process
from tests.models.decoders import FAMILIES, byte_tokenizer, random_model
from tests.models.poolers import FAMILIES as POOLERS
from tests.models.poolers import random_pooler
from tests.models.poolers import save as save_pooler
from tests.waiting import wait_until

pytestmark = pytest.mark.plugin("pooling")

CONFIG = """
api-key = ["{key}"]
dtype = "float32"

[models.chat]
model = "{chat}"
max-running = 4
"""


FLAGS = ("--load-on-demand",)


@pytest.fixture(scope="module")
def two_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("several")
    for name in ("chat", "embed"):
        (folder / name).mkdir()
    random_model(FAMILIES["llama"]).save_pretrained(folder / "chat")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(folder / "chat")
    save_pooler(folder / "embed", "modernbert", random_pooler(POOLERS["modernbert"]), pooling="cls")
    config = folder / "models.toml"
    config.write_text(CONFIG.format(key=API_KEY, chat=folder / "chat"))
    embed = f"embed={folder / 'embed'}"
    with serve_process(embed, folder / "log", "--config", str(config), *FLAGS) as server:
        yield server
        assert server.terminate() == 0


def samples(server: LiveServer, name: str) -> dict[str, float]:
    """Return the samples of a metric by their label `served_model`, of those without others."""
    with server.http() as http:
        lines = http.get("/metrics").text.splitlines()
    start = f'{name}{{served_model="'
    return {line[len(start) :].split('"')[0]: float(line.split()[-1]) for line in lines if line.startswith(start)}


class FirstAnswers(NamedTuple):
    """The answer of each model to its first request, and which models were loaded before, between and after."""

    models: list[str]
    vectors: CreateEmbeddingResponse
    text: Completion
    loaded: list[dict[str, float]]


@pytest.fixture(scope="module")
def first_answers(two_models: LiveServer) -> FirstAnswers:
    loaded = [samples(two_models, "oaiserve_model_loaded")]
    with two_models.sdk() as client:
        models = [model.id for model in client.models.list()]
        vectors = client.embeddings.create(model="embed", input="aa cat")
        loaded.append(samples(two_models, "oaiserve_model_loaded"))
        text = client.completions.create(model="chat", prompt="Hello", max_tokens=4, temperature=0)
    loaded.append(samples(two_models, "oaiserve_model_loaded"))
    return FirstAnswers(models, vectors, text, loaded)


@pytest.fixture(autouse=True)
def loaded_models(two_models: LiveServer, first_answers: FirstAnswers) -> None:
    """Each test begins with both models loaded, one of which another test may have killed."""
    with two_models.http() as http:
        assert http.post("/v1/completions", json={"model": "chat", "prompt": "a", "max_tokens": 1}).status_code == 200
        assert http.post("/v1/embeddings", json={"model": "embed", "input": "a"}).status_code == 200
    assert samples(two_models, "oaiserve_model_loaded") == {"chat": 1, "embed": 1}


def test_each_model_is_loaded_when_it_is_asked_for(two_models: LiveServer, first_answers: FirstAnswers) -> None:
    assert first_answers.loaded == [{"chat": 0, "embed": 0}, {"chat": 0, "embed": 1}, {"chat": 1, "embed": 1}]
    assert first_answers.models == ["embed", "chat"]
    assert first_answers.vectors.model == "embed"
    text = first_answers.text
    assert (text.model, text.usage and text.usage.completion_tokens) == ("chat", 4)
    assert all(num_bytes > 2**20 for num_bytes in samples(two_models, "oaiserve_model_memory_bytes").values())
    with two_models.http() as http:
        assert "\noaiserve_gateway_connections " in http.get("/metrics").text, "those of clients are the gateway's"


def test_what_a_model_reads_again_is_counted_with_its_name(two_models: LiveServer) -> None:
    text = "Hello" * 8  # in letters that the model has
    with two_models.http() as http:
        for clock in ("a", "b"):
            messages = [{"role": "system", "content": clock + text}, {"role": "user", "content": text}]
            answer = http.post("/v1/chat/completions", json={"model": "chat", "messages": messages, "max_tokens": 1})
        assert answer.status_code == 200, answer.text
        tokens, reason = answer.headers["x-oaiserve-read-again"].split("; reason=")
        page = f"/debug/requests/{answer.headers['x-request-id']}?model=chat"
        line = f'oaiserve_prompt_tokens_read_again_total{{served_model="chat",reason="{reason}"}} {float(tokens)}'
        wait_until(lambda: line in http.get("/metrics").text)
        assert (reason, http.get(page).json()["read_again_tokens"]) == ("system", int(tokens))


@pytest.mark.browser
@pytest.mark.plugin("pages")
def test_pages_talk_to_all_models_and_show_all_or_the_chosen_one(two_models: LiveServer, open_page: OpenPage) -> None:
    page = open_page(f"{two_models.url}/", may_log=True)  # The browser logs that a key is missing.
    page.fill("#key", API_KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector("#status[data-state=live]")
    assert page.locator("#model-list input").count() == 1  # the other one writes no text
    page.click("#settings-button")
    page.fill("[name=max_completion_tokens]", "5")
    page.fill("[name=temperature]", "0")
    page.fill("#prompt", "Hi")
    page.keyboard.press("Enter")
    page.wait_for_selector("#turns:not(.busy) .answered")
    assert page.locator(".answered .error").all_inner_texts() == []
    page.wait_for_selector(".account .line:has-text('5 tokens')")
    page.goto(f"{two_models.url}/dashboard")
    page.wait_for_selector("#model:has-text('all models · ')")
    assert page.locator("#replicas tr").count() == 2
    states = page.evaluate("""async () => {
      const { showFleet } = await import("/dashboard/static/fleet.js");
      const replica = (number, state) => ({ number, state, is_up: state === "Up", models: ["a"] });
      const replicas = [replica(1, "Up"), replica(2, "Not responding"), replica(null, "Not loaded")];
      showFleet({ replicas, requests: {}, continued: {}, has_children: true });
      return [...document.querySelectorAll("[data-label=State]")].map((cell) => cell.className);
    }""")
    assert states == ["outcome-finished", "outcome-failed", ""]
    for name in ("chat", "embed"):
        page.select_option("#watched", name)
        page.wait_for_selector(f"#model:has-text('{name} · ')")
        assert page.locator("#fleet").is_hidden()


def test_the_account_of_the_first_request_has_the_load_of_its_model(two_models: LiveServer) -> None:
    with two_models.http() as http:
        first = http.get("/debug/requests", params={"model": "embed"}).json()["requests"][-1]
        receive = first["phases"][0]
        assert first["model_load_ns"] > 100_000_000
        assert receive["causes_ns"]["model_load"] == first["model_load_ns"]
        assert sum(receive["causes_ns"].values()) == receive["duration_ns"]
        assert sum(phase["duration_ns"] for phase in first["phases"]) == first["duration_ns"]
        assert "its model was being loaded" in http.get(f"/debug/requests/{first['request_id']}").text


def test_a_stream_goes_on_when_the_process_of_its_model_is_killed(two_models: LiveServer) -> None:
    body = {"model": "chat", "prompt": "Hello", "max_tokens": 150, "temperature": 1, "seed": 7, "stream": True}

    def text(http: httpx.Client, *, kills: bool) -> str:
        parts = []
        with http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                parts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                if kills and len(parts) == 20:
                    kill_chat(two_models)
        return "".join(parts)

    with two_models.http() as http:
        undisturbed = text(http, kills=False)
        restarts = samples(two_models, "oaiserve_engine_restarts_total")["chat"]
        assert text(http, kills=True) == undisturbed
        # On a busy machine, the answer may be complete before the process dies. Then only the next request waits.
        assert text(http, kills=False) == undisturbed
    assert samples(two_models, "oaiserve_engine_restarts_total")["chat"] == restarts + 1


def kill_chat(server: LiveServer) -> None:
    """Kill the engine process of the model "chat", whose command line ends in its name."""
    children = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    pids = [int(pid) for path in children for pid in text_of_running(path).split()]
    (chat,) = (pid for pid in pids if text_of_running(Path(f"/proc/{pid}/cmdline")).endswith("chat\0"))
    os.kill(chat, signal.SIGKILL)


def text_of_running(path: Path) -> str:
    """Return what a file of /proc says, or nothing if its thread or process has ended meanwhile."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_ps_adds_up_the_processes(two_models: LiveServer, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", API_KEY)
    assert cli.main(["ps"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if two_models.url in line)
    models, *_, num_running, num_waiting, size, unit, pid = line.split()[1:]
    assert (models, num_running, num_waiting, int(pid)) == ("embed,", "0", "0", two_models.process.pid)
    assert unit == "GB" or float(size) > 200  # more than the front has
