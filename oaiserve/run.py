"""Starts the servers of the command line: of one model, of several, or a gateway. Each serves until a signal.

Heavy modules such as torch are imported only after the settings, the port and the certificate have been checked.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from oaiserve import interpreter, plugin_loading
from oaiserve.checkpoints import demo
from oaiserve.checkpoints.adapters import BadAdapter, read_adapter
from oaiserve.commands import banner as banners
from oaiserve.commands.banner import Banner
from oaiserve.commands.servers import announced
from oaiserve.config import (
    Config,
    EngineOptions,
    ModelsOptions,
    RouteOptions,
    ServerOptions,
    TelemetryOptions,
)
from oaiserve.engine.pooling import Task
from oaiserve.engine.start.start_times import StartTimes
from oaiserve.errors import DeviceLost, StartupError
from oaiserve.explain.commands import settings_in
from oaiserve.http.connections import Connections, allowed_connections
from oaiserve.http.keys import Keyring, exposure
from oaiserve.plugin import Plugin
from oaiserve.plugin_loading import Found
from oaiserve.routes.intake.sampling_defaults import given_defaults, sampling_defaults
from oaiserve.screen import Screen

if TYPE_CHECKING:
    from oaiserve.routes.pages import Pages

logger = logging.getLogger(__name__)

BACKLOG = 2048  # connections that the system keeps until they are accepted
STDERR = 2  # file descriptor
CERTIFICATE_NOT_YET_VALID = 9  # OpenSSL's codes, which Python's ssl doesn't name
CERTIFICATE_EXPIRED = 10


def obey_signals_as_first_process() -> None:
    """Let SIGTERM and SIGHUP end the first process of a container before the server handles them. The kernel drops
    signals that this process doesn't handle, so that stopping a container would wait until it is killed."""
    if os.getpid() == 1:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _leave)


def _leave(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)  # as shells report it; an exception could be ignored


def check_files(server: ServerOptions, engine: EngineOptions, telemetry: TelemetryOptions) -> None:
    given_defaults(server.default_params)
    if server.tool_call_parser not in ("auto", "none"):
        from oaiserve.routes.dialects.families import check_name  # with their parsers, which take a while

        check_name(server.tool_call_parser)
    check_tls(server.tls_certificate, server.tls_key)
    _check_readable("--chat-template", engine.chat_template)
    for name, folder in engine.adapters.items():
        try:
            read_adapter(folder)
        except BadAdapter as error:
            raise StartupError(f"--lora {name}={folder} cannot be used: {error}.") from error
    if engine.lora_dir is not None and not engine.lora_dir.is_dir():
        raise StartupError(f"--lora-dir is '{engine.lora_dir}', which is not a folder.")
    Keyring((), server.api_key_file)  # raises StartupError if a file has no keys
    recording = telemetry.record_requests
    if recording is not None and not os.access(recording.parent, os.W_OK | os.X_OK):
        raise StartupError(f"--record-requests is '{recording}', but '{recording.parent}' is not a writable folder.")
    if recording is not None and recording.is_dir():
        raise StartupError(f"--record-requests is '{recording}', which is a folder, and must be a file.")


def _check_readable(flag: str, path: Path | None) -> None:
    try:
        if path is not None:
            path.open("rb").close()
    except OSError as error:
        raise StartupError(f"{flag} is '{path}', which cannot be read: {error.strerror}.") from error


def check_tls(certificate: Path | None, key: Path | None) -> None:
    _check_readable("--tls-certificate", certificate)
    _check_readable("--tls-key", key)
    if certificate is None:
        return
    try:
        # The empty passphrase keeps OpenSSL from asking for one at the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        raise StartupError(
            f"--tls-certificate '{certificate}' and --tls-key '{key}' are not a PEM certificate "
            f"and its key without a passphrase ({error.reason or error})."
        ) from error


