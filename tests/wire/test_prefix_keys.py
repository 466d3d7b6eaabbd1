"""Keys of prompts: equal beginnings have equal keys, and nothing else does."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.wire.prefix_keys import (
    BLOCK_BYTES,
    MEDIUM_BYTES,
    MOST_BLOCKS,
    Prompt,
    key_of_session,
    marked_depths,
    prompt_of,
    prompt_of_text,
)
from oaiserve.wire.router import Router
from oaiserve.wire.routing_decision import Reason

texts = st.binary(max_size=4 * BLOCK_BYTES)


@given(common=texts, one=texts, other=texts)
def test_keys_are_equal_as_far_as_the_full_blocks_are(common: bytes, one: bytes, other: bytes) -> None:
    first = prompt_of_text(common + one)
    second = prompt_of_text(common + other)
    for depth, (a, b) in enumerate(zip(first.keys, second.keys, strict=False), 1):
        end = depth * BLOCK_BYTES
        assert (a == b) == ((common + one)[:end] == (common + other)[:end])
    assert len(first.keys) == len(common + one) // BLOCK_BYTES


@given(text=texts, salts=st.lists(st.binary(max_size=8), min_size=2, max_size=2, unique=True))
def test_prompts_with_different_salts_share_no_key(text: bytes, salts: list[bytes]) -> None:
    first, second = (prompt_of_text(text, salt) for salt in salts)
    assert not {*first.keys, first.conversation} & {*second.keys, second.conversation}


def test_a_salt_is_not_a_part_of_the_text() -> None:
    text = bytes(2 * BLOCK_BYTES)
    assert not {*prompt_of_text(b"a" + text).keys} & {*prompt_of_text(text, b"a").keys}


def test_very_long_prompts_are_told_apart_by_their_first_blocks_only() -> None:
    longest = b"x" * BLOCK_BYTES * MOST_BLOCKS
    prompt = prompt_of_text(longest + b"y" * 10**6)
    assert prompt.keys == prompt_of_text(longest).keys
    assert len(prompt.keys) == MOST_BLOCKS
    assert prompt.num_tokens == (len(longest) + 10**6) // 4


def chat(*contents: str, **fields: Any) -> dict[str, Any]:
    roles = ("system", "user", "assistant", "user", "assistant", "user")
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return {"model": "m", "messages": messages, **fields}


LONG = "word " * 200
TOOLS = [{"type": "function", "function": {"name": "find", "description": LONG}}]


def test_the_next_turn_of_a_talk_has_the_keys_of_the_turn_before() -> None:
    before = prompt_of(chat(LONG, LONG)).keys
    after = prompt_of(chat(LONG, LONG, LONG, "and then?")).keys
    assert len(before) > 6
    assert after[: len(before)] == before
    assert len(after) > len(before)


def test_all_turns_of_a_talk_have_its_key_and_no_other_talk_has_it() -> None:
    first = prompt_of(chat(LONG, "hello"))
    assert prompt_of(chat(LONG, "hello", "hi", "and then?")).conversation == first.conversation
    assert prompt_of(chat(LONG, "hello", tools=TOOLS)).conversation != first.conversation
    assert prompt_of(chat(LONG, "good morning")).conversation != first.conversation
    hello, you = (prompt_of({"model": "m", "prompt": text}).conversation for text in ("hello", "hello you"))
    assert hello != you


def test_the_turns_of_claude_code_have_the_keys_of_those_before() -> None:
    """Its billing changes at each request, and the mark of what to cache moves on."""

    def turn(number: int, *contents: str) -> Prompt:
        billing = {"type": "text", "text": f"x-anthropic-billing-header: cch={number};"}
        messages = [{"role": "user", "content": [{"type": "text", "text": content}]} for content in contents]
        messages[-1]["content"][0]["cache_control"] = {"type": "ephemeral", "ttl": "1h"}
        return prompt_of({"system": [billing, {"type": "text", "text": LONG}], "messages": messages, "tools": TOOLS})

    before = turn(1, "hello", LONG)
    after = turn(2, "hello", LONG, "and then?")
    assert after.keys[: len(before.keys)] == before.keys
    assert turn(1, "hello").conversation == after.conversation
    assert prompt_of({"system": "be brief " + LONG, "messages": []}).keys != prompt_of({"system": LONG}).keys


@pytest.mark.parametrize("is_joined", [True, False])
@pytest.mark.parametrize("place", ["system", "instructions", "messages", "input"])
def test_billing_in_any_system_message_is_no_part_of_the_prefix(place: str, is_joined: bool) -> None:
    def keys(text: str) -> Sequence[int]:
        billing = f"x-anthropic-billing-header: cch={text};"
        parts = [{"type": "text", "text": billing}, {"type": "text", "text": LONG}]
        content = f"{billing}\n\n{LONG}" if is_joined else parts
        is_message = place in ("messages", "input")
        return prompt_of(
            {"model": "m", place: [{"role": "developer", "content": content}] if is_message else content}
        ).keys

    assert keys("1") == keys("2")
    assert len(keys("1")) >= 3


def test_the_order_of_fields_in_a_message_does_not_matter() -> None:
    swapped = {"model": "m", "messages": [{"content": LONG, "role": "system"}]}
    assert prompt_of(swapped).keys == prompt_of(chat(LONG)).keys


@pytest.mark.parametrize("fields", [{"model": "adapter"}, {"cache_salt": "tenant"}, {"tools": TOOLS}])
def test_adapter_salt_and_tools_make_other_keys(fields: dict[str, Any]) -> None:
    plain = prompt_of(chat(LONG))
    other = prompt_of(chat(LONG, **fields))
    assert plain.keys
    assert not {*plain.keys} & {*other.keys}


@pytest.mark.parametrize(
    "body",
    [
        chat(LONG),
        {"model": "m", "prompt": LONG},
        {"model": "m", "prompt": [*range(1000)]},
        {"model": "m", "instructions": LONG, "input": LONG},
        {"model": "m", "input": [{"role": "user", "content": LONG}]},
    ],
)
def test_every_kind_of_body_has_keys(body: dict[str, Any]) -> None:
    assert len(prompt_of(body).keys) >= 3


def test_a_short_prompt_no_text_and_anything_else_have_no_full_block() -> None:
    anything: dict[str, Any] = {"messages": [{"content": [{"type": []}, {"type": {}, "content": [3]}, None]}, 7]}
    for body in (chat("a"), {"model": "m"}, anything):
        assert prompt_of(body).keys == []
    assert prompt_of({"model": "m"}).num_tokens == 0


def test_few_depths_are_marked_and_the_last_one_always_is() -> None:
    assert [*marked_depths(0)] == []
    assert [*marked_depths(11)] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 11]
    assert max(len([*marked_depths(number)]) for number in range(1000)) == 28
    for number in range(1, MOST_BLOCKS + 1):
        depths = [*marked_depths(number)]
        assert depths[-1] == number
        for common in range(1, number + 1):  # what another prompt shares with it
            assert max(depth for depth in depths if depth <= common) >= 0.8 * common


def test_sessions_have_different_keys() -> None:
    assert key_of_session("a") == key_of_session("a") != key_of_session("b")


def of_images(api: str, *images: str, marked: bool = False) -> dict[str, Any]:
    """Return a conversation with a turn for each image, and a text that is the same in all."""
    mark = {"cache_control": {"type": "ephemeral"}} if marked else {}
    parts: dict[str, Callable[[str], dict[str, Any]]] = {
        "chat": lambda data: {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        "responses": lambda data: {"type": "input_image", "image_url": f"data:image/png;base64,{data}"},
        "messages": lambda data: {
            "type": "tool_result",
            "content": [{"type": "image", "source": {"type": "base64", "data": data}, **mark}],
        },
    }
    turns = [{"role": "user", "content": [parts[api](data), {"type": "text", "text": LONG}]} for data in images]
    return {"model": "m", "input" if api == "responses" else "messages": turns}


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_images_have_keys_of_their_content_and_do_not_fill_all_blocks(api: str) -> None:
    one, two, three = ("A" * 10**6 + end for end in ("AAAA", "AAAB", "AAAC"))
    first = prompt_of(of_images(api, one, two))
    second = prompt_of(of_images(api, one, two, three, marked=True))
    other = prompt_of(of_images(api, one, three))
    assert second.keys[: len(first.keys)] == first.keys
    assert second.conversation == first.conversation == other.conversation
    assert len(second.keys) > len(first.keys)
    common = [a == b for a, b in zip(first.keys, other.keys, strict=True)]
    assert common == [True] * common.count(True) + [False] * common.count(False)
    assert 0 < common.count(True) < len(common)
    assert MEDIUM_BYTES * 2 < first.num_tokens * 4 < MEDIUM_BYTES * 2 + 3000


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_the_next_turn_over_large_images_goes_where_they_are(api: str) -> None:
    router = Router()
    router.update_replicas([f"replica-{number}" for number in range(8)], 0)
    images = ["A" * 500_000 + f"{number:04}" for number in range(40)]
    for number, image in enumerate(images):
        first = router.choose(prompt_of(of_images(api, image)), 0)
        second = router.choose(prompt_of(of_images(api, image, images[number - 1])), 0)
        assert (second.replica, second.reason) == (first.replica, Reason.PREFIX)
