"""Check within seconds whether the Hugging Face hub can be reached. Its own client retries for almost a minute."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request

TIMEOUT_SECONDS = 3.0


def is_reachable(endpoint: str | None = None, timeout_seconds: float = TIMEOUT_SECONDS) -> bool:
    """Return whether `endpoint` answers an HTTP request, with any status.

    The default endpoint is the hub, or the mirror that HF_ENDPOINT names. For the default, the answer is False without
    a request if HF_HUB_OFFLINE is set.
    """
    if endpoint is None:
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            return False
        endpoint = constants.ENDPOINT
    answered = threading.Event()

    def ask() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=timeout_seconds):
                answered.set()
        except urllib.error.HTTPError:
            answered.set()
        except (OSError, ValueError):
            pass  # unreachable, refused, or not a URL: the event stays unset

    # The request runs on a thread, because resolving a host name has no timeout.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    return answered.is_set()
