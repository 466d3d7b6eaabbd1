"""`oaiserve serve MODEL`: settings in, one server started. Anything the user got wrong is one sentence and exit code 2.

Imports nothing heavy before the settings, the port and the certificate have proved good.
"""

from __future__ import annotations

import difflib
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from cyclopts import App, CoercionError, CycloptsError, Group, MissingArgumentError, Parameter, UnusedCliTokensError
from cyclopts.argument import ArgumentCollection
from cyclopts.config import Env, Json, Toml, Yaml

from oaiserve import __version__
from oaiserve.config import Config, EngineOptions, OptionError, ServerOptions, TelemetryOptions
from oaiserve.errors import StartupError
from oaiserve.source import find_model

# Serves until told to stop, on a socket that is bound and does not listen yet; returns the exit code.
ServeApp = Callable[[Config, socket.socket], int]

ConfigSource = Callable[[App, tuple[str, ...], ArgumentCollection], None]

ENV_PREFIX = "OAISERVE_"
ENV_OF_OTHERS = {"OAISERVE_CACHE"}  # read by demo, where no settings are known
FILE_FORMATS: dict[str, Callable[..., ConfigSource]] = {".toml": Toml, ".yaml": Yaml, ".yml": Yaml, ".json": Json}


def main(argv: Sequence[str] | None = None, serve_app: ServeApp | None = None) -> int:
    """Runs one command and returns the exit code: 2 where the user can put it right, 1 where the server broke."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["bench"]:  # a command line of its own, without the settings and the environment of a server
        from loadtest.cli import main as bench

        return bench(argv[1:], "oaiserve bench")
    try:
        command, bound, _ = _command_line(serve_app or _serve_app).parse_args(
            argv, print_error=False, exit_on_error=False, verbose=False
        )
        return command(*bound.args, **bound.kwargs) or 0
    except CycloptsError as error:
        return _refuse(_in_words(error))
    except (OptionError, StartupError) as error:
        return _refuse(str(error))
    except KeyboardInterrupt:  # while the model loads; later Ctrl-C ends the server in an orderly way
        return 130


def _refuse(reason: str) -> int:
    print(f"oaiserve: {' '.join(reason.split())}", file=sys.stderr)
    return 2


def _in_words(error: CycloptsError) -> str:
    """cyclopts' own message, where it says what to do."""
    if isinstance(error, MissingArgumentError) and error.argument is not None and error.argument.name == "MODEL":
        return "MODEL is missing. Give a folder, a .gguf file, a hub id, or demo, as in: oaiserve serve demo"
    if isinstance(error, UnusedCliTokensError):
        return f"'{' '.join(error.unused_tokens or ())}' is too much. 'oaiserve serve' takes one MODEL and flags."
    if isinstance(error, CoercionError) and isinstance(error.__context__, OptionError):
        name = error.token.keyword if error.token is not None else None
        return f"{name or 'A setting'} is wrong: {error.__context__}"
    return str(error)


def _command_line(serve_app: ServeApp) -> App:
    app = App(
        name="oaiserve",
        help="An OpenAI-compatible server for language models that accounts for every millisecond of every request.",
        version=__version__,
        help_epilogue="To try it: oaiserve serve demo. To measure it: oaiserve bench --help",
        # In order of precedence; flags come before, defaults after.
        config=[_refuse_unknown_variables, Env(ENV_PREFIX, command=False, show=False), _read_config_file],
        default_parameter=Parameter(negative_iterable=()),
    )

    @app.command
    def serve(
        model: str,
        /,
        *,
        config: Path | None = None,
        server: Annotated[ServerOptions, _flags("Server", 1)] = ServerOptions(),  # noqa: B008 - frozen
        engine: Annotated[EngineOptions, _flags("Engine", 2)] = EngineOptions(),  # noqa: B008
        telemetry: Annotated[TelemetryOptions, _flags("Telemetry", 3)] = TelemetryOptions(),  # noqa: B008
    ) -> int:
        """Serve MODEL until Ctrl-C or SIGTERM.

        Each flag is also an environment variable (--max-running: OAISERVE_MAX_RUNNING) and a key in the config file
        (max-running = 64). A flag beats the environment, which beats the file, which beats the default. Traces are
        set by OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_ENDPOINT, ...).

        Parameters
        ----------
        model
            demo (a small model, fetched on first use), a folder in the Hugging Face format, a hub id such as
            Qwen/Qwen3-0.6B, or a .gguf file.
        config
            Read settings from this file (.toml, .yaml or .json).
        """
        settings = Config(model, server, engine, telemetry)
        if model != "demo":
            find_model(model)  # refuses what is no model before torch is imported to find that out
        _check_files(server, engine, telemetry)
        with _bind(server.host, server.port) as sock:
            return serve_app(settings, sock)

    return app


def _flags(title: str, position: int) -> Parameter:
    def shown(default: object) -> str | None:
        return None if default in ((), None) else str(default)

    # name="*" makes the fields of the class flags of their own, without the class's name before them.
    return Parameter(name="*", group=Group(title, sort_key=position), show_default=shown)


