"""Appends a line for each ended request to the file in LEDGER_FILE: its key, its model, and the tokens it used."""

import os
from pathlib import Path

from oaiserve.facts.record import RequestRecord
from oaiserve.plugin import Plugin, StartupError

FILE = Path(os.environ.get("LEDGER_FILE", "ledger.csv"))

if not FILE.parent.is_dir():
    raise StartupError(f"LEDGER_FILE is '{FILE}', but there is no folder '{FILE.parent}'.")


def write_line(record: RequestRecord) -> None:
    with FILE.open("a") as file:
        tokens = record.prompt_tokens, record.completion_tokens
        print(record.client or "", record.model, record.outcome.value, *tokens, sep=",", file=file)


plugin = Plugin(name="ledger", observe=write_line)
