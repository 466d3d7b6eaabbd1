"""The command `oaiserve batch`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

from oaiserve.checkpoints.progress import Progress
from oaiserve.commands.client import Client
from oaiserve.errors import StartupError
from oaiserve.plugins.shared.own_server import server_with

POLL_SECONDS = 0.2
INTERRUPTED = 130  # the exit code that shells use
_MARK = "oaiserve_batch"  # the digest of the file, in the metadata of a batch


class _Line(NamedTuple):
    """A line of the file with the requests."""

    number: int  # counted from 1
    text: bytes


def command(requests: Path, answers: Path, /, *, model: str | None = None, url: str | None = None) -> int:
    """Answer all requests of a file at low priority, and continue where an earlier run was stopped.

    If one of your servers has the model, it computes them. Otherwise a server is started, and stopped at the end. The
    command exits with 1 if requests failed, for example because of a wrong model.

    Parameters
    ----------
    requests
        A file of JSON lines with custom_id, url and body, as in OpenAI's batches.
    answers
        The file for the answers. Requests that it answers already are skipped.
    model
        The model. Default: that of the server that you started last on this machine, or else demo.
    url
        The server's address.
    """
    try:
        content = requests.read_bytes()
        numbered = [_Line(*each) for each in enumerate(content.splitlines(), start=1) if each[1].strip()]
        lines: dict[str, _Line] = {}
        for line in numbered:
            if (earlier := lines.setdefault(json.loads(line.text)["custom_id"], line)) is not line:
                double = f"Lines {earlier.number} and {line.number} of '{requests}' have the same custom_id."
                raise StartupError(f"{double} Give each request its own.")
        endpoints = {json.loads(line.text)["url"] for line in numbered}
        done = _done(answers)
    except (OSError, ValueError, TypeError, KeyError) as error:
        message = (
            f"'{requests}' must have custom_id, url and body in each line, and '{answers}' be writable: {error!r}."
        )
        raise StartupError(message) from error
    if len(endpoints) > 1:
        raise StartupError(f"'{requests}' has requests for {', '.join(sorted(endpoints))}: make a file for each.")
    digest = sha256(content).hexdigest()
    with ExitStack() as stack:
        _append(answers, [])  # Fails now, before any work, if the answers can't be written.
        bar = stack.enter_context(Progress(desc="Requests", total=len(lines), initial=len(done), unit=""))
        begun: list[str] | None = None  # batches of this file that an earlier run began
        while left := [line for name, line in lines.items() if name not in done]:
            if begun is None:
                client = server_with(stack, model, url)[0]
                begun = [one["id"] for one in client.ask("/v1/batches?limit=100")["data"] if _is_of(one, digest)]
            if begun:
                batch_id = begun.pop()
            else:
                batch_id = _begin(client, left, *endpoints, digest=digest)
            try:
                for page in _pages(client, batch_id):
                    new = []
                    for text in page:
                        answer = json.loads(text)
                        if answer["response"] is not None and answer["custom_id"] not in done:
                            done[answer["custom_id"]] = _error(answer)
                            new.append(text)
                    _append(answers, new)
                    bar.update(len(new))
            except KeyboardInterrupt:
                client.ask(f"/v1/batches/{batch_id}/cancel", {})
                print("Stopped. The same command continues.", file=sys.stderr)
                return INTERRUPTED
    print(f"'{answers}' has the answers to all of the {len(lines)} requests.", file=sys.stderr)
    failed = {name: done[name] for name in lines if done[name] is not None}
    if not failed:
        return 0
    first = next(iter(failed))
    print(f"{len(failed)} of them failed. The first is '{first}': {failed[first]}", file=sys.stderr)
    return 1


def _error(answer: dict[str, Any]) -> str | None:
    """Return the message of a request that failed, or None."""
    response = answer["response"]
    if response["status_code"] < 400:
        return None
    return str(response["body"]["error"]["message"])


def _done(answers: Path) -> dict[str, str | None]:
    """Return the requests whose answers are in a file, with the messages of those that failed. Cut off an incomplete
    line at the end of the file."""
    if not answers.exists():
        return {}
    content = answers.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    os.truncate(answers, len(whole))
    lines = [json.loads(text) for text in whole.splitlines()]
    return {line["custom_id"]: _error(line) for line in lines}


def _append(answers: Path, lines: list[bytes]) -> None:
    """Append lines to the file, so that they survive a crash of the machine. Raises StartupError."""
    try:
        with answers.open("ab") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        text = f"'{answers}' cannot be written: {error.strerror}. Once it can, the same command continues."
        raise StartupError(text) from error


def _is_of(batch: dict[str, Any], digest: str) -> bool:
    return (batch["metadata"] or {}).get(_MARK) == digest and batch["status"] in ("in_progress", "completed")


def _begin(client: Client, lines: list[_Line], endpoint: str, *, digest: str) -> str:
    content = b"\n".join(line.text for line in lines)
    boundary = token_hex(16)
    part = f'--{boundary}\r\nContent-Disposition: form-data; name="%s"\r\n\r\n'
    form = f"{part % 'purpose'}batch\r\n{part % 'file'}".encode() + content + f"\r\n--{boundary}--\r\n".encode()
    file = client.ask("/v1/files", form, f"multipart/form-data; boundary={boundary}")
    body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h", "metadata": {_MARK: digest}}
    batch = client.ask("/v1/batches", body)
    if batch["status"] == "failed":
        errors = [(lines[one["line"] - 1].number, one["message"]) for one in batch["errors"]["data"]]
        raise StartupError(" ".join(f"Line {number}: {message}" for number, message in errors))
    cost = batch["oaiserve"]
    seconds = batch["oaiserve"]["expected_seconds"]
    if seconds is None:
        time_of = "a time that is not known yet"
    else:
        time_of = f"{seconds:,.0f} s if nobody else asks"
    print(
        f"{batch['request_counts']['total']} requests: about {cost['prompt_tokens']:,} tokens of prompts, at most "
        f"{cost['output_tokens']:,} of answers, {time_of}.",
        file=sys.stderr,
    )
    return str(batch["id"])


def _pages(client: Client, batch_id: str) -> Iterator[list[bytes]]:
    after = 0
    while True:
        has_ended = client.ask(f"/v1/batches/{batch_id}")["status"] != "in_progress"
        with client.open(f"/v1/batches/{batch_id}/answers?after={after}") as answer:
            page = client.read(answer).splitlines(keepends=True)
        after += len(page)
        if page:
            yield page
        elif has_ended:
            return
        else:
            time.sleep(POLL_SECONDS)
