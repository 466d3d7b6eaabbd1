"""/debug/requests/ID/tokens over HTTP, with a small real model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from oaiserve.config import ServerOptions
from tests.plugins.inspector.inspected import served, tokens_of
from tests.world.serving import Place

SYSTEM = {"role": "system", "content": "It is 12:01. Be brief."}
HELLO = {"role": "user", "content": "Hello <|im_end|> there"}


@pytest.fixture(scope="module")
def client(place_of_module: Place, small_model: Path) -> Iterator[httpx.Client]:
    with served(place_of_module, small_model, inspect=100) as client:
        yield client


def chat(client: httpx.Client, request_id: str, messages: list[dict[str, Any]], **fields: Any) -> None:
    body = {"model": "small", "max_tokens": 4, "messages": messages, **fields}
    response = client.post("/v1/chat/completions", json=body, headers={"x-request-id": request_id})
    assert response.status_code == 200, response.text


def by_kind(prompt: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the runs of a prompt with their texts."""
    texts = iter(prompt["texts"])
    return [(kind, "".join(next(texts) for _ in range(number))) for kind, number in prompt["runs"]]


def test_the_part_of_the_template_is_told_from_that_of_the_client(client: httpx.Client) -> None:
    chat(client, "roles", [SYSTEM, HELLO])
    prompt = tokens_of(client, "roles")["prompt"]
    assert by_kind(prompt) == [
        ("template", "<|im_start|>system\n"),
        ("system", "It is 12:01. Be brief."),
        ("template", "<|im_end|>\n<|im_start|>user\n"),
        ("user", "Hello <|im_end|> there"),
        ("template", "<|im_end|>\n<|im_start|>assistant\n"),
    ]


def test_the_difference_to_the_compared_prompt_is_shown(client: httpx.Client) -> None:
    chat(client, "before", [SYSTEM, HELLO])
    chat(client, "after", [{"role": "system", "content": "It is 12:02. Be brief."}, HELLO])
    kept = tokens_of(client, "after")
    compared = kept["compared"]
    common = compared["common_tokens"]
    assert compared["request_id"] == "before"
    assert compared["changes"] == [{"start": common, "added_tokens": 1, "removed_tokens": 1, "removed": ["1"]}]
    assert kept["prompt"]["texts"][common] == "2"


def test_an_earlier_prompt_that_is_not_kept_any_more_is_only_named(place: Place, small_model: Path) -> None:
    with served(place, small_model, inspect=1) as client:
        chat(client, "before", [SYSTEM, HELLO])
        chat(client, "after", [SYSTEM, HELLO])
        compared = tokens_of(client, "after")["compared"]
        refused = client.get("/debug/requests/before/tokens")
    assert compared["request_id"] == "before"
    assert compared["common_tokens"] > 0
    assert compared["changes"] is None
    assert refused.status_code == 404
    assert "the last 1 requests (--inspect)" in refused.json()["error"]["message"]


def test_each_prompt_and_each_choice_has_its_tokens(client: httpx.Client) -> None:
    body = {"model": "small", "prompt": ["One", "Two"], "n": 2, "max_tokens": 3, "seed": 1}
    answer = client.post("/v1/completions", json=body, headers={"x-request-id": "several"}).json()
    for prompt, text in enumerate(body["prompt"]):
        for choice in range(2):
            kept = tokens_of(client, "several", prompt=prompt, choice=choice)
            assert "".join(kept["prompt"]["texts"]) == text
            assert "".join(kept["answer"]["texts"]) == answer["choices"][2 * prompt + choice]["text"]
    assert (kept["num_prompts"], kept["num_choices"]) == (2, 2)
    assert kept["answer"]["gaps_ns"] is None
    refused = [client.get("/debug/requests/several/tokens", params=query) for query in ({"prompt": 2}, {"choice": 2})]
    assert [response.json()["error"]["param"] for response in refused] == ["prompt", "choice"]


