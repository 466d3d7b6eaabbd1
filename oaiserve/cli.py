"""The command line: `oaiserve serve MODEL` reads the settings and starts one server, `oaiserve route` a gateway.

A mistake of the user is reported in one sentence, with exit code 2. Heavy modules such as torch are imported only after
the settings, the port and the certificate have been checked.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import runpy
import signal
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import Annotated

from cyclopts import (
    App,
    CoercionError,
    CycloptsError,
    Group,
    Parameter,
    UnknownOptionError,
    UnusedCliTokensError,
)
from cyclopts.argument import ArgumentCollection
from cyclopts.config import Env

from oaiserve import __version__
from oaiserve.commands import banner as banners
from oaiserve.commands.banner import Banner
from oaiserve.commands.help import HelpFormatter
from oaiserve.commands.servers import announced
from oaiserve.config import (
    HAS_FLAG,
    WITHOUT_FLAG,
    Config,
    EngineOptions,
    ModelsOptions,
    OptionError,
    RouteOptions,
    ServerOptions,
    TelemetryOptions,
    flag_of,
)
from oaiserve.engine.pooling import Task
from oaiserve.errors import DeviceLost, StartupError
from oaiserve.explain import commands
from oaiserve.explain.commands import FILE_FORMATS, message_of, settings_in, suggestion
from oaiserve.facts.start_times import StartTimes
from oaiserve.files import demo
from oaiserve.files.adapters import BadAdapter, read_adapter
from oaiserve.files.source import find_model
from oaiserve.foreign_flags import OUR_FLAGS
from oaiserve.http.connections import Connections, allowed_connections
from oaiserve.http.key_table import KeyTable
from oaiserve.http.keys import Keyring, exposure
from oaiserve.routes.responses import store
from oaiserve.routes.sampling_defaults import SamplingDefaults, given_defaults
from oaiserve.scale.children.settings import holds_models, models_of
from oaiserve.screen import Screen

# Serves on a bound socket that does not listen yet, until it is stopped, and returns the exit code.
ServeApp = Callable[[Config, socket.socket], int]

logger = logging.getLogger(__name__)

# How long a thread that computes in Python may keep the others from it. The engine thread needs Python several times in
# each step of some milliseconds, so with Python's own 5 ms, one large request could double the time of each step.
SWITCH_SECONDS = 0.0005
BACKLOG = 2048  # connections that the system keeps until they are accepted
ENV_PREFIX = "OAISERVE_"
VARIABLES_WITHOUT_FLAG = {"OAISERVE_CACHE"}  # read by `oaiserve.files.private`
# Commands with a command line of their own, without the settings of a server, and their help.
OTHER_COMMANDS = {
    "bench": "Measure a server under load.",
    "diff": "Compare two recordings of requests, and say what took more or less time.",
}
# Each is a file of this name in `oaiserve.commands`.
SMALL_COMMANDS = {
    "batch": "Answer all requests of a file, at low priority.",
    "chat": "Chat with a model in the terminal.",
    "keys": "Create, list, limit and revoke API keys.",
    "doctor": "Check whether this machine can serve models, and how well.",
    "launch": "Start a coding tool, such as codex or claude, with your server.",
    "list": "List the models on this disk.",
    "ps": "List your running servers on this machine.",
    "pull": "Download a model without serving it.",
    "rm": "Remove a model from this disk.",
}
MODEL_PROCESS = "model-process"  # A hidden command: a server with several models starts one process of it per model.


def main(argv: Sequence[str] | None = None, serve_app: ServeApp | None = None) -> int:
    """Run one command and return the exit code: 2 if the user can correct the error, 1 if the server failed."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["bench"]:
        return _bench(argv[1:])
    if argv[:1] == ["diff"]:
        from oaiserve.explain.diff.command import main as diff

        return diff(argv[1:])
    if argv and argv[0] in SMALL_COMMANDS:
        return commands.run(small_command(argv[0]), argv[1:])
    if argv[:1] == [MODEL_PROCESS] and len(argv) > 1:
        from oaiserve.scale.children.process import run

        return run(argv[1:], _serve_app)
    if argv[:1] == ["--install-completion"]:
        return commands.run(_completed(), argv)
    app = command_line(serve_app or _serve_app, all_flags="--help-all" in argv)
    return commands.run(app, _with_each_name(_with_flag_for_vllm(argv)), _message_for)


