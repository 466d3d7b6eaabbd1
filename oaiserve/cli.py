"""The command line: `oaiserve serve MODEL` reads the settings and starts a server.

A mistake of the user is reported in one sentence, with exit code 2. `run.py` starts the server.
"""

from __future__ import annotations

import json
import logging
import os
import runpy
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from importlib import import_module
from io import TextIOWrapper
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from cyclopts import (
    App,
    CoercionError,
    CycloptsError,
    Parameter,
    UnknownCommandError,
    UnknownOptionError,
)
from cyclopts.argument import ArgumentCollection
from cyclopts.config import Env

from oaiserve import __version__
from oaiserve.checkpoints.source import find_model
from oaiserve.commands.file_checks import check_files
from oaiserve.commands.foreign_flags import OUR_COMMANDS, OUR_FLAGS, SHORT
from oaiserve.commands.help import HelpFormatter
from oaiserve.commands.listening import bind, obey_signals_as_first_process
from oaiserve.commands.settings import add_options, changed, flags_of
from oaiserve.config import (
    HAS_FLAG,
    WITHOUT_FLAG,
    Config,
    EngineOptions,
    OptionError,
    ServerOptions,
    TelemetryOptions,
    flag_of,
)
from oaiserve.errors import StartupError
from oaiserve.explain import commands
from oaiserve.explain.commands import FILE_FORMATS, message_of, settings_in, suggestion, unknown_option
from oaiserve.plugin import Command, Plugin
from oaiserve.plugin_loading import OPTIONS, VARIABLE, Found, commands_of, find, options_of, server_for, tables_in
from oaiserve.run import serve_model

log = logging.getLogger(__name__)

# Serves on a bound socket that isn't listening yet until the server is stopped, and returns the exit code.
ServeApp = Callable[[Config, socket.socket], int]

ENV_PREFIX = "OAISERVE_"
VARIABLES_WITHOUT_FLAG = {"OAISERVE_CACHE"}  # read by `oaiserve.storage.private`
# Commands with a command line of their own and without the settings of a server, with their help.
OTHER_COMMANDS = {
    "bench": "Measure a server, or the engine in process, under load.",
}
SMALL_COMMANDS = {
    name: Command(text, f"oaiserve.commands.{name}")
    for name, text in {
        "doctor": "Check whether this machine can serve models, and how well.",
        "list": "List the models on this disk.",
        "plugins": "List the plug-ins that a server loads.",
        "ps": "List your running servers on this machine.",
        "pull": "Download a model without serving it.",
        "rm": "Remove a model from this disk.",
    }.items()
}
WITHOUT_PLUGINS = ("--version",)  # options that load no plug-ins
ENGINE_PROCESS = "engine-process"  # a hidden command, which --engine-process runs for the engine of a server
MODEL_PROCESS = "model-process"  # a hidden command, with which Ray starts a server


def main(argv: Sequence[str] | None = None, serve_app: ServeApp | None = None) -> int:
    """Run one command and return the exit code: 2 if the user can correct the error, 1 if the server failed."""
    obey_signals_as_first_process()
    _open_closed_streams()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # A model may write characters that the terminal's encoding lacks.
    try:
        os.getcwd()
    except FileNotFoundError:  # If the current folder is missing, torch's libraries end the process without a message.
        print("oaiserve: The current folder has been removed. Change to another one.", file=sys.stderr)
        return 2
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["bench"]:
        return _bench(argv[1:])
    if argv and argv[0] in SMALL_COMMANDS:
        return commands.run(small_command(argv[0], SMALL_COMMANDS[argv[0]]), argv[1:])
    if argv[:1] == [MODEL_PROCESS] and len(argv) > 1:
        from oaiserve.commands.server_process import run

        return run(argv[1:], serve_model)
    if argv[:1] == [ENGINE_PROCESS] and len(argv) > 1:
        from oaiserve import run_engine

        return run_engine.run(argv[1:])
    try:
        found = Found([], []) if argv and argv[0] in WITHOUT_PLUGINS else _find_plugins(argv)
        further = commands_of(found.plugins)
        if argv and argv[0] in further and not further[argv[0]].has_settings:
            found.log()
            return commands.run(small_command(argv[0], further[argv[0]]), argv[1:])
        if argv[:1] == ["--install-completion"]:
            return commands.run(_completed(found), argv)
        serve = serve_app or partial(serve_model, found=found)
        app = command_line(serve, found.plugins, all_flags="--help-all" in argv)
    except (OptionError, StartupError) as error:
        print(f"oaiserve: {error}", file=sys.stderr)
        return 2
    return commands.run(app, _with_each_name(_with_flag_for_vllm(argv)), _message_for)


