"""Write the rules for Prometheus as an object of the Prometheus operator: python -m deploy.kubernetes.build"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent
RULE_FILES = [FOLDER.parent / "prometheus" / name for name in ("recording.rules.yml", "alerts.rules.yml")]
HEAD = """\
# A PrometheusRule for the Prometheus operator. It is generated from deploy/prometheus/*.rules.yml: change those, then
# run python -m deploy.kubernetes.build
"""


def prometheus_rule() -> dict[str, Any]:
    groups = [group for file in RULE_FILES for group in yaml.safe_load(file.read_text())["groups"]]
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "oaiserve", "labels": {"app.kubernetes.io/name": "oaiserve"}},
        "spec": {"groups": groups},
    }


class Dumper(yaml.SafeDumper):
    """A dumper that writes no anchors and aliases, and writes texts of several lines as blocks."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


Dumper.add_representer(str, _text)


def page() -> str:
    return HEAD + yaml.dump(prometheus_rule(), Dumper=Dumper, sort_keys=False, width=120)


if __name__ == "__main__":
    (FOLDER / "prometheusrule.yaml").write_text(page())
