"""Appends a line for each ended request to a file: its key, its model, its end, and the tokens it used."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from oaiserve.plugin import Plugin, RequestRecord, StartupError


def plugin(settings: Mapping[str, Any]) -> Plugin:
    """Return the plug-in. The settings may have the name of the `file`."""
    file = Path(settings.get("file", "ledger.csv"))
    if not file.parent.is_dir():
        raise StartupError(f"the file is '{file}', but there is no folder '{file.parent}'.")
    return Plugin(name="ledger", observe=partial(write_line, file))


def write_line(file: Path, record: RequestRecord) -> None:
    tokens = record.prompt_tokens, record.completion_tokens
    with file.open("a") as ledger:
        print(record.client or "", record.model, record.outcome.value, *tokens, sep=",", file=ledger)