def _open_closed_streams() -> None:
    """Open /dev/null for each standard stream that is closed, as by `2>&-`.

    Otherwise a socket would get the number of that stream, and native code would write its errors to the socket.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # This gets the smallest free number.
            os.set_inheritable(descriptor, True)
            setattr(sys, name, open(descriptor, mode))  # noqa: SIM115 - It stays open.


def _find_plugins(argv: Sequence[str]) -> Found:
    """Return the plug-ins. They are loaded before the command line is parsed, because they add flags to it. Raises
    OptionError and StartupError."""
    modules = os.environ.get(VARIABLE, "").split()
    if argv[:1] != ["serve"]:
        return find(modules)
    file = [os.environ.get(f"{ENV_PREFIX}CONFIG", ""), *_values(argv, "--config")][-1]
    settings = settings_in(Path(file)) if file else {}
    modules = _values(argv, "--plugin") or modules or settings.get("plugin", [])
    return find([modules] if isinstance(modules, str) else modules, tables_in(settings))


def _values(argv: Sequence[str], flag: str) -> list[str]:
    values = []
    for word, following in pairwise([*argv, ""]):
        name, sign, value = word.partition("=")
        if name == flag:
            values.append(value if sign else following)
    return values


def _with_flag_for_vllm(argv: Sequence[str]) -> list[str]:
    """Return a command line in which vLLM's `--generation-config auto` and `--generation-config vllm` are replaced by
    oaiserve's flags."""
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

    vLLM accepts several names after one flag. If the flag comes before MODEL, it takes only one name, because the next
    word is MODEL.
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


def small_command(name: str, described: Command) -> App:
    app = App(
        name=f"oaiserve {name}",
        version_flags=[],
        help_formatter=HelpFormatter(),
        default_parameter=Parameter(negative=()),
    )
    module = import_module(described.module)
    for each in getattr(module, "COMMANDS", ()):
        app.command(each)
    if hasattr(module, "command"):
        app.default(module.command)
        app["--help"].show = False  # Readers of this help have already found the flag.
    return app


def _completed(found: Found) -> App:
    """Return the command line that shells complete, including the flags of the small commands."""
    app = command_line(partial(serve_model, found=found), found.plugins)
    app.config = ()  # --install-completion has no settings
    for name, described in _small_commands(found.plugins).items():
        del app[name]
        app.command(small_command(name, described), name=name)
    return app


def _bench(argv: list[str]) -> int:
    """Run the load test and return its exit code. The server must not import this client, so it runs as a module."""
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
    if isinstance(error, UnknownCommandError):
        unknown = (error.unused_tokens or [""])[0]
        if (command := OUR_COMMANDS.get(unknown)) is not None:
            return f"Unknown command '{unknown}'. Here it is {command}."
    if isinstance(error, UnknownOptionError):
        option = unknown_option(error)
        ours = OUR_FLAGS.get(SHORT.get(option, "--" + option.lstrip("-").replace("_", "-")))
        if ours is not None:
            answer = f"It is {ours}" if ours.startswith("not ") else f"Here it is {ours}"
            if error.token.source == "cli":
                return f"Unknown option {option}. {answer}."
            return f"Unknown option '{option}' in {error.token.source}. {answer.replace('--', '')}."
    if isinstance(error, CoercionError) and isinstance(error.__context__, OptionError):
        flag = error.token.keyword if error.token is not None else None
        return f"{flag or 'A setting'} is wrong: {error.__context__}"
    return message_of(error, name)


def _small_commands(plugins: Iterable[Plugin]) -> dict[str, Command]:
    """Return the small commands by name, in alphabetical order. Plug-ins can't replace commands of oaiserve."""
    of_plugins = {name: each for name, each in commands_of(plugins).items() if not each.has_settings}
    return dict(sorted((of_plugins | SMALL_COMMANDS).items()))


