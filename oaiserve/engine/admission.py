"""Decides whether a request has room to wait: the limits of waiting choices and of bodies, shared between clients."""

from __future__ import annotations

from collections.abc import Callable

from oaiserve.errors import Overloaded
from oaiserve.http.shared_limit import SharedLimit

# Limit for all bodies that wait or are being worked on. A parsed body takes up to four times its bytes, or more as ids.
MAX_BODY_BYTES = 64 * 2**20
MAX_MEDIA_BYTES = 256 * 2**20  # limit for bodies that are mostly images, which are not parsed


class Admission:
    """Limits how much work may wait. Any thread may call this."""

    def __init__(self, max_waiting: int, retry_after_seconds: Callable[[int], int], *, has_media: bool) -> None:
        """`retry_after_seconds` returns how long it will take to begin with this many waiting choices."""
        self._max_waiting = max_waiting
        self._retry_after_seconds = retry_after_seconds
        self.waiting = SharedLimit(max_waiting)  # choices, and other work for the tokenizer
        self.body_bytes = SharedLimit(MAX_MEDIA_BYTES if has_media else MAX_BODY_BYTES)

    def take(self, client: str, num_sequences: int, num_bytes: int) -> None:
        """Count a waiting request's sequences and bytes. Raises Overloaded if there is no room for this client."""
        if not self.waiting.take(client, num_sequences):
            raise self._overloaded(
                f"{self.waiting.total} sequences are waiting already, this request has {num_sequences}, and the "
                f"limit is {self._max_waiting}"
            )
        if not self.body_bytes.take(client, num_bytes):
            self.waiting.give_back(client, num_sequences)
            raise self._overloaded("too many bytes of prompts are being tokenized already")

    def take_in_background(self, client: str, num_bytes: int, num_open: int) -> None:
        """Count the bytes of a background request. Raises Overloaded if there is no room for them, or if `max_waiting`
        background requests are open."""
        if num_open >= self._max_waiting:
            raise self._overloaded(f"{num_open} requests in the background are open already, the limit")
        self.take(client, 0, num_bytes)

    def _overloaded(self, reason: str) -> Overloaded:
        retry_after_seconds = self._retry_after_seconds(self.waiting.total)
        message = f"The server is overloaded: {reason}; try again later."
        return Overloaded(message, retry_after_seconds=retry_after_seconds)
