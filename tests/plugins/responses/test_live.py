"""Tests /v1/responses with the official OpenAI SDK and the demo model."""

from pathlib import Path
from typing import Any

from tests.e2e.live import API_KEY, LiveServer, serve_process

ASKED: dict[str, Any] = {"model": "demo", "temperature": 0, "input": "What is the capital of France?"}


def test_a_talk_that_goes_on_is_found_in_the_prefix_cache(live: LiveServer) -> None:
    followup = ASKED | {"max_output_tokens": 48, "input": "And then?"}
    with live.sdk() as sdk:
        story = "Tell me a story of a lighthouse, its keeper and the sea, please."
        first = sdk.responses.create(**followup | {"input": story})
        second = sdk.responses.create(**followup, previous_response_id=first.id)
        third = sdk.responses.create(**followup, previous_response_id=second.id)
    for before, after in ((first, second), (second, third)):
        # The whole conversation, including the last answer, except for the block in which it ends.
        so_far = before.usage.input_tokens + before.usage.output_tokens
        assert after.usage.input_tokens_details.cached_tokens >= so_far - 2 * 16 > before.usage.input_tokens


def test_a_server_that_is_killed_loses_no_response_that_was_answered(small_model: Path, tmp_path: Path) -> None:
    flags = ("--served-model-name", "demo", "--api-key", API_KEY, "--kv-cache-memory", "2400KiB")
    flags += ("--response-store", str(tmp_path / "responses.db"))
    with serve_process(str(small_model), tmp_path / "first.log", *flags) as server, server.sdk() as sdk:
        answer = sdk.responses.create(**ASKED, max_output_tokens=64)
        server.process.kill()
    with serve_process(str(small_model), tmp_path / "second.log", *flags) as server, server.sdk() as sdk:
        assert sdk.responses.retrieve(answer.id).model_dump() == answer.model_dump()
        assert sdk.responses.create(**ASKED, max_output_tokens=64, previous_response_id=answer.id).status
