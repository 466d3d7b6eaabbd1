"""`ChildProcess`: an engine process as a child of this one, which ends when this one does."""

from __future__ import annotations

from oaiserve.process.link import SocketLink
from oaiserve.process.linked_process import LinkedProcess
from oaiserve.process.messages import Start, ToFront
from oaiserve.process.placement import VISIBLE_GPUS
from oaiserve.process.plain_data import decoder
from oaiserve.runtime import Runtime

PROGRAM: tuple[str, ...] = ("-m", "oaiserve")  # Benchmarks use one whose engine computes nothing.
COMMAND = "engine-process"  # hidden subcommand


class ChildProcess(LinkedProcess):
    """An engine process, which has been started and loads its model."""

    def __init__(self, start: Start, runtime: Runtime, gpu: str = "") -> None:
        """Without a `gpu`, the child sees the same GPUs as this process."""
        names = [start.model, *filter(None, [start.replica])]
        super().__init__((*PROGRAM, COMMAND), names, environment={VISIBLE_GPUS: gpu} if gpu else None)
        self.link = SocketLink(self.socket, decoder(ToFront), "engine", runtime)
        self.link.send(start)
