"""Reads settings with cyclopts, from arguments or a mapping, and groups their flags in the help."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import Parameter as Argument
from inspect import signature
from typing import Annotated, Any

from cyclopts import App, Group, Parameter
from cyclopts.config import Dict

from oaiserve.config import HAS_FLAG, EngineOptions, ServerOptions, TelemetryOptions


def flags_of(title: str, position: int) -> Parameter:
    """Return the annotation for a settings class whose fields are flags, in a help group with this title."""

    def shown(default: object) -> str | None:
        if default in ((), None):
            return None
        return str(default)

    # name="*" makes each field of the class a flag without the class's name as a prefix.
    return Parameter(name="*", group=Group(title, sort_key=position), show_default=shown)


def add_options(function: Callable[..., Any], groups: Iterable[tuple[str, type]], position: int) -> None:
    """Replace a function's last parameter with one for each group of settings, in the signature that cyclopts reads.
    `position` is the position of the first group in the help."""
    stated = signature(function)
    arguments = [
        Argument(
            f"options_{number}",
            Argument.KEYWORD_ONLY,
            default=kind(),
            annotation=Annotated[kind, flags_of(title, number)],
        )
        for number, (title, kind) in enumerate(groups, start=position)
    ]
    stated = stated.replace(parameters=[*list(stated.parameters.values())[:-1], *arguments])
    function.__signature__ = stated  # type: ignore[attr-defined]


def options_in(
    arguments: list[str], stated: Dict | None = None, groups: Iterable[tuple[str, type]] = ()
) -> dict[str, Any]:
    """Return the options of a `Config`, read from flags and a mapping. `groups` are the settings of plug-ins. Raises
    CycloptsError."""
    parameter = Parameter(name="*", negative_iterable=(), parse=HAS_FLAG)
    app = App(config=stated, default_parameter=parameter)

    def read(
        *,
        server: ServerOptions = ServerOptions(),  # noqa: B008 - frozen
        engine: EngineOptions = EngineOptions(),  # noqa: B008
        telemetry: TelemetryOptions = TelemetryOptions(),  # noqa: B008
        **of_plugins: object,
    ) -> dict[str, Any]:
        return {"server": server, "engine": engine, "telemetry": telemetry, "of_plugins": changed(of_plugins.values())}

    add_options(read, groups, 1)
    app.default(read)
    options: dict[str, Any] = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    return options


def changed(options: Iterable[object]) -> tuple[object, ...]:
    """Return the settings of those plug-ins that differ from the defaults, for a `Config`."""
    return tuple(each for each in options if each != type(each)())
