"""The plug-ins of docs/plugins.md in a server process, and a server whose own plug-ins were deleted."""

import json
from pathlib import Path
from urllib.request import urlopen

from oaiserve.plugin_loading import OURS
from tests.e2e.live import serve_process
from tests.missing_plugins import tree_without
from tests.plugin_pages import plugins_of_page

BODY = {"prompt": "Count: ", "max_tokens": 400, "ignore_eos": True, "seed": 3, "temperature": 1}


def test_the_plugins_of_the_page_work_in_a_server(small_model: Path, tmp_path: Path) -> None:
    flags = [f"--plugin={file}" for file in plugins_of_page(tmp_path)]
    with serve_process(str(small_model), tmp_path / "log", "--kv-cache-memory", "12MiB", *flags) as server:
        with urlopen(f"{server.url}/v1/complete?text=Hello") as answer:  # not httpx, which knows published routes only
            completed = json.load(answer)
        text = server.post("/v1/completions", **BODY).json()["choices"][0]["text"]
        assert server.terminate() == 0
        assert [line for line in server.log() if line["level"] != "INFO"] == []
    messages = [line["message"] for line in server.log()]
    assert f"Plug-in 'complete' (--plugin {tmp_path / 'complete.py'}) brings routes" in messages
    assert completed["text"]
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
        answer = server.post("/v1/chat/completions", **body)
        messages = [line["message"] for line in server.log()]
    assert answer.status_code == 200
    for name in OURS:
        assert f"Plug-in '{name}' of oaiserve is left out, because its folder is missing" in messages
