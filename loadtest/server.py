"""A server to measure: its address, the key for it, and its model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import httpx

from loadtest.errors import UsageError
from loadtest.http_target import HttpOptions
from oaiserve.commands import servers

ASK_SECONDS = 30.0  # time limit of requests that are not part of the load


def addressed(http: HttpOptions) -> HttpOptions:
    """Return the options with the URL without /v1, and with the API key. By default, the URL is that of the server that
    started last on this machine, and the key is OPENAI_API_KEY. Raises StartupError if there is no URL and no server.
    """
    url = (http.url or servers.newest().url).rstrip("/").removesuffix("/v1")
    return replace(http, url=url, api_key=http.api_key or os.environ.get("OPENAI_API_KEY") or None)


def client_for(http: HttpOptions) -> httpx.Client:
    """Return a client for requests that are not part of the load."""
    return httpx.Client(
        base_url=http.url or "",
        headers=http.headers(),
        verify=http.tls_context(),
        trust_env=False,
        timeout=ASK_SECONDS,
    )


@contextmanager
def reaching(url: str | None) -> Iterator[None]:
    """Raise UsageError if the server can't be reached within this block."""
    try:
        yield
    except httpx.HTTPError as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            raise UsageError(
                f"--url is {url}, whose certificate is not trusted: {error}. Give the certificate, or that of its "
                "authority, with --ca-certificate or SSL_CERT_FILE."
            ) from error
        raise UsageError(f"--url is {url}, where no server answers: {error}.") from error


def first_model(client: httpx.Client) -> str:
    """Return the first model that a server lists. Raises UsageError."""
    response = client.get("/v1/models")
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        advice = "Give an --api-key" if response.status_code in (401, 403) else "Name one with --model"
        raise UsageError(f"/v1/models answers {response.status_code} and lists no model. {advice}.") from None
