"""Files are fetched through real sockets: TLS certificates are checked, and so is the address that a name has."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from oaiserve.errors import NotFetched
from oaiserve.http import fetch
from oaiserve.http.fetch import Fetcher
from tests.waiting import LIMIT_SECONDS

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\ncontent-length: 3\r\n\r\nPNG"


def fetched(certificate: Path, trusted: Path | None, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Return a file from https://localhost. Raises NotFetched."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD)
        writer.close()

    async def run() -> bytes:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate)
        async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as server:
            at = f"localhost:{server.sockets[0].getsockname()[1]}"
            return await Fetcher([at]).fetch(f"https://{at}/", "image", 100, lambda _: None)

    if trusted is not None:
        monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    fetch.tls_context.cache_clear()
    try:
        return asyncio.run(run())
    finally:
        fetch.tls_context.cache_clear()


@pytest.mark.openssl
def test_a_certificate_of_a_given_authority_is_accepted(
    certificates: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fetched(certificates["sound"], certificates["sound"], monkeypatch) == b"PNG"


@pytest.mark.openssl
@pytest.mark.parametrize(
    ("kind", "is_trusted", "reason"),
    [
        ("sound", False, "self-signed certificate"),
        ("expired", True, "certificate has expired"),
        ("of another", True, "Hostname mismatch, certificate is not valid for 'localhost'"),
    ],
)
def test_other_certificates_are_refused_with_the_reason(
    certificates: dict[str, Path], monkeypatch: pytest.MonkeyPatch, kind: str, is_trusted: bool, reason: str
) -> None:
    with pytest.raises(NotFetched) as caught:
        fetched(certificates[kind], certificates[kind] if is_trusted else None, monkeypatch)
    assert str(caught.value) == f"the certificate of its host is not accepted: {reason}"


@pytest.mark.parametrize("url", ["http://{}/", "https://{}/"])
def test_a_host_that_is_silent_keeps_no_connection(url: str) -> None:
    async def run() -> None:
        connected: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()

        async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connected.put_nowait((reader, writer))

        async with await asyncio.start_server(keep, "127.0.0.1", 0) as server:
            at = f"localhost:{server.sockets[0].getsockname()[1]}"
            async with asyncio.timeout(LIMIT_SECONDS):
                while connected.empty():  # On a busy machine, the time may be up before it connects.
                    with pytest.raises(NotFetched, match="did not come"):
                        await Fetcher([at], seconds=0.5).fetch(url.format(at), "image", 100, lambda _: None)
                while not connected.empty():
                    reader, writer = connected.get_nowait()
                    await reader.read()  # up to its end: the connection was closed
                    writer.close()
                    await writer.wait_closed()

    asyncio.run(run())


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> tuple[bytes, int]:
        num_proxied = 0

        async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_proxied
            num_proxied += 1
            writer.close()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(HEAD)
            writer.close()

        async with (
            await asyncio.start_server(proxy, "127.0.0.1", 0) as trap,
            await asyncio.start_server(answer, "127.0.0.1", 0) as server,
        ):
            for name in ("http_proxy", "https_proxy", "all_proxy"):
                monkeypatch.setenv(name, f"http://127.0.0.1:{trap.sockets[0].getsockname()[1]}")
                monkeypatch.setenv(name.upper(), f"http://127.0.0.1:{trap.sockets[0].getsockname()[1]}")
            for name in ("no_proxy", "NO_PROXY"):
                monkeypatch.delenv(name, raising=False)
            at = f"localhost:{server.sockets[0].getsockname()[1]}"
            content = await Fetcher([at]).fetch(f"http://{at}/", "image", 100, lambda _: None)
            return content, num_proxied

    assert asyncio.run(run()) == (b"PNG", 0)


def can_unshare() -> bool:
    command: Sequence[str] = ["unshare", "--mount", "--net", "true"]
    return (
        shutil.which("unshare") is not None and not subprocess.run(command, capture_output=True, check=False).returncode
    )


@pytest.mark.skipif(not can_unshare(), reason="only root may replace the resolver")
def test_a_name_whose_address_changes_leads_to_the_address_that_was_checked() -> None:
    command = ["unshare", "--mount", "--net", sys.executable, "-m", "tests.http.changing_names"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    expected = "127.0.0.2: 30, 127.0.0.3: 0, fetched: 30, refused: 30, without an address: 10\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")
