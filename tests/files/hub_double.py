"""A double of the Hugging Face hub: it serves a folder of files as one repository, to the hub's own client."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

REPOSITORY = "someone/model"
_COMMIT = "0" * 40


@contextmanager
def hub_of(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve `folder` as the files of REPOSITORY; yield the address, and the names of the files that were sent."""
    sent: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
            if path.startswith(f"/api/models/{REPOSITORY}/tree/"):
                tree = [{"type": "file", "path": name, "size": 1, "oid": _digest(folder / name)} for name in names]
                self._send(json.dumps(tree).encode(), body=body)
            elif path.startswith(f"/api/models/{REPOSITORY}"):
                siblings = [{"rfilename": name} for name in names]
                described = {"id": REPOSITORY, "sha": _COMMIT, "siblings": siblings}
                self._send(json.dumps(described).encode(), body=body)
            elif (name := path.removeprefix(f"/{REPOSITORY}/resolve/{_COMMIT}/")) in names:
                if body:
                    sent.append(name)
                self._send((folder / name).read_bytes(), body=body, etag=_digest(folder / name))
            elif path == "/":
                self._send(b"", body=body)
            else:
                self._send(b"{}", body=body, status=404, error="RepoNotFound")

        def _send(self, data: bytes, *, body: bool, status: int = 200, etag: str = "", error: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            if etag:
                self.send_header("ETag", f'"{etag}"')
                self.send_header("X-Repo-Commit", _COMMIT)
            if error:
                self.send_header("X-Error-Code", error)
            self.end_headers()
            if body:
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", sent
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
