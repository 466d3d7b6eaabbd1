"""Simulates fleets and prints tables for docs/scale.md: python -m tools.fleet PART

four    four replicas beside one with four times the cache, with the real scheduler, under all policies
model   the model of a replica beside the real one, on the same requests
scale   1,000 replicas and 100,000 requests a second, with a burst, a zone that fails and a rolling update
slo     the highest rate within a SLO, under all policies
state   what a router takes: time for a decision, memory for a replica and for a prefix
apart   prefill on replicas of its own, at several shares of them
"""

from __future__ import annotations

from tools.fleet import apart, four, model, scale, slo, state
from tools.parts import run_part

PARTS = {"four": four, "model": model, "scale": scale, "slo": slo, "state": state, "apart": apart}

if __name__ == "__main__":
    run_part(PARTS, "fleet", __doc__)
