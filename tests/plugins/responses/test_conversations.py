"""Tests /v1/conversations, and the responses that are turns of them."""

from itertools import islice
from typing import Any

import pytest

from oaiserve.plugins.shared.store_options import StoreOptions
from tests.plugins.responses.asking import ask, events_of
from tests.routes.asking import RESPONSES, refused, submitted
from tests.routes.doubles import says
from tests.serving import Serve, Served

CONVERSATIONS = "/v1/conversations"
HI: Any = {"role": "user", "content": "Hi"}


def begun(served: Served, **body: Any) -> str:
    answer = served.post(CONVERSATIONS, **body).json()
    assert answer["object"] == "conversation"
    name: str = answer["id"]
    return name


def texts_of(served: Served, name: str) -> list[str]:
    """Return the texts of the items of a conversation, in their order."""
    listed = served.http.get(f"{CONVERSATIONS}/{name}/items?order=asc&limit=100").json()
    return [item["content"][0]["text"] for item in listed["data"]]


def test_the_sdk_begins_changes_reads_and_deletes_conversations(served: Served) -> None:
    client = served.sdk()
    conversation = client.conversations.create(items=[HI], metadata={"a": "b"})
    assert client.conversations.retrieve(conversation.id) == conversation
    changed = client.conversations.update(conversation.id, metadata={"c": "d"})
    assert (changed.metadata, changed.created_at) == ({"c": "d"}, conversation.created_at)
    added = client.conversations.items.create(
        conversation.id, items=[{"role": "user", "content": text} for text in "ab"]
    )
    first, *others = client.conversations.items.list(conversation.id, order="asc", limit=2)  # it turns the page
    assert others == added.data
    assert client.conversations.items.retrieve(first.id or "", conversation_id=conversation.id) == first
    assert client.conversations.items.delete(first.id or "", conversation_id=conversation.id).id == conversation.id
    assert texts_of(served, conversation.id) == ["a", "b"]
    gone = served.http.get(f"{CONVERSATIONS}/{conversation.id}/items/{first.id}")
    refused(gone, "item_id", "There is no item", status=404)
    assert client.conversations.delete(conversation.id).deleted
    refused(served.http.get(f"{CONVERSATIONS}/{conversation.id}"), "conversation_id", "no conversation", status=404)


def test_items_that_are_sent_again_get_ids_of_their_own(served: Served) -> None:
    """An id that three items have would make the SDK read the same pages for ever."""
    sent = [{"id": "msg_1", "role": "user", "content": text} for text in "abc"]
    name = begun(served, items=sent[:2])
    added = served.post(f"{CONVERSATIONS}/{name}/items", items=sent).json()["data"]
    ask(served, conversation=name, input=[*sent, {"id": "msg_2", "role": "user", "content": "d"}])
    with served.sdk() as client:
        pages = client.conversations.items.list(name, order="asc", limit=1)
        listed = [(item.id or "", item.content[0].text) for item in islice(pages, 20)]  # type: ignore[union-attr]
    assert "".join(text for _, text in listed[:9]) == "ababcabcd"
    assert len(listed) == len({item_id for item_id, _ in listed}) == 10
    assert [item["id"] for item in added] == [item_id for item_id, _ in listed[2:5]]
    assert (listed[0][0], listed[8][0]) == ("msg_1", "msg_2")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("store", [False, True])
def test_a_response_is_the_next_turn_of_its_conversation(served: Served, store: bool, stream: bool) -> None:
    name = begun(served, items=[{"role": "developer", "content": "Obey."}])
    served.engine.script = says("One.")
    response = served.post(RESPONSES, input="Hi", conversation=name, store=store, stream=stream)
    answer = events_of(response)[-1]["response"] if stream else response.json()
    assert answer["conversation"] == {"id": name}
    assert served.telemetry.next_record().conversation_id == name
    served.engine.script = says("Two.")
    ask(served, input="And?", conversation={"id": name}, instructions="Be brief.")
    submitted(served)
    _, prompt = submitted(served)
    said = ["Be brief.", "Obey.", "Hi", "One.", "And?"]
    assert [message["content"] for message in prompt.messages] == said
    assert texts_of(served, name) == [*said[1:], "Two."]
    count = served.post(f"{RESPONSES}/input_tokens", input="Hm", conversation=name).json()
    assert count["input_tokens"] == len("".join([*said[1:], "Two.", "Hm"]))
    if store:
        after = served.post(RESPONSES, input="Hi", previous_response_id=answer["id"])
        refused(after, "previous_response_id", f"Send 'conversation': '{name}' instead")


def test_what_does_not_fit_together_is_refused(served: Served, serve: Serve) -> None:
    name = begun(served)
    refused(served.post(CONVERSATIONS, items=[HI] * 21), "items", "at most 20")
    refused(served.post(CONVERSATIONS, items=[{"content": "Hi"}]), "items", "'items[0].role'")
    refused(served.post(CONVERSATIONS, metadata={"k" * 65: ""}), "metadata", "64 characters")
    for other in ("conv_1", ask(served)["id"]):
        refused(served.post(RESPONSES, input="Hi", conversation=other), "conversation", "no conversation", status=404)
    for path in (f"{RESPONSES}/{name}", f"{RESPONSES}/{name}/input_items"):
        refused(served.http.get(path), "response_id", status=404)
    assert served.http.delete(f"{RESPONSES}/{name}").status_code == 404
    both = served.post(RESPONSES, input="Hi", conversation=name, previous_response_id=ask(served)["id"])
    refused(both, "conversation", "'previous_response_id'")
    without = serve(of_plugins=(StoreOptions(response_store_number=0),)).post(CONVERSATIONS)
    refused(without, None, "--response-store-number 0")
    small = serve(body_limit=1000)
    name = begun(small, items=[{"role": "user", "content": "a" * 600}])
    refused(small.post(f"{CONVERSATIONS}/{name}/items", items=[HI | {"content": "b" * 300}]), "items", "1000 bytes")


def test_conversation_that_outgrows_the_store_stays_as_it_was_and_its_client_is_told(serve: Serve) -> None:
    served = serve(of_plugins=(StoreOptions(response_store_bytes=1_000),))
    long = {"role": "user", "content": "x" * 600}
    name = begun(served, items=[HI])
    other = {"role": "user", "content": "z" * 200}
    assert served.post(f"{CONVERSATIONS}/{name}/items", items=[other]).status_code == 200
    before = texts_of(served, name)
    refused(served.post(f"{CONVERSATIONS}/{name}/items", items=[long]), "conversation", "--response-store-bytes")
    refused(served.post(RESPONSES, conversation=name, input=[long], store=False), "conversation", "stays as it was")
    streamed = events_of(served.post(RESPONSES, conversation=name, input=[long], store=False, stream=True))
    assert streamed[-1]["type"] == "response.failed"
    assert "stays as it was" in streamed[-1]["response"]["error"]["message"]
    assert texts_of(served, name) == before
    refused(served.post(CONVERSATIONS, items=[long, long]), "conversation", "fewer items")
