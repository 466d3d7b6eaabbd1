"""The tool that measures a step's host time takes steps of all sequences, with replayed graphs."""

from argparse import Namespace
from unittest.mock import patch

from oaiserve.engine.stepper import Stepper
from oaiserve.plugins.cuda.executor.step_graphs import StepGraphs
from oaiserve.plugins.cuda.executor.step_sizes import Size
from tools.bench.host_step import measure, report


def test_steps_of_all_sequences_are_replayed_and_reported() -> None:
    launch = StepGraphs.launch
    sizes: list[Size] = []

    def counted(self: StepGraphs, size: Size, *arguments: object) -> object:
        sizes.append(size)
        return launch(self, size, *arguments)  # type: ignore[arg-type]

    turn = Stepper.turn

    def begun_together(self: Stepper) -> bool:
        """Begin with all three sequences, however late the requests come."""
        lane = self._scheduler.foreground
        return False if not lane.running and 0 < lane.num_waiting < 3 else turn(self)

    with patch.object(StepGraphs, "launch", counted), patch.object(Stepper, "turn", begun_together):
        results = measure(Namespace(sequences=[3], tokens=12, turns=1, prompt_tokens=40, loads=["greedy", "sampled"]))

    by_load = results["cpu_us_per_step"]
    assert [*by_load] == ["greedy", "sampled"]
    assert all(len(by_count["3"]) == 1 and by_count["3"][0] > 0 for by_count in by_load.values())
    assert sizes.count(Size(3, 0)) >= 2 * 2 * 10  # of two loads, in a warm-up and a turn
    assert "| sampled | 3 |" in report(results)
