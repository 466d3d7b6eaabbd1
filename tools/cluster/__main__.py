"""Measures replicas on a real cluster of Ray and prints tables for docs/scale.md: python -m tools.cluster PART

faults   what clients see when something is killed, stopped, replaced or added
costs    what a streamed event costs through Ray, and how much later it comes, beside a server without Ray
"""

from __future__ import annotations

from tools.cluster import costs, faults
from tools.parts import run_part
from tools.server_process import exit_on_sigterm

PARTS = {"faults": faults, "costs": costs}

if __name__ == "__main__":
    exit_on_sigterm()
    run_part(PARTS, "cluster", __doc__)
