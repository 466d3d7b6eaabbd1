"""The sampling parameters for requests that set none: the operator's, or the model's, or else a mild fallback."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import msgspec

from oaiserve.checkpoints.model_defaults import LENGTHS, SAMPLING
from oaiserve.config import Config, OptionError
from oaiserve.engine.request import SamplingParams
from oaiserve.errors import InvalidRequest
from oaiserve.routes.intake import parameters
from oaiserve.routes.intake.body_types import SamplingBody
from oaiserve.routes.intake.invalid import invalid, invalid_type

Values = dict[str, float | int]

# OpenAI's documented defaults, which leave the model's distribution as it is.
NEUTRAL: Values = {
    each.name: getattr(SamplingParams(), each.name)
    for each in fields(SamplingParams)
    if each.type == "float" or each.name == "top_k"
}
# The fallback applies if neither the operator, nor the model's files, nor the client sets any of these. So a client
# that sets one of them gets OpenAI's defaults for the others.
SHAPING = ("temperature", "top_p", "top_k", "min_p")
FALLBACK: Values = {"temperature": 0.7, "min_p": 0.05}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The defaults of one server."""

    stated: Values  # by the operator or the model
    origin: str  # origin of the values, for the banner
    ignored: tuple[str, ...] = ()  # errors of unusable values in the model's files

    @classmethod
    def of(cls, config: Config, of_model: Mapping[str, Any]) -> SamplingDefaults:
        """Join the operator's values and the model's. Raises OptionError if one of the operator's is wrong."""
        of_flag = given_defaults(config.server.default_params)
        if not config.engine.generation_config:
            return cls(NEUTRAL | of_flag, "--no-generation-config" + (" and --default-params" if of_flag else ""))
        known: Values = {}
        ignored = []
        for name in of_model.keys() & SAMPLING:
            try:
                known |= _checked({name: of_model[name]})
            except InvalidRequest as error:
                ignored.append(error.message)
        stated = known | of_flag
        is_shaped = any(name in stated for name in SHAPING)
        origins = {"--default-params": of_flag, "the model": known, "built in": not is_shaped}
        origin = " and ".join(name for name, applies in origins.items() if applies)
        return cls(stated, origin, tuple(sorted(ignored)))

    def of_request(self, body: SamplingBody | None = None) -> Values:
        """Return the values of parameters that this body doesn't set, or of all parameters without a body."""
        is_shaped = any(name in self.stated or getattr(body, name, None) is not None for name in SHAPING)
        return NEUTRAL | ({} if is_shaped else FALLBACK) | self.stated

    def __str__(self) -> str:
        values = self.of_request()
        shown = [name for name in values if values[name] != NEUTRAL[name] or name == "temperature"]
        return f"{', '.join(f'{name} {values[name]:g}' for name in shown)} ({self.origin})"


def given_defaults(text: str | None) -> Values:
    """Return the parameters of --default-params, in JSON or as NAME=VALUE. Raises OptionError."""
    if text is None:
        return {}
    values: Any = {}
    try:
        if text.lstrip().startswith("{"):
            values = json.loads(text)
        else:
            for pair in text.split(","):
                name, _, value = pair.partition("=")
                values[name.strip()] = _number(value.strip())
        return _checked(values)
    except ValueError as error:
        raise OptionError(f"--default-params is '{text}', which is not JSON: {error}.") from error
    except InvalidRequest as error:
        raise OptionError(f"--default-params is wrong. {error.message}") from error


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # `_checked` refuses it with the error that a request would get.


def _checked(values: Mapping[str, Any]) -> Values:
    """Check values like those of a request. Raises InvalidRequest."""
    for name in values:
        if name in (*LENGTHS, "max_tokens", "max_completion_tokens"):
            raise invalid(name, "is not a sampling parameter. --default-max-tokens sets the limit of answers")
        if name not in NEUTRAL:
            raise invalid(name, f"is not a sampling parameter. There are {', '.join(NEUTRAL)}")
    try:
        body = msgspec.convert(values, SamplingBody)
    except msgspec.ValidationError as error:
        raise invalid_type(SamplingBody, str(error)) from None
    params = parameters.sampling_params(body, SamplingParams(), {})
    return {name: getattr(params, name) for name, value in values.items() if value is not None}
