import httpx
import pytest

from loadtest.gauges import Gauges, GaugeWatch
from tests.world.loop import World

GAUGES = Gauges("x:running", "x:waiting", "x:usage")


def test_gauges_are_found_among_other_metrics_and_combined_over_engines() -> None:
    text = (
        "# HELP x:running of x:running\n# TYPE x:running gauge\n"
        'x:running{engine="0",model="a} b"} 3.0\nx:running{engine="1",model="m"} 4.0\nx:running_total 99\n'
        'x:usage{engine="0"} 0.5\nx:usage{engine="1"} 1e-1\nx:waiting 2\n'
    )
    assert GAUGES.read(text) == {"running": 7, "waiting": 2, "kv_cache_usage": 0.3}
    assert GAUGES.read("") == {"running": None, "waiting": None, "kv_cache_usage": None}


def test_a_watch_reads_until_its_end_and_reports_the_cost_of_reading() -> None:
    world = World(0)
    count = 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal count
        assert request.url.path == "/metrics"
        count += 1
        world.sleep(0.01 * count)
        if count == 2:
            raise httpx.ReadTimeout("slow")
        return httpx.Response(200, text=f"x:running {count}\n")

    with httpx.Client(transport=httpx.MockTransport(answer), base_url="http://test") as client:
        start_ns = world.now_ns
        with GaugeWatch(client, GAUGES, 1.0, world) as watch:
            world.settle(4.5)
    report = watch.report(start_ns)
    assert (report["num_failed"], report["num_reads"]) == (1, 3)
    assert [row["running"] for row in report["series"]] == [1, 3, 4]
    # The next read is due one period after the end of the last one.
    assert [row["at"] for row in report["series"]] == pytest.approx([1.01, 3.06, 4.10], abs=1e-4)
    assert (report["mean_seconds"], report["max_seconds"]) == pytest.approx((0.08 / 3, 0.04))
    assert report["cpu_seconds"] > 0
    assert watch.report(world.now_ns)["series"] == []


def test_a_run_that_ends_before_the_first_read_has_an_empty_series() -> None:
    with httpx.Client(base_url="http://test") as client, GaugeWatch(client, GAUGES, 60, World(0)) as watch:
        pass
    report = watch.report(0)
    assert (report["num_reads"], report["mean_seconds"], report["series"]) == (0, None, [])