def command_line(serve_app: ServeApp, plugins: Sequence[Plugin] = (), *, all_flags: bool = False) -> App:
    """Return the command line, with the commands and settings of the plug-ins.

    Without `all_flags`, the help of `serve` shows only the flags that most people use.
    """
    tables = [name for plugin in plugins for name in plugin.inner.tables]
    with_settings = ["serve", *(name for name, each in commands_of(plugins).items() if each.has_settings)]
    app = App(
        name="oaiserve",
        help="An OpenAI-compatible server for language models that accounts for every millisecond of every request.",
        version=__version__,
        help_flags=("--help", "-h", "--help-all"),
        help_formatter=HelpFormatter(),
        help_epilogue="To try it: oaiserve serve demo",
        # In order of precedence. Flags override all of these, and these override the defaults.
        config=[
            lambda _, __, arguments: _check_variables(arguments, {name: app[name] for name in with_settings}),
            Env(ENV_PREFIX, command=False, show=False),
            partial(_read_config_file, tables),
        ],
        default_parameter=Parameter(negative_iterable=(), parse=HAS_FLAG),
    )
    app.register_install_completion_command(
        help="Let your shell complete commands and flags (--shell bash, zsh, fish)."
    )
    small = {name: each.help for name, each in _small_commands(plugins).items()}
    for name, text in (OTHER_COMMANDS | small).items():  # `main` runs these
        app.command(App(name=name, help=text))

    def serve(
        *model: str,
        config: Path | None = None,
        server: Annotated[ServerOptions, flags_of("Server", 1)] = ServerOptions(),  # noqa: B008 - frozen
        engine: Annotated[EngineOptions, flags_of("Engine", 2)] = EngineOptions(),  # noqa: B008
        telemetry: Annotated[TelemetryOptions, flags_of("Telemetry", 3)] = TelemetryOptions(),  # noqa: B008
        **of_plugins: object,
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
        first = model[0] if model else ""
        settings = Config(first, server, engine, telemetry, config, changed(of_plugins.values()))
        serve_others = server_for(model, settings, plugins)
        if serve_others is not None:
            with bind(server.host, server.port) as sock:
                return serve_others(sock)
        if not model:
            raise OptionError(
                "MODEL is missing. Give a folder, a .gguf file, a hub id, or demo, as in: oaiserve serve demo"
            )
        if len(model) > 1:
            raise OptionError(
                f"Unexpected argument '{' '.join(model[1:])}'. Give one MODEL, as in: oaiserve serve demo"
            )
        # Checks come before the import of torch, which takes seconds.
        if first != "demo":
            find_model(first)
        check_files(server, engine, telemetry, plugins)
        with bind(server.host, server.port) as sock:
            return serve_app(settings, sock)

    groups = options_of(plugins)
    add_options(serve, groups, 1 + len(OPTIONS))
    app.command(serve)
    for name, each in commands_of(plugins).items():
        if each.has_settings:
            app.command(import_module(each.module).command, name=name)
    if not all_flags:
        _shorten_help(app["serve"], (*OPTIONS, *(kind for _, kind in groups)))
    return app


def _shorten_help(serve: App, kinds: Iterable[type]) -> None:
    flags = [each for kind in kinds for each in fields(kind) if each.name not in WITHOUT_FLAG]
    frequent = {"--config", *(flag_of(each.name) for each in flags if each.metadata.get("frequent"))}
    serve.help_formatter = HelpFormatter(frequent)
    serve.help_epilogue = f"oaiserve serve --help-all has all {len(flags) + 1} flags, and more about these."


def _check_variables(arguments: ArgumentCollection, commands: Mapping[str, App]) -> None:
    """Raise OptionError for an unknown or empty OAISERVE_ variable, which would otherwise be ignored silently.

    Several commands may share an environment, so a setting of another command only causes a warning.
    """
    known = _variables(arguments)
    for variable in sorted(os.environ):
        if variable in known and not os.environ[variable].strip():  # An empty key would leave the server without a key.
            raise OptionError(f"The environment variable {variable} is set, but empty. Give it a value, or unset it.")
    unknown = {name for name in os.environ if name.startswith(ENV_PREFIX)} - known - VARIABLES_WITHOUT_FLAG
    for name, command in commands.items() if unknown else ():
        elsewhere = unknown & _variables(command.assemble_argument_collection())
        unknown -= elsewhere
        if elsewhere:
            named = ", ".join(sorted(elsewhere))
            log.warning("Without effect here, because 'oaiserve %s' has these settings: %s", name, named)
    for variable in sorted(unknown):
        hint = suggestion(variable, known) or "'oaiserve serve --help' lists the settings."
        raise OptionError(f"The environment variable {variable} is not a setting of oaiserve. {hint}")


def _variables(arguments: ArgumentCollection) -> set[str]:
    """Return the environment variables of a command's settings."""
    flags = [name for argument in arguments if argument.parse and argument.show for name in argument.names]
    return {ENV_PREFIX + flag.lstrip("-").upper().replace("-", "_") for flag in flags}


def _read_config_file(
    tables: Iterable[str], app: App, commands: tuple[str, ...], arguments: ArgumentCollection
) -> None:
    """Read the config file, whose settings apply unless a flag or a variable sets them. Skip these tables of plug-ins.
    Raises for unknown keys."""
    argument = arguments.get("--config")
    if argument is None or not argument.tokens:
        return
    path = Path(argument.tokens[-1].value)
    for key, value in settings_in(path).items():
        if value == []:  # An empty list would be ignored.
            raise OptionError(f"'{key}' in '{path}' is an empty list. Give it a value, or leave it out.")
    source = FILE_FORMATS[path.suffix](path, use_commands_as_keys=False)
    if tuple(commands) == ("serve",):
        for key in ("plugins", *tables):  # Other code reads these settings.
            source.config.pop(key, None)
    for key, value in source.config.items():
        if key.replace("_", "-") == "default-params" and isinstance(value, dict):
            source.config[key] = json.dumps(value)
    source(app, commands, arguments)
