"""The responses made in the background that this process has in memory."""

from oaiserve.plugins.responses.runs import Run, Runs
from oaiserve.plugins.responses.store import StoredResponse
from oaiserve.plugins.shared.store_options import StoreLimits


def run_of(name: str) -> Run:
    return Run("", StoredResponse(name, name, None, b"{}", b"[]"))


async def test_response_that_failed_long_ago_is_gone_whenever_others_began() -> None:
    runs = Runs(StoreLimits(9, 10**6, 60.0))
    young, old, running = (run_of(name) for name in ("young", "old", "running"))
    for run in (young, old, running):
        runs.add(run)
    young.end()
    old.end()
    assert runs.get("", "old") is old
    old.ended -= 60.0
    assert runs.get("", "old") is None
    assert runs.get("", "young") is young
    assert runs.get("", "running") is running
    runs.make_room()
    old.ended = young.ended
    assert runs.get("", "old") is None, "it is no longer in memory"
