import json

from tools.kills import meaning


def stream(text: str, first_token_ms: float) -> bytes:
    forecast = {"first_token_ms": first_token_ms}
    events = [
        {"choices": [{"index": 0, "text": text}], "oaiserve": {"forecast": forecast}},
        {"choices": [], "usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": int(first_token_ms)}}},
    ]
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)


def test_streams_differ_by_their_content_and_not_by_forecasts_or_cached_tokens() -> None:
    assert meaning(stream("a", 1.0)) == meaning(stream("a", 2.0))
    assert meaning(stream("a", 1.0)) != meaning(stream("b", 1.0))