def _with_flag_for_vllm(argv: Sequence[str]) -> list[str]:
    """Return a command line in which vLLM's `--generation-config auto` and `vllm` are flags of ours."""
    flag = flag_of("generation_config")
    meanings = {"auto": flag, "vllm": flag_of("no_generation_config")}
    result: list[str] = []
    for word in argv:
        name, _, value = word.partition("=")
        if word in meanings and result[-1:] == [flag]:
            result[-1] = meanings[word]
        else:
            result.append(meanings.get(value, word) if name == flag else word)
    return result


def _with_each_name(argv: Sequence[str]) -> list[str]:
    """Return a command line with `--served-model-name a b` as `--served-model-name a --served-model-name b`.

    vLLM accepts several names, too. Before MODEL, the flag takes one name, because the next word is MODEL.
    """
    flag = flag_of("served_model_name")
    has_model = (
        argv[:1] == ["serve"] and len(argv) > 1 and (not argv[1].startswith("-") or f"{ENV_PREFIX}MODEL" in os.environ)
    )
    result: list[str] = []
    is_name = False
    for word in argv:
        is_further = is_name and not word.startswith("-") and result[-2:-1] == [flag]
        result += [flag, word] if is_further else [word]
        is_name = has_model and (word == flag or (is_name and not word.startswith("-")))
    return result


def small_command(name: str) -> App:
    """Return the command line of one of the small commands."""
    app = App(name=f"oaiserve {name}", version_flags=[], default_parameter=Parameter(negative=()))
    module = import_module(f"oaiserve.commands.{name}")
    for each in getattr(module, "COMMANDS", ()):
        app.command(each)
    if hasattr(module, "command"):
        app.default(module.command)
        app["--help"].show = False  # Readers of the help have already found it.
    return app


def _completed() -> App:
    """Return the command line that shells complete, including the flags of the small commands."""
    app = command_line(_serve_app)
    app.config = ()  # --install-completion has no settings
    for name in SMALL_COMMANDS:
        del app[name]
        app.command(small_command(name), name=name)
    return app


def _bench(argv: list[str]) -> int:
    """Run the load test and return its exit code. It is a client that the product does not import, so it runs as a
    module."""
    before = sys.argv
    sys.argv = ["oaiserve bench", *argv]
    try:
        runpy.run_module("loadtest", run_name="__main__")
    except SystemExit as done:
        return int(done.code or 0)
    finally:
        sys.argv = before
    return 0


def _message_for(error: CycloptsError, name: str) -> str:
    """Return a message for the user."""
    if isinstance(error, UnusedCliTokensError) and error.command_chain and error.command_chain[0] == "route":
        unexpected = " ".join(error.unused_tokens or ())
        return f"Unexpected argument '{unexpected}'. 'oaiserve route' takes flags only, as in --replica {unexpected}."
    if isinstance(error, UnknownOptionError):
        option = (error.token.keyword or error.token.value).partition("=")[0]
        if option in OUR_FLAGS:
            return f"Unknown option {option}. Here it is {OUR_FLAGS[option]}."
    if isinstance(error, CoercionError) and isinstance(error.__context__, OptionError):
        flag = error.token.keyword if error.token is not None else None
        return f"{flag or 'A setting'} is wrong: {error.__context__}"
    return message_of(error, name)


