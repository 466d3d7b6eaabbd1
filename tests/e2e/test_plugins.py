"""The plug-ins of docs/plugins.md in a server process, and a server whose own plug-ins were deleted."""

from pathlib import Path

import httpx

from oaiserve.plugin_loading import OURS
from tests.e2e.conftest import serve_process
from tests.test_plugins import plugins_of_page, tree_without

BODY = {"prompt": "Count: ", "max_tokens": 400, "ignore_eos": True, "seed": 3, "temperature": 1}


def test_the_plugins_of_the_page_work_in_a_server(small_model: Path, tmp_path: Path) -> None:
    flags = [f"--plugin={file}" for file in plugins_of_page(tmp_path)]
    with serve_process(str(small_model), tmp_path / "log", "--kv-cache-memory", "12MiB", *flags) as server:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            completed = http.get("/v1/complete", params={"text": "Hello"})
            text = http.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
        assert server.terminate() == 0
        assert [line for line in server.log() if line["level"] != "INFO"] == []
    messages = [line["message"] for line in server.log()]
    assert f"Plug-in 'complete' (--plugin {tmp_path / 'complete.py'}) brings routes" in messages
    assert completed.status_code == 200
    assert completed.json()["text"]
    assert len(text) > 100
    assert not any(map(str.isdigit, text))


def test_a_server_without_the_folder_of_plugins_answers(small_model: Path, tmp_path: Path) -> None:
    tree = tree_without(tmp_path, "plugins")
    with serve_process(
        str(small_model),
        tmp_path / "log",
        "--kv-cache-memory",
        "12MiB",
        env={"PYTHONPATH": str(tree)},
        program=("-P", "-m", "oaiserve"),
    ) as server:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        messages = [line["message"] for line in server.log()]
    assert answer.status_code == 200
    for name in OURS:
        assert f"Plug-in '{name}' of oaiserve is left out, because its folder is missing" in messages
