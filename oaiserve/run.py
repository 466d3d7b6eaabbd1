"""Starts the server of a single model, which runs until a signal, or loads one of several models.

Heavy modules such as torch are imported only after the settings, the port and the certificate have been checked.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from oaiserve import plugin_loading
from oaiserve.checkpoints import demo
from oaiserve.checkpoints.progress import Doing
from oaiserve.commands import banner as banners
from oaiserve.commands import model_banner
from oaiserve.commands.banner import Banner
from oaiserve.commands.file_checks import warn_of_exposed_keys
from oaiserve.commands.listening import end_at_once_on_interrupt, page_of_request, run_until_signal
from oaiserve.commands.servers import announced
from oaiserve.config import Config
from oaiserve.engine.start.start_times import StartTimes
from oaiserve.engine.types.pooling import Task
from oaiserve.errors import DeviceLost, StartupError
from oaiserve.explain.commands import settings_in
from oaiserve.http.connections import allowed_connections
from oaiserve.plugin import Plugin
from oaiserve.plugin_loading import Found
from oaiserve.routes.intake.sampling_defaults import sampling_defaults
from oaiserve.run_engine import STDERR, end_load, load_engine, prepare_process
from oaiserve.runtime import THREADS

if TYPE_CHECKING:
    from oaiserve.app import App
    from oaiserve.engine.boundary import AnyEngine
    from oaiserve.http.server import Server
    from oaiserve.process.child import ChildProcess
    from oaiserve.process.messages import Start
    from oaiserve.process.placement import Placement

logger = logging.getLogger(__name__)


def serve_model(config: Config, sock: socket.socket, found: Found, ready: Callable[[], None] | None = None) -> int:
    """Serve one model until a signal, with the plug-ins that were found, and return the exit code.

    If another process of oaiserve has started this one, `ready` is called instead of printing the banner.
    """
    times = StartTimes()
    times.since_begin("command line")
    prepare_process()
    with times.part("import of the log"):
        from oaiserve.telemetry import logs

    url = banners.address(config.server, sock.getsockname()[1] if ready is None else config.server.port)
    log_limit = logs.configure(
        config.server.log_level,
        config.server.log_format,
        model=None if ready is None else config.model_name,
        address_of=lambda request_id: page_of_request(app.state.pages, url, request_id),
    )
    faulthandler.enable(STDERR)  # Otherwise crashes in native code, or from a truncated mapped file, would log nothing.
    if ready is None:
        warn_of_exposed_keys(config)
    with times.part("plug-ins"):
        found.log()
        plugins = found.plugins
        plugin_loading.check(plugins, config)
        if config.server.front_processes > 1:
            from oaiserve.fronts.main_process import check

            check(config, plugins, is_child=ready is not None)
    with times.part("check of OpenTelemetry's variables"):
        from oaiserve.telemetry import check_tracing

        check_tracing()
    logger.info("Loading %s ...", config.model_name)
    places: list[Placement] = []
    if ready is None:  # A child process must not start further processes.
        from oaiserve.process.placement import apart

        places = apart(config.server, config.engine.device)
    title = f"Loading {config.model_name}"
    # An engine process reports its own progress.
    with nullcontext() if places else Doing(title, lambda: times.current, logger.info, has_bar=ready is None):
        engine = _engine(config, times, plugins, places)
        with times.part("server"):
            from oaiserve.app import create_app, server_telemetry

            connections = allowed_connections(config.server, THREADS.clock_ns)
            telemetry = server_telemetry(config, engine, connections, log_limit, plugins, runtime=THREADS)
            more: dict[str, Any] = {}
            kind: Callable[..., Server] | None = None
            if config.server.front_processes > 1:
                from oaiserve.fronts.main_process import FrontsServer
                from oaiserve.process.remote_engine import RemoteEngine

                assert isinstance(engine, RemoteEngine)
                more["has_others_elsewhere"] = engine.has_others
                kind = partial(FrontsServer, config=config, engine=engine, telemetry=telemetry)
            app = create_app(config, engine, telemetry, plugins=plugins, **more)
    end_load()
    logger.debug("Start, in ms since the process began: %s", times)
    _warn_of_defaults(config, engine)
    task: Task = "generate" if engine.pooling is None else engine.pooling.task
    facts = model_banner.engine_facts(config, engine)
    use: model_banner.Use = "complete" if task == "generate" and engine.tokenizer.chat_template is None else task
    on_ready: Banner | Callable[[], None] = model_banner.of_server(
        config, sock.getsockname()[1], use, facts, has_pages=bool(app.state.pages.links)
    )
    if ready is not None:
        logger.info("%s", "; ".join(facts.values()))
        on_ready = ready
    with nullcontext() if ready is not None else announced(url, config.model_name):
        run_until_signal(
            app, config, sock, connections, on_ready, on_drain=engine.drain, failure=lambda: engine.failure, kind=kind
        )
    if engine.failure is None:
        return 0
    return 1


def _engine(config: Config, times: StartTimes, plugins: Sequence[Plugin], places: list[Placement]) -> AnyEngine:
    """Load the model, in engine processes if there are any `places` for them. Raises StartupError."""

    def import_server() -> None:
        with times.part("import of the server"):
            import oaiserve.app  # noqa: F401

            plugin_loading.import_early(plugins, reads_calls=config.server.tool_call_parser != "none")

    try:
        if places:
            return _remote_engine(config, places, times, import_server)
        return load_engine(config.model, config.engine, times, plugins, import_server)
    except DeviceLost as error:
        logger.warning("%s The server starts again without kernels of its own", error)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _remote_engine(
    config: Config, places: list[Placement], times: StartTimes, import_server: Callable[[], None]
) -> AnyEngine:
    """Start an engine process in each place, and wait until all have loaded the model. Raises StartupError."""
    from oaiserve.engine.accounts.energy import Energy
    from oaiserve.process.child import ChildProcess
    from oaiserve.process.remote_engine import RemoteEngine

    # A download shows its progress, and Ctrl-C removes what is not complete.
    if config.model == "demo":
        times.run("files of the demo", demo.fetched)
    end_at_once_on_interrupt()  # until the server handles signals
    starts = _starts(config, places)
    started = [[ChildProcess(start, THREADS, place.gpu)] for start, place in zip(starts, places, strict=True)]

    def launch(index: int) -> ChildProcess:
        return started[index].pop() if started[index] else ChildProcess(starts[index], THREADS, places[index].gpu)

    import_server()
    with times.part("engine process"):
        engine = RemoteEngine(
            [partial(launch, index) for index in range(len(places))],
            config.engine,
            THREADS,
            Energy.found(THREADS.clock_ns, gpus=[place.gpu for place in places if place.gpu]),
        )
    try:
        _check_gpus(engine, places)
    except StartupError:
        engine.stop()
        raise
    return engine


def app_without_engine(config: Config, plugins: Sequence[Plugin]) -> App:
    """Return an app with the routes of a model but without an engine. It can only answer requests that match no
    route."""
    from oaiserve.app import App, routes

    return App(routes=routes(config, plugins))


def load_behind(config: Config, front: App, launched: Callable[[ChildProcess], None]) -> tuple[App, AnyEngine]:
    """Load one of several models in its engine processes, and return the app with its routes, which the app in `front`
    calls. `launched` is called with each process that is started for the model, now or later. Any thread may call this.
    Raises StartupError."""
    from oaiserve.app import create_app, server_telemetry
    from oaiserve.process.child import ChildProcess
    from oaiserve.process.placement import placements
    from oaiserve.process.remote_engine import RemoteEngine

    places = placements(config.server.replicas, config.engine.device)
    starts = _starts(config, places, of=config.model_name)

    def launch(index: int) -> ChildProcess:
        process = ChildProcess(starts[index], THREADS, places[index].gpu)
        launched(process)
        return process

    found = plugin_loading.find(
        config.server.plugin, {} if config.file is None else plugin_loading.tables_in(settings_in(config.file))
    )
    found.log()
    plugins = [plugin for plugin in found.plugins if not plugin.inner.is_in_front]
    engine = RemoteEngine(
        [partial(launch, index) for index in range(len(places))],
        config.engine,
        THREADS,
        cores_ns=lambda: 0,  # The CPU time of this process is shared by all models, so it is charged to none.
        of=f" of the model {config.model_name}",
    )
    try:
        _check_gpus(engine, places)
        telemetry = server_telemetry(config, engine, None, plugins=plugins, runtime=THREADS)
        app = create_app(config, engine, telemetry, plugins=plugins, front=front)
        _warn_of_defaults(config, engine)
        logger.info("%s: %s", config.model_name, "; ".join(model_banner.engine_facts(config, engine).values()))
        return app, engine
    except BaseException:
        engine.stop()
        raise


def _warn_of_defaults(config: Config, engine: AnyEngine) -> None:
    """Warn of default sampling parameters in the model's files that requests cannot get."""
    if engine.pooling is None:
        for problem in sampling_defaults(config, engine.default_params, engine.recommendation).ignored:
            logger.warning("A default in the model's files is not used. %s", problem)


def _check_gpus(engine: AnyEngine, places: list[Placement]) -> None:
    """Raise StartupError if replicas were placed on GPUs, but the model runs on the CPU."""
    if engine.is_on_cpu and places[0].gpu:
        raise StartupError(
            f"--replicas found {len(places)} GPUs, but the model runs on the CPU. Use --device cpu, or torch for GPUs."
        )


def _starts(config: Config, places: list[Placement], of: str = "") -> list[Start]:
    """Return the first message to the engine process in each place. In its log lines, a process is named by `of` and
    its replica."""
    from oaiserve.process.messages import Start
    from oaiserve.process.placement import options_of

    starts = []
    for index, place in enumerate(places):
        names = [of, f"replica {index}" if len(places) > 1 else ""]
        start = Start(
            model=config.model,
            name=config.model_name,
            # After a hang, a new process is started.
            options=replace(options_of(config.engine, places, index), exit_on_hang=True),
            plugins=config.server.plugin,
            settings=config.file,
            log_level=config.server.log_level,
            log_format=config.server.log_format,
            replica=" ".join(filter(None, names)) or None,
            cpus=place.cpus,
        )
        starts.append(start)
    return starts