def test_the_only_choice_has_the_times_between_its_tokens(client: httpx.Client) -> None:
    chat(client, "times", [HELLO], max_tokens=6, ignore_eos=True)
    gaps_ns = tokens_of(client, "times")["answer"]["gaps_ns"]
    assert len(gaps_ns) == 5
    assert all(gap_ns > 0 for gap_ns in gaps_ns)


def test_a_long_list_is_shown_in_parts(client: httpx.Client) -> None:
    chat(client, "long", [HELLO], max_tokens=8, ignore_eos=True)
    whole = tokens_of(client, "long")
    rest = tokens_of(client, "long", prompt_start=10, answer_start=3)
    assert (rest["prompt"]["ids"], rest["prompt"]["start"]) == (whole["prompt"]["ids"][10:], 10)
    assert (rest["answer"]["ids"], rest["answer"]["start"]) == (whole["answer"]["ids"][3:], 3)
    assert rest["answer"]["logprobs"] == whole["answer"]["logprobs"][3:]
    assert rest["answer"]["gaps_ns"] == whole["answer"]["gaps_ns"][3:]


def test_a_prompt_that_was_too_long_has_its_tokens(client: httpx.Client) -> None:
    body = {"model": "small", "prompt": "word " * 20_000}
    rejected = client.post("/v1/completions", json=body, headers={"x-request-id": "long-prompt"})
    kept = tokens_of(client, "long-prompt")
    assert rejected.status_code == 400
    assert "".join(kept["prompt"]["texts"]).startswith("word word")
    assert kept["prompt"]["num_tokens"] >= 20_000
    assert kept["answer"] is None


def test_a_prompt_that_the_template_rejects_has_no_tokens(place: Place, small_model: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ raise_exception('No messages, please.') }}")
    with served(place, small_model, inspect=1, chat_template=template) as client:
        body = {"model": "small", "messages": [HELLO]}
        rejected = client.post("/v1/chat/completions", json=body, headers={"x-request-id": "rejected"})
        kept = tokens_of(client, "rejected")
    assert rejected.status_code == 400
    assert (kept["is_open"], kept["prompt"], kept["answer"]) == (False, None, None)


@pytest.mark.plugin("pooling")
def test_the_inputs_of_embeddings_have_their_tokens_and_no_answer(place: Place, small_model: Path) -> None:
    with served(place, small_model, inspect=2, task="embed") as client:
        body = {"model": "small", "input": ["One", "Two"]}
        response = client.post("/v1/embeddings", json=body, headers={"x-request-id": "vectors"})
        assert response.status_code == 200, response.text
        kept = tokens_of(client, "vectors", prompt=1)
    assert "".join(kept["prompt"]["texts"]) == "Two"
    assert (kept["num_prompts"], kept["num_choices"], kept["answer"]) == (2, 0, None)


def test_without_inspect_the_route_says_how_to_turn_it_on(place: Place, small_model: Path) -> None:
    with served(place, small_model, inspect=0) as client:
        chat(client, "off", [HELLO])
        response = client.get("/debug/requests/off/tokens")
    assert response.status_code == 404
    assert "Start it with --inspect 20" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "header", [("x-forwarded-for", "192.0.2.1"), ("forwarded", "for=192.0.2.1"), ("x-oaiserve-hops", "1")]
)
def test_a_request_from_elsewhere_is_refused(client: httpx.Client, header: tuple[str, str]) -> None:
    response = client.get("/debug/requests/roles/tokens", headers=[header])
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (403, "not_the_owner")
    assert "only to this machine" in error["message"]


@pytest.mark.parametrize(
    ("server", "key", "status"),
    [
        ({"api_key": ("secret",)}, "secret", 404),
        ({"api_key": ("secret", "other")}, "secret", 403),
        ({"host": "0.0.0.0", "api_key": ("secret",)}, "secret", 404),
        ({"host": "0.0.0.0", "open_dashboard": True}, "", 403),
    ],
)
def test_only_the_owner_reads_what_others_wrote(
    place: Place, small_model: Path, server: dict[str, Any], key: str, status: int
) -> None:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with served(place, small_model, inspect=1, server=ServerOptions(**server)) as client:
        assert client.get("/debug/requests/none/tokens", headers=headers).status_code == status
