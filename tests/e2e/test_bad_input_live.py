"""Tests that the live server refuses every malformed request of the list, and that streams beside them go on."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Barrier

import openai

from tests.e2e.conftest import LiveServer
from tests.routes.test_bad_input import BAD_REQUESTS, check_refused

PROMPTS = [f"The colour of a {thing} is" for thing in ("rose", "sky", "leaf", "lemon", "coal", "cloud", "brick", "sea")]


@contextmanager
def eight_streams(sdk: openai.OpenAI) -> Iterator[list[Future[str]]]:
    """Start eight streams, and enter the block when each has had its first token."""
    all_started = Barrier(len(PROMPTS) + 1)

    def text(prompt: str) -> str:
        stream = sdk.completions.create(
            model="demo", prompt=prompt, temperature=0, max_tokens=20, stream=True, extra_body={"ignore_eos": True}
        )
        parts = [next(stream).choices[0].text]
        all_started.wait(60)
        return "".join([*parts, *(chunk.choices[0].text for chunk in stream)])

    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        streams = [threads.submit(text, prompt) for prompt in PROMPTS]
        all_started.wait(60)
        yield streams


def test_bad_requests_are_refused_and_do_not_change_the_text_of_streams(live: LiveServer, sdk: openai.OpenAI) -> None:
    with eight_streams(sdk) as streams:
        undisturbed = [stream.result() for stream in streams]
    with live.http() as http, eight_streams(sdk) as streams:
        for bad in BAD_REQUESTS:
            check_refused(bad, bad.send(http))
        while wait(streams, timeout=0).not_done:  # send them again until the last token
            for bad in BAD_REQUESTS:
                bad.send(http)
        assert [stream.result() for stream in streams] == undisturbed
    assert len(set(undisturbed)) == len(PROMPTS)