def command_line(serve_app: ServeApp, *, all_flags: bool = False) -> App:
    """Return the command line. Without `all_flags`, the help of `serve` shows only the flags that most people use."""
    app = App(
        name="oaiserve",
        help="An OpenAI-compatible server for language models that accounts for every millisecond of every request.",
        version=__version__,
        help_flags=("--help", "-h", "--help-all"),
        help_formatter=HelpFormatter(),
        help_epilogue="To try it: oaiserve serve demo",
        # In order of precedence. Flags override all of these, and these override the defaults.
        config=[_check_variables, Env(ENV_PREFIX, command=False, show=False), _read_config_file],
        default_parameter=Parameter(negative_iterable=(), parse=HAS_FLAG),
    )
    app.register_install_completion_command(
        help="Let your shell complete commands and flags (--shell bash, zsh, fish)."
    )
    for name, text in (OTHER_COMMANDS | SMALL_COMMANDS).items():  # `main` runs these
        app.command(App(name=name, help=text))

    @app.command
    def serve(
        *model: str,
        config: Path | None = None,
        server: Annotated[ServerOptions, _flags("Server", 1)] = ServerOptions(),  # noqa: B008 - frozen
        engine: Annotated[EngineOptions, _flags("Engine", 2)] = EngineOptions(),  # noqa: B008
        telemetry: Annotated[TelemetryOptions, _flags("Telemetry", 3)] = TelemetryOptions(),  # noqa: B008
        models: Annotated[ModelsOptions, _flags("Several models", 4)] = ModelsOptions(),  # noqa: B008
    ) -> int:
        """Serve one model, or several.

        Each flag is also an environment variable (--max-running: OAISERVE_MAX_RUNNING) and a key in the config file
        (max-running = 64). A flag beats the environment, which beats the file, which beats the default. Traces are
        set by OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_ENDPOINT, ...).

        Parameters
        ----------
        model
            demo (a small model, fetched on first use), a folder in the Hugging Face format, a .gguf file, or a hub id
            such as Qwen/Qwen3-0.6B. The format selects one of its GGUF files, as in unsloth/Qwen3-0.6B-GGUF:Q4_K_M.
            With several models, write NAME=MODEL, or a folder that contains them.
        config
            Read settings from this file (.toml, .yaml or .json). A table [models.NAME] adds a model with its settings.
        """
        tables = {} if config is None else settings_in(config).get("models", {})
        if not model and not tables:
            raise OptionError(
                "MODEL is missing. Give a folder, a .gguf file, a hub id, or demo, as in: oaiserve serve demo"
            )
        first = model[0] if model else ""
        if len(model) > 1 or tables or models.are_set or holds_models(first):
            configs = models_of(model, tables, Config("models", server, engine, telemetry, file=config))
            _check_tls(server.tls_certificate, server.tls_key)
            for each in configs.values():
                _check_files(each.server, each.engine, each.telemetry)
            with _bind(server.host, server.port) as sock:
                return _serve_models(server, configs, models, sock)
        settings = Config(first, server, engine, telemetry, file=config)
        # Checks come before the import of torch, which takes seconds.
        if first != "demo":
            find_model(first)
        _check_files(server, engine, telemetry)
        with _bind(server.host, server.port) as sock:
            return serve_app(settings, sock)

    @app.command
    def route(
        *,
        config: Path | None = None,
        options: Annotated[RouteOptions, _flags("Route", 1)] = RouteOptions(),  # noqa: B008
    ) -> int:
        """Run a gateway, which sends each request to the server that has most of its prompt cached.

        Each flag is also an environment variable (--replica-key: OAISERVE_REPLICA_KEY) and a key in the config file.

        Parameters
        ----------
        config
            Read settings from this file (.toml, .yaml or .json).
        """
        if not options.replica:
            raise OptionError("--replica is missing. Give one for each server, as in --replica http://10.0.0.5:8000.")
        _check_tls(options.tls_certificate, options.tls_key)
        with _bind(options.host, options.port) as sock:
            return _route(options, sock)

    if not all_flags:
        _shorten_help(app["serve"])
    return app


def _shorten_help(serve: App) -> None:
    kinds = (ServerOptions, EngineOptions, TelemetryOptions, ModelsOptions)
    flags = [each for kind in kinds for each in fields(kind) if each.name not in WITHOUT_FLAG]
    frequent = {"--config", *(flag_of(each.name) for each in flags if each.metadata.get("frequent"))}
    serve.help_formatter = HelpFormatter(frequent)
    serve.help_epilogue = f"oaiserve serve --help-all has all {len(flags) + 1} flags, and more about these."


def _flags(title: str, position: int) -> Parameter:
    def shown(default: object) -> str | None:
        if default in ((), None):
            return None
        return str(default)

    # name="*" makes each field of the class a flag without the class's name as a prefix.
    return Parameter(name="*", group=Group(title, sort_key=position), show_default=shown)


