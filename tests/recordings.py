"""Writes recordings of loads."""

import json
from pathlib import Path
from typing import Any

from oaiserve.explain.step_cost import KNOTS

COST = {"rows_ns": [1e6] * len(KNOTS), "draw_ns": 5.0}


def row(timestamp: float, length: int, answer: int, hashes: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    phases_ns = dict.fromkeys(("receive", "tokenize_wait", "tokenize", "queue", "prefill", "decode", "respond"), 10**6)
    return {
        "timestamp": timestamp,
        "input_length": length,
        "output_length": answer,
        "n": 1,
        "client": None,
        "blocks": "".join(hashes),
        "outcome": "finished",
        "num_steps": 4,
        "host_ns": 8 * 10**6,
        "phases_ns": phases_ns,
        **fields,
    }


def written(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
