import json

from tools.kills import meaning


def stream(text: str, cached_tokens: int) -> bytes:
    events = [
        {"choices": [{"index": 0, "text": text}]},
        {"choices": [], "usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": cached_tokens}}},
    ]
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)


def test_streams_differ_by_their_content_and_not_by_cached_tokens() -> None:
    assert meaning(stream("a", 1)) == meaning(stream("a", 2))
    assert meaning(stream("a", 1)) != meaning(stream("b", 1))
