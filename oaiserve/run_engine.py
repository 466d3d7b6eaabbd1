"""Loads the engine of a server, in this process, or in an engine process that a server has started."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from oaiserve import interpreter, plugin_loading
from oaiserve.checkpoints import demo
from oaiserve.checkpoints.progress import Doing
from oaiserve.commands.listening import end_at_once_on_interrupt
from oaiserve.config import EngineOptions
from oaiserve.engine.start.start_times import StartTimes
from oaiserve.explain.commands import settings_in
from oaiserve.plugin import Plugin
from oaiserve.plugin_loading import tables_in
from oaiserve.runtime import THREADS, Queue
from oaiserve.system_memory import give_back, keep_freed, share_arenas

if TYPE_CHECKING:
    from oaiserve.engine.engine import Engine
    from oaiserve.process.messages import ToEngine

log = logging.getLogger(__name__)

STDERR = 2  # file descriptor
MOST_GOODBYE_SECONDS = 10.0  # after which an engine process ends if its front process has ended


def prepare_process() -> None:
    """Prepare this process for a model and its threads."""
    interpreter.begin_load()
    interpreter.switch_often()
    share_arenas()
    # Without this, torch searches all installed packages for plug-ins for other devices.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    # Without this, torch's threads spin while they wait for each other. If other programs use the cores, a step of a
    # 0.5B model in plain PyTorch then takes minutes, because the thread that has work doesn't get a core.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def end_load() -> None:
    """End the preparations for a load. What has been loaded stays in memory, and garbage collections skip it."""
    interpreter.end_load()
    give_back()  # returns memory that was only needed to load
    keep_freed()


def load_engine(
    model: str,
    options: EngineOptions,
    times: StartTimes,
    plugins: Sequence[Plugin],
    meanwhile: Callable[[], object] = lambda: None,
) -> Engine:
    """Load the model. `meanwhile` is called while a library is being loaded. Raises StartupError."""
    if model == "demo":
        if not demo.is_fetched():
            with times.part("start of the compiler"):
                from oaiserve.engine.start.plan import compile_early

                compile_early(options, "bfloat16")  # the data type of the demo's files
        times.run("files of the demo", demo.fetched)  # Ctrl-C still removes a partial download here.
    end_at_once_on_interrupt()  # until the server handles signals
    with times.part("import of the engine"):
        from oaiserve.engine.engine import Engine

    with times.part("model"):
        plugin_loading.add_models(plugins)
        return Engine.from_pretrained(
            model,
            options,
            times=times,
            meanwhile=meanwhile,
            rules=partial(plugin_loading.rules_of, plugins),
            ways=partial(plugin_loading.ways_of, plugins),
            load_media=plugin_loading.media_of(plugins),
        )


def run(arguments: list[str]) -> int:
    """Run as the engine process of a front process until that ends this one, and return the exit code.

    The first argument is the file descriptor of the socket to the front process, which sends the settings.
    """
    from oaiserve.process.link import SocketLink
    from oaiserve.process.messages import NotStarted, Start, Stop, ToEngine
    from oaiserve.process.plain_data import decoder
    from oaiserve.process.server import EngineServer

    faulthandler.enable(STDERR)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # A service manager sends these to all processes.
        signal.signal(number, signal.SIG_IGN)
    link = SocketLink(socket.socket(fileno=int(arguments[0])), decoder(ToEngine), "front", THREADS)
    inbox: Queue[Start | Stop] = THREADS.queue()
    server: EngineServer | None = None

    def received(message: ToEngine) -> None:
        if isinstance(message, Start):
            inbox.put(message)
        elif server is not None:
            server.received(message)
        else:  # The front stops the process without waiting for the load.
            os._exit(0)

    def closed() -> None:
        if server is None:
            os._exit(1)
        server.front_ended()
        THREADS.later("front-ended", MOST_GOODBYE_SECONDS, lambda: os._exit(1))  # A hanging step must not stop this.

    link.start(received, closed)
    start = inbox.get()
    assert isinstance(start, Start)
    if start.cpus:  # Compute threads inherit the affinity of this thread.
        os.sched_setaffinity(0, start.cpus)
    from oaiserve.telemetry import logs

    logs.configure(start.log_level, start.log_format, model=start.replica)
    prepare_process()
    try:
        found = plugin_loading.find(
            start.plugins, {} if start.settings is None else tables_in(settings_in(start.settings))
        )
        times = StartTimes()
        with Doing(f"Loading {start.name}", lambda: times.current, log.info, has_bar=False):
            engine = load_engine(start.model, start.options, times, found.plugins)
    except Exception as error:
        link.send(NotStarted(error))
        link.close()
        link.join()
        return 2
    end_load()
    server = EngineServer(engine, link, lambda seconds: inbox.put(Stop(seconds)), THREADS)
    server.start()
    stop = inbox.get()
    assert isinstance(stop, Stop)
    server.stop(stop.drain_timeout_seconds)
    link.join()
    sys.stdout.flush()
    return 0 if engine.failure is None else 1