def _check_variables(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Raise OptionError for an unknown or empty OAISERVE_ variable, which would otherwise be ignored silently."""
    flags = [name for argument in arguments if argument.parse for name in argument.names]
    known = {ENV_PREFIX + flag.lstrip("-").upper().replace("-", "_") for flag in flags}
    for variable in sorted(os.environ):
        if variable.startswith(ENV_PREFIX) and variable not in known | VARIABLES_WITHOUT_FLAG:
            hint = suggestion(variable, known) or "'oaiserve serve --help' lists the settings."
            raise OptionError(f"The environment variable {variable} is not a setting of oaiserve. {hint}")
        if variable in known and not os.environ[variable].strip():  # An empty key would mean a server without a key.
            raise OptionError(f"The environment variable {variable} is set, but empty. Give it a value, or unset it.")


def _read_config_file(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Take settings without a flag or a variable from the config file. Raises for unknown keys."""
    argument = arguments.get("--config")
    if argument is None or not argument.tokens:
        return
    path = Path(argument.tokens[-1].value)
    for key, value in settings_in(path).items():
        if value == []:  # It would be ignored.
            raise OptionError(f"'{key}' in '{path}' is an empty list. Give it a value, or leave it out.")
    source = FILE_FORMATS[path.suffix](path, use_commands_as_keys=False)
    if tuple(commands) == ("serve",):
        source.config.pop("models", None)  # `serve` reads these itself
    for key, value in source.config.items():
        if key.replace("_", "-") == "default-params" and isinstance(value, dict):
            source.config[key] = json.dumps(value)
    source(app, commands, arguments)


def _check_files(server: ServerOptions, engine: EngineOptions, telemetry: TelemetryOptions) -> None:
    given_defaults(server.default_params)
    _check_tls(server.tls_certificate, server.tls_key)
    _check_readable("--chat-template", engine.chat_template)
    for name, folder in engine.adapters.items():
        try:
            read_adapter(folder)
        except BadAdapter as error:
            raise StartupError(f"--lora {name}={folder} cannot be used: {error}.") from error
    if engine.lora_dir is not None and not engine.lora_dir.is_dir():
        raise StartupError(f"--lora-dir is '{engine.lora_dir}', which is not a folder.")
    if server.response_store is not None:
        store.check(server.response_store)
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


def _check_tls(certificate: Path | None, key: Path | None) -> None:
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


def _bind(host: str, port: int) -> socket.socket:
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


def _serve_app(config: Config, sock: socket.socket, ready: Callable[[], None] | None = None) -> int:
    """Serve one model until a signal, and return the exit code.

    In the process of one of several models, `ready` replaces the banner.
    """
    times = StartTimes()
    times.since_begin("command line")
    # Each collection would examine everything that has been imported, and all of that stays.
    gc.disable()
    # Otherwise torch looks for plugins for other devices in all installed packages.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    with times.part("import of the log"):
        from oaiserve.telemetry import logs

    url = banners.address(config.server, sock.getsockname()[1] if ready is None else config.server.port)
    log_limit = logs.configure(
        config.server.log_level,
        config.server.log_format,
        model=None if ready is None else config.model_name,
        address_of=_request_address(config.server, url),
    )
    if ready is None:
        _warn_of_keys(config)
    logger.info("Loading %s ...", banners.short_name(config))
    if config.model == "demo":
        if not demo.is_fetched():
            from oaiserve.engine.start.plan import compile_early

            compile_early(config.engine, "bfloat16")  # the type in the demo's files
        demo.fetched()  # while Ctrl-C still removes a partial download
    # Until the server handles signals, Ctrl-C ends the process at once. An exception could be raised in a callback that
    # ignores it, and Python would end while threads run native code.
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.setswitchinterval(SWITCH_SECONDS)
    with times.part("import of the engine"):
        from oaiserve.engine.engine import Engine
        from oaiserve.engine.system_memory import give_back, keep_freed

    def import_server() -> None:
        with times.part("import of the server"):
            import oaiserve.app  # noqa: F401

    with times.part("model"):
        try:
            engine = Engine.from_pretrained(config.model, config.engine, times=times, meanwhile=import_server)
        except DeviceLost as error:
            logger.warning("%s The server starts again without kernels of its own", error)
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    with times.part("server"):
        from oaiserve.app import create_app, response_store, server_telemetry

        connections = allowed_connections(config.server)
        responses = response_store(config.server)
        telemetry = server_telemetry(config, engine, connections, responses, log_limit)
        app = create_app(config, engine, telemetry, responses, is_child=sock.family == socket.AF_UNIX)
    # Python's garbage collector shall not look again at all that stays: torch and transformers alone are a million
    # objects, and a full collection would stop all threads for a sixth of a second. Imports leave hardly any garbage,
    # but the load of a model by transformers does.
    if "transformers" in sys.modules:
        gc.collect()
    gc.freeze()
    gc.enable()
    give_back()  # memory that the start has freed
    keep_freed()
    logger.debug("Start, in ms since the process began: %s", times)
    task: Task = "generate" if engine.pooling is None else engine.pooling.task
    if task == "generate":
        for problem in SamplingDefaults.of(config, engine.default_params).ignored:
            logger.warning("A default in the model's files is not used. %s", problem)
    facts = banners.engine_facts(config, engine)
    on_ready: Banner | Callable[[], None] = banners.of_server(config, sock.getsockname()[1], task, facts)
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


def _files_with_keys(config: Config) -> list[Path]:
    files = list(config.server.api_key_file)
    if config.file is not None and {"api-key", "api_key"} & settings_in(config.file).keys():
        files.append(config.file)
    return files


def _warn_of_keys(config: Config) -> None:
    for path in _files_with_keys(config):
        if (warning := exposure(path)) is not None:
            logger.warning("%s", warning)
    file = config.server.response_store
    if config.server.stored_keys and file is not None and not KeyTable(file).valid():
        logger.warning(
            "There are no stored keys yet. To create one: oaiserve keys add NAME --response-store '%s'", file
        )


def _serve_models(
    server: ServerOptions, configs: Mapping[str, Config], options: ModelsOptions, sock: socket.socket
) -> int:
    """Serve several models until a signal, and return the exit code."""
    from oaiserve.scale.gateway.app import create_gateway_of_models
    from oaiserve.telemetry import logs

    port = sock.getsockname()[1]
    url = banners.address(server, port)
    logs.configure(server.log_level, server.log_format, address_of=_request_address(server, url))
    # A model's process logs the address of this one.
    configs = {name: replace(config, server=replace(config.server, port=port)) for name, config in configs.items()}
    _warn_of_keys(next(iter(configs.values())))  # All configs have the same files.
    if any(config.model == "demo" for config in configs.values()):
        demo.fetched()
    app, gateway, models = create_gateway_of_models(server, configs, options)
    banner = banners.of_models(server, [*configs], url, on_demand=options.load_on_demand)
    with announced(url, ", ".join(configs)):
        run_until_signal(
            app,
            server,
            sock,
            allowed_connections(server, files_each=2),
            banner,
            on_drain=gateway.drain,
            failure=lambda: models.failure,
        )
    if models.failure is None:
        return 0
    return 1


def _route(options: RouteOptions, sock: socket.socket) -> int:
    """Serve the gateway until a signal, and return the exit code."""
    from oaiserve.scale.gateway.app import create_gateway
    from oaiserve.telemetry import logs

    logs.configure(options.log_level, options.log_format)
    server = options.server
    app, gateway = create_gateway(options)
    url = banners.address(server, sock.getsockname()[1])
    banner = banners.of_gateway(options, url)
    with announced(url, f"those of {len(options.replica)} servers"):
        connections = allowed_connections(server, files_each=2)
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
    _listen(options, sock, banner)
    server.run(sockets=[sock])


def _listen(options: ServerOptions, sock: socket.socket, banner: Banner | Callable[[], None]) -> None:
    """Listen, and print the banner, log it as JSON, or call the function instead. Raises StartupError if another
    process listens on the port."""
    from oaiserve.telemetry.logs import resolved

    if options.open_dashboard and not options.is_private:
        logger.warning(
            "--open-dashboard lets everyone who can reach %s see all requests, but not their text", options.host
        )
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


def _request_address(server: ServerOptions, url: str) -> Callable[[str], str] | None:
    """Return a function from a request's id to the address of its page, if that is open."""
    if server.shows_dashboard:
        return lambda request_id: f"{url}/requests/{request_id}"
    return None
