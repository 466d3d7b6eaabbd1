"""Each field of the official Python package's requests is obeyed, refused, or named as left out.

`sdk_fields.json` has the fields of the version that `make clients` pins, where the package itself is compared with the
server's schema. Each field is sent, and must change what the engine gets, the answer, or what is said of the request.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from oaiserve.engine.types.pooling import Pooling
from oaiserve.plugins.ollama.options import OPTIONS
from oaiserve.routes.adaptations import HEADER
from tests.routes.asking import CALL, HI, HYBRID, PARAMETERS
from tests.routes.doubles import pools, says
from tests.serving import Serve, Served

FIELDS: dict[str, list[str]] = json.loads((Path(__file__).parent / "sdk_fields.json").read_text())["requests"]
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
CALLED = {"function": {"name": "get_time", "arguments": {"zone": "utc"}}}
RESULT = {"role": "tool", "content": "12:00", "tool_name": "get_time"}
TWO_CALLS = [{"role": "assistant", "tool_calls": [{"function": {"name": "stop", "arguments": {}}}, CALLED]}]
ASKING: dict[str, Any] = {
    "model": "other",
    "stream": False,
    "format": "json",
    "keep_alive": "5m",
    "options": {"seed": 3},
    "think": False,
    "logprobs": True,
}
# A value for each field that makes a difference. A field within another one is there as a whole.
SAMPLES: dict[str, dict[str, Any]] = {
    "ChatRequest": {
        **ASKING,
        "messages": [{"role": "user", "content": "Why?"}],
        "tools": [{"type": "function", "function": {"name": "get_time", "parameters": PARAMETERS}}],
        "top_logprobs": {"logprobs": True, "top_logprobs": 2},
    },
    "GenerateRequest": {
        **ASKING,
        "prompt": "Why?",
        "suffix": "end",
        "system": "Be brief.",
        "template": "x",
        "context": [1],
        "raw": True,
        "images": [PNG],
        "top_logprobs": {"logprobs": True, "top_logprobs": 2},
        "width": 1,
        "height": 1,
        "steps": 1,
    },
    "EmbedRequest": {
        "model": "other",
        "input": "b",
        "truncate": False,
        "dimensions": 2,
        "options": {"num_ctx": 8},
        "keep_alive": "5m",
    },
    "EmbeddingsRequest": {"model": "other", "prompt": "b", "options": {"num_ctx": 8}, "keep_alive": "5m"},
    "ShowRequest": {"model": "other"},
    "PullRequest": {"model": "other", "stream": False},
    "Options": {
        **dict.fromkeys(("temperature", "top_p", "presence_penalty", "frequency_penalty", "repeat_penalty"), 0.5),
        **dict.fromkeys(("tfs_z", "typical_p", "mirostat_tau", "mirostat_eta"), 0.5),
        **dict.fromkeys(("seed", "num_predict", "top_k", "mirostat", "repeat_last_n"), 2),
        **dict.fromkeys(("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep"), 2),
        **dict.fromkeys(("numa", "low_vram", "f16_kv", "use_mmap", "use_mlock", "logits_all"), True),
        **dict.fromkeys(("vocab_only", "embedding_only"), True),
        "penalize_newline": False,
        "stop": ["END"],
    },
    "Message": {
        "role": [{"role": "system", "content": "Hi"}],
        "content": [{"role": "user", "content": "Why?"}],
        "thinking": [*HI, {"role": "assistant", "content": "", "thinking": "Hm."}],
        "images": [{**HI[0], "images": [PNG]}],
        "tool_name": [*HI, *TWO_CALLS, RESULT],
        "tool_calls": [*HI, {"role": "assistant", "tool_calls": [CALLED]}],
    },
    "Message.ToolCall": {"function": [*HI, {"role": "assistant", "tool_calls": [CALLED]}]},
    "Message.ToolCall.Function": {
        "name": [*HI, {"role": "assistant", "tool_calls": [{"function": {"name": "stop"}}]}],
        "arguments": [*HI, {"role": "assistant", "tool_calls": [CALLED]}],
    },
}
WITHOUT: dict[str, Any] = {  # the messages without a field that is within others
    "tool_name": [*HI, *TWO_CALLS, {"role": "tool", "content": "12:00"}],
    "name": [*HI, {"role": "assistant", "tool_calls": [{"function": {"name": "get_time"}}]}],
    "arguments": [*HI, {"role": "assistant", "tool_calls": [{"function": {"name": "get_time"}}]}],
    "thinking": [*HI, {"role": "assistant", "content": ""}],
}
PATHS = {
    "GenerateRequest": "/api/generate",
    "EmbedRequest": "/api/embed",
    "EmbeddingsRequest": "/api/embeddings",
    "ShowRequest": "/api/show",
    "PullRequest": "/api/pull",
}
LEAST: dict[str, dict[str, Any]] = {
    "/api/chat": {"messages": HI},
    "/api/generate": {"prompt": "Hi"},
    "/api/embed": {"input": "a"},
    "/api/embeddings": {"prompt": "a"},
    "/api/show": {},
    "/api/pull": {},
}
NOTHING_TO_DO = {("PullRequest", "insecure")}  # Nothing is downloaded.


def reaction(served: Served, path: str, body: dict[str, Any]) -> tuple[object, ...]:
    """Return all that a request shows of what was read in it."""
    answer = served.post(path, **{"model": "org/demo", **LEAST[path], **body})
    if answer.status_code != 200:
        return answer.status_code, answer.json()["error"]
    sent: tuple[object, ...] = ()
    if path not in ("/api/show", "/api/pull"):
        request = served.engine.submitted.get_nowait()
        sent = str(request.prompts), str(request.params)
    vectors = str(answer.json()["embeddings"]) if path == "/api/embed" else ""
    return answer.headers.get(HEADER), answer.headers["content-type"], sent, vectors


def bodies(kind: str, field: str, sample: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a body with a field, and one without it."""
    if kind == "Options":
        return {"options": {field: sample}}, {}
    if kind.startswith("Message"):
        return {"messages": sample}, {"messages": WITHOUT[field]} if field in WITHOUT else {}
    if field == "top_logprobs":
        return sample, {"logprobs": True}
    return {field: sample}, {}


@pytest.mark.plugin("pooling")
@pytest.mark.parametrize(("kind", "field"), [(kind, field) for kind, fields in FIELDS.items() for field in fields])
def test_every_field_of_the_package_makes_a_difference(serve: Serve, kind: str, field: str) -> None:
    if (kind, field) in NOTHING_TO_DO:
        return
    served = serve(template=HYBRID, script=says(CALL))
    served.engine.media = frozenset({"image"})
    path = PATHS.get(kind, "/api/chat")
    if "Embed" in kind:
        served.engine.pooling = Pooling("embed", 4, dimensions=())
        served.engine.script = pools([3.0, 0.0, 4.0, 0.0])
    body, without = bodies(kind, field, SAMPLES[kind][field])
    assert reaction(served, path, body) != reaction(served, path, without)


def test_every_option_is_in_the_table() -> None:
    assert set(FIELDS["Options"]) | {"min_p"} == OPTIONS.keys()
