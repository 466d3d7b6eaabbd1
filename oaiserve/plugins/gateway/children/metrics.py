"""The metrics of all models at one address: each sample of a process gets the label `served_model`."""

from __future__ import annotations

import re
from collections.abc import Mapping

LABEL = "served_model"
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


def merged(own: str, texts: Mapping[str, str]) -> str:
    """Return one text in Prometheus' format with the gateway's own metrics, and those of each model's process."""
    families: dict[str, list[str]] = {}  # lines by family, because a family must be in one piece
    for name, text in (("", own), *texts.items()):
        label = f'{LABEL}="{_escaped(name)}"'
        family: list[str] = []
        for line in text.split("\n"):
            if line.startswith("#"):
                _, kind, metric, *_ = line.split(" ", 3)
                family = families.setdefault(metric, [])
                if not any(known.startswith(f"# {kind} ") for known in family):
                    family.append(line)
            elif line:
                family.append(_labelled(line, label) if name else line)
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def _labelled(line: str, label: str) -> str:
    match = _NAME.match(line)
    assert match is not None
    metric = match[0]
    rest = line[match.end() :]
    return f"{metric}{{{label},{rest[1:]}" if rest.startswith("{") else f"{metric}{{{label}}}{rest}"


def _escaped(name: str) -> str:
    return name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