def refused_certificate(certificate: Path, key: Path) -> str | None:
    """Return why clients refuse the certificate by its dates, from a handshake in memory; None if they don't."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(certificate)
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # The signer doesn't matter.
    to_server = ssl.MemoryBIO()
    to_client = ssl.MemoryBIO()
    begun = client.wrap_bio(to_client, to_server)
    answered = server.wrap_bio(to_server, to_client, server_side=True)
    for end in (begun, answered, begun):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            pass  # The other end is next.
        except ssl.SSLCertVerificationError as error:
            if error.verify_code in (CERTIFICATE_NOT_YET_VALID, CERTIFICATE_EXPIRED):
                return error.verify_message
            return None
    return None


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket before the model loads, so that a busy port is reported early. It does not listen yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:  # UnicodeError: the name cannot be encoded for a DNS query
        if isinstance(error, OSError):
            reason = error.strerror
        else:
            reason = "not a valid name"
        raise StartupError(f"--host is '{host}', which is not an address of this machine: {reason}.") from error
    try:
        # Allow binding a port that another server has just closed.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _cannot_listen(host, port, error) from error
    return sock


def _cannot_listen(host: str, port: int, error: OSError) -> StartupError:
    return StartupError(
        f"Cannot listen on {host} port {port}: {os.strerror(error.errno or 0)}. "
        "Choose another port with --port, or 0 for any free port."
    )


def serve_model(
    config: Config, sock: socket.socket, ready: Callable[[], None] | None = None, *, found: Found | None = None
) -> int:
    """Serve one model until a signal, and return the exit code.

    In the process of one of several models, `ready` replaces the banner. Without `found`, the settings say which
    plug-ins the server has.
    """
    times = StartTimes()
    times.since_begin("command line")
    interpreter.begin_load()
    interpreter.switch_often()
    # Otherwise torch looks for plugins for other devices in all installed packages.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    with times.part("import of the log"):
        from oaiserve.telemetry import logs

    url = banners.address(config.server, sock.getsockname()[1] if ready is None else config.server.port)
    log_limit = logs.configure(
        config.server.log_level,
        config.server.log_format,
        model=None if ready is None else config.model_name,
        address_of=lambda request_id: _page_of_request(app.state.pages, url, request_id),
    )
    faulthandler.enable(STDERR)  # Otherwise a crash in native code, or of a file that was cut, leaves no line.
    if ready is None:
        _warn_of_keys(config)
    with times.part("plug-ins"):
        if found is None:
            found = plugin_loading.find_with(config.server.plugin, config.file)
        found.log()
        plugins = found.plugins
        plugin_loading.check(plugins, config)
    with times.part("check of OpenTelemetry's variables"):
        from oaiserve.telemetry import check_tracing

        check_tracing()
    logger.info("Loading %s ...", banners.short_name(config))
    if config.model == "demo":
        if not demo.is_fetched():
            from oaiserve.engine.start.plan import compile_early

            compile_early(config.engine, "bfloat16")  # the type in the demo's files
        demo.fetched()  # while Ctrl-C still removes a partial download
    # Until the server handles signals, Ctrl-C ends the process at once. An exception could be raised in a callback that
    # ignores it, and Python would end while threads run native code.
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, _leave if os.getpid() == 1 else signal.SIG_DFL)
    with times.part("import of the engine"):
        from oaiserve.engine.engine import Engine
        from oaiserve.system_memory import give_back, keep_freed

    def import_server() -> None:
        with times.part("import of the server"):
            import oaiserve.app  # noqa: F401

            plugin_loading.import_routes(plugins)

    with times.part("model"):
        plugin_loading.add_models(plugins)
        try:
            engine = Engine.from_pretrained(
                config.model,
                config.engine,
                times=times,
                meanwhile=import_server,
                rules=partial(plugin_loading.rules_of, plugins),
                ways=partial(plugin_loading.ways_of, plugins),
            )
        except DeviceLost as error:
            logger.warning("%s The server starts again without kernels of its own", error)
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    with times.part("server"):
        from oaiserve.app import create_app, server_telemetry

        connections = allowed_connections(config.server)
        telemetry = server_telemetry(config, engine, connections, log_limit, plugins)
        is_child = sock.family == socket.AF_UNIX
        app = create_app(config, engine, telemetry, plugins=plugins, is_child=is_child)
    interpreter.end_load()
    give_back()  # memory that the start has freed
    keep_freed()
    logger.debug("Start, in ms since the process began: %s", times)
    task: Task = "generate" if engine.pooling is None else engine.pooling.task
    if task == "generate":
        for problem in sampling_defaults(config, engine.default_params).ignored:
            logger.warning("A default in the model's files is not used. %s", problem)
    facts = banners.engine_facts(config, engine)
    on_ready: Banner | Callable[[], None] = banners.of_server(
        config, sock.getsockname()[1], task, facts, has_pages=bool(app.state.pages.links)
    )
    if ready is not None:
        logger.info("%s", "; ".join(facts.values()))
        on_ready = ready
    with nullcontext() if ready is not None else announced(url, config.model_name):
        run_until_signal(
            app, config.server, sock, connections, on_ready, on_drain=engine.drain, failure=lambda: engine.failure
        )
    if engine.failure is None:
        return 0
    return 1


def files_with_keys(config: Config) -> list[Path]:
    files = list(config.server.api_key_file)
    if config.file is not None and {"api-key", "api_key"} & settings_in(config.file).keys():
        files.append(config.file)
    return files


def _warn_of_keys(config: Config) -> None:
    for path in files_with_keys(config):
        if (warning := exposure(path)) is not None:
            logger.warning("%s", warning)


def serve_models(config: Config, configs: Mapping[str, Config], plugins: Sequence[Plugin], sock: socket.socket) -> int:
    from oaiserve.plugins.gateway.app import create_gateway_of_models
    from oaiserve.telemetry import logs

    server = config.server
    port = sock.getsockname()[1]
    url = banners.address(server, port)
    logs.configure(
        server.log_level,
        server.log_format,
        address_of=lambda request_id: _page_of_request(app.state.pages, url, request_id),
    )
    # A model's process logs the address of this one.
    configs = {name: replace(config, server=replace(config.server, port=port)) for name, config in configs.items()}
    _warn_of_keys(config)
    plugin_loading.check(plugins, config)
    if any(config.model == "demo" for config in configs.values()):
        demo.fetched()
    app, gateway, models = create_gateway_of_models(config, configs, plugins)
    has_pages = bool(app.state.pages.links)
    on_demand = config.of(ModelsOptions).load_on_demand
    banner = banners.of_models(server, [*configs], url, on_demand=on_demand, has_pages=has_pages)
    with announced(url, ", ".join(configs)):
        connections = allowed_connections(server, files_each=2)
        gateway.metrics.show(connections)
        run_until_signal(app, server, sock, connections, banner, on_drain=gateway.drain, failure=lambda: models.failure)
    if models.failure is None:
        return 0
    return 1


def serve_gateway(options: RouteOptions, sock: socket.socket) -> int:
    from oaiserve.plugins.gateway.app import create_gateway
    from oaiserve.telemetry import logs

    logs.configure(options.log_level, options.log_format)
    server = options.server
    app, gateway = create_gateway(options)
    url = banners.address(server, sock.getsockname()[1])
    banner = banners.of_gateway(options, url, has_pages=bool(app.state.pages.links))
    with announced(url, f"those of {len(options.replica)} servers"):
        connections = allowed_connections(server, files_each=2)
        gateway.metrics.show(connections)
        run_until_signal(app, server, sock, connections, banner, on_drain=gateway.drain)
    return 0


def run_until_signal(
    app: Callable[..., Awaitable[None]],
    options: ServerOptions,
    sock: socket.socket,
    connections: Connections,
    banner: Banner | Callable[[], None],
    *,
    on_drain: Callable[[], None] = lambda: None,
    failure: Callable[[], BaseException | None] = lambda: None,
) -> None:
    """Serve `app` until SIGTERM, SIGINT, SIGHUP or a failure, as `Server` does. Raises SystemExit if it cannot."""
    from oaiserve.http.server import Server

    trusts_peers = sock.family == socket.AF_UNIX  # in a private folder, where only the gateway can connect
    server = Server(app, options, connections, on_drain=on_drain, failure=failure, trusts_peers=trusts_peers)
    # uvicorn restores these handlers when it has stopped. A further signal must then not kill the process, because the
    # exit code would no longer be 0.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # `nohup` relies on this.
            signal.signal(number, server.handle_exit)
    listen(options, sock, banner)
    server.run(sockets=[sock])


def listen(options: ServerOptions, sock: socket.socket, banner: Banner | Callable[[], None]) -> None:
    """Listen, and print the banner, log it as JSON, or call the function instead. Raises StartupError if another
    process listens on the port."""
    from oaiserve.telemetry.logs import resolved

    if options.open_dashboard and not options.is_private:
        logger.warning(
            "--open-dashboard lets everyone who can reach %s see all requests, but not their text", options.host
        )
    if options.tls_certificate is not None and options.tls_key is not None:
        reason = refused_certificate(options.tls_certificate, options.tls_key)
        if reason is not None:
            logger.warning("Clients will refuse --tls-certificate '%s': %s.", options.tls_certificate, reason)
    try:
        sock.listen(BACKLOG)
    except OSError as error:  # The other process has bound the port, too.
        raise _cannot_listen(options.host, options.port, error) from error
    if not isinstance(banner, Banner):
        banner()
    elif resolved(options.log_format) == "json":
        logger.info("%s", banner.title, extra={"start": dict(banner.facts)})
    else:
        print(banner.text(Screen.of(sys.stderr)), file=sys.stderr, flush=True)


def _page_of_request(pages: Pages, url: str, request_id: str) -> str | None:
    """Return the address of the page of a request, or None if the server has no such page."""
    return f"{url}/{pages.request}{request_id}" if pages.request else None