def _refuse_unknown_variables(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """A misspelt variable would otherwise be a setting that silently does nothing."""
    known = {ENV_PREFIX + name.lstrip("-").upper().replace("-", "_") for arg in arguments for name in arg.names}
    for variable in sorted(os.environ):
        if variable.startswith(ENV_PREFIX) and variable not in known | ENV_OF_OTHERS:
            close = difflib.get_close_matches(variable, known, n=1)
            hint = f" Did you mean {close[0]}?" if close else " 'oaiserve serve --help' lists the settings."
            raise OptionError(f"The environment variable {variable} is no setting of oaiserve.{hint}")


def _read_config_file(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Fills in what neither flags nor environment have set. An unknown key is an error that names it."""
    argument = arguments.get("--config")
    if argument is None or not argument.tokens:
        return
    path = Path(argument.tokens[-1].value)
    if path.suffix not in FILE_FORMATS:
        raise OptionError(f"--config is '{path}', but must end in {', '.join(FILE_FORMATS)}.")
    try:
        FILE_FORMATS[path.suffix](path, must_exist=True, use_commands_as_keys=False)(app, commands, arguments)
    except OSError as error:
        raise OptionError(f"--config is '{path}', which cannot be read: {error.strerror}.") from error
    except CycloptsError as error:
        if type(error) is CycloptsError:  # what the parser of the format raised; it does not know the file's name
            raise OptionError(f"--config is '{path}', which cannot be read: {error}.") from error
        raise


def _check_files(server: ServerOptions, engine: EngineOptions, telemetry: TelemetryOptions) -> None:
    for flag, path in (
        ("--tls-certificate", server.tls_certificate),
        ("--tls-key", server.tls_key),
        ("--chat-template", engine.chat_template),
    ):
        try:
            if path is not None:
                path.open("rb").close()
        except OSError as error:
            raise StartupError(f"{flag} is '{path}', which cannot be read: {error.strerror}.") from error
    profile_dir = telemetry.profile_dir
    if profile_dir is not None:
        with suppress(OSError):
            profile_dir.mkdir(parents=True, exist_ok=True)
        if not (profile_dir.is_dir() and os.access(profile_dir, os.W_OK | os.X_OK)):
            raise StartupError(f"--profile-dir is '{profile_dir}', which is no folder that can be written to.")
    if server.tls_certificate is None:
        return
    try:
        # The empty passphrase keeps OpenSSL from asking for one at the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(server.tls_certificate, server.tls_key, password="")
    except ssl.SSLError as error:
        raise StartupError(
            f"--tls-certificate '{server.tls_certificate}' and --tls-key '{server.tls_key}' are no PEM certificate "
            f"and its key without a passphrase ({error.reason or error})."
        ) from error


def _bind(host: str, port: int) -> socket.socket:
    """Takes the port, so that a busy one is known before the model loads. Nobody can connect before it listens."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:  # Unicode: a name that no name server could be asked for
        reason = error.strerror if isinstance(error, OSError) else "not a valid name"
        raise StartupError(f"--host is '{host}', which is no address of this machine: {reason}.") from error
    try:
        # A port that a server has just left can be taken again at once.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _cannot_listen(host, port, error) from error
    return sock


def _cannot_listen(host: str, port: int, error: OSError) -> StartupError:
    return StartupError(
        f"Cannot listen on {host} port {port}: {os.strerror(error.errno or 0)}. "
        "Choose another with --port, or 0 for any free one."
    )


def _serve_app(config: Config, sock: socket.socket) -> int:
    from oaiserve.telemetry import logs

    logs.configure(config.server.log_level, config.server.log_format)
    logging.getLogger(__name__).info("Loading %s ...", config.model)

    from oaiserve.app import create_app
    from oaiserve.engine.engine import Engine

    engine = Engine.from_pretrained(config.model, config.engine)
    app = create_app(config, engine)
    run_until_signal(app, config, sock, on_drain=engine.drain, failure=lambda: engine.failure)
    return 0 if engine.failure is None else 1


def run_until_signal(
    app: Callable[..., Awaitable[None]],
    config: Config,
    sock: socket.socket,
    *,
    on_drain: Callable[[], None] = lambda: None,
    failure: Callable[[], BaseException | None] = lambda: None,
) -> None:
    """Serves `app` until SIGTERM, SIGINT or a failure; see Server. SystemExit where it cannot start."""
    from oaiserve.server import Server

    server = Server(app, config.server, on_drain=on_drain, failure=failure)
    # uvicorn puts back what it found here when it has stopped: one more signal then must not turn a clean end into a
    # death by signal.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.handle_exit)
    try:
        sock.listen(server.config.backlog)
    except OSError as error:  # another process had bound the port too and was faster
        raise _cannot_listen(config.server.host, config.server.port, error) from error
    if config.server.log_format == "console":
        print(_banner(config, sock.getsockname()[1]), file=sys.stderr, flush=True)
    server.run(sockets=[sock])


def _banner(config: Config, port: int) -> str:
    """What is served where, and a command to try it."""
    server = config.server
    scheme = "http" if server.tls_certificate is None else "https"
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(server.host, server.host)
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    url = f"{scheme}://{host}:{port}"
    name = server.served_model_name or config.model
    key = " -H 'authorization: Bearer '$OPENAI_API_KEY" if server.api_key else ""
    return f"""
oaiserve {__version__} serves {name} at {url}/v1

  curl {url}/v1/chat/completions{key} -H 'content-type: application/json' \\
    -d '{{"model": "{name}", "temperature": 0, "messages": [{{"role": "user", "content": "Hello!"}}]}}'

Ctrl-C stops it.
"""
