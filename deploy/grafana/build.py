"""Write the dashboards as the JSON that Grafana reads: python -m deploy.grafana.build

This needs the version of grafana-foundation-sdk in constraints.txt. Each release is for one version of Grafana, and a
newer release is not always for a newer Grafana.
"""

from __future__ import annotations

from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from deploy.grafana import cost, engine, engines, gateway, overview, slo, where_time_goes, why

FOLDER = Path(__file__).parent / "dashboards"


def pages() -> dict[str, str]:
    """Return the JSON of each dashboard by the name of its file."""
    encoder = JSONEncoder(sort_keys=True, indent=2)
    boards = [module.dashboard() for module in (overview, where_time_goes, why, cost, engine, slo, gateway, engines)]
    return {f"{board.uid}.json": encoder.encode(board) + "\n" for board in boards}


if __name__ == "__main__":
    for name, page in pages().items():
        (FOLDER / name).write_text(page)
