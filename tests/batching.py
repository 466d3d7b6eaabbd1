"""Files and batches of tests, by OpenAI's client."""

import json
from collections.abc import Callable
from typing import Any

from openai import OpenAI

from tests.waiting import wait_until

CHAT = "/v1/chat/completions"


def line(number: int, url: str = CHAT, **body: Any) -> dict[str, Any]:
    fields = {"messages": [{"role": "user", "content": f"Number {number}"}], "max_tokens": 5} | body
    return {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": fields}


def jsonl(*lines: object) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


def begin(sdk: OpenAI, *lines: object, endpoint: Any = CHAT) -> Any:
    file = sdk.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")
    return sdk.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"a": "b"})


def ended(sdk: OpenAI, batch: Any) -> Any:
    """Wait for the end of a batch. Each test does: servers are shared."""
    return later(lambda: sdk.batches.retrieve(batch.id), lambda now: now.status != "in_progress")


def wait_for_answers(sdk: OpenAI, batch: Any, number: int) -> Any:
    """Wait until this number of lines are answered, and return the batch as it is then."""
    return later(lambda: sdk.batches.retrieve(batch.id), lambda now: now.request_counts.completed >= number)


def later(retrieve: Callable[[], Any], is_reached: Callable[[Any], bool]) -> Any:
    """Return a batch once it has reached something."""
    wait_until(lambda: is_reached(retrieve()))
    return retrieve()


def answers(sdk: OpenAI, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(text) for text in sdk.files.content(file_id).text.splitlines()]
