"""Reads the sampling defaults that the operator and the model state, and checks them as a request's parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from oaiserve.checkpoints.model_defaults import LENGTHS
from oaiserve.checkpoints.recommended_sampling import Recommendation
from oaiserve.config import Config, OptionError
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.sequences.draw_columns import DRAW_COLUMNS
from oaiserve.errors import InvalidRequest
from oaiserve.routes.intake import parameters
from oaiserve.routes.intake.body_types import SamplingBody
from oaiserve.routes.intake.invalid import invalid, invalid_type
from oaiserve.routes.sampling_defaults import NEUTRAL, SamplingDefaults, Values


def sampling_defaults(
    config: Config, of_model: Mapping[str, Any], recommendation: Recommendation | None = None
) -> SamplingDefaults:
    """Join the operator's values and the model's, of which some may be a `recommendation`. Raises OptionError if one of
    the operator's is wrong."""
    of_flag = given_defaults(config.server.default_params)
    if not config.engine.generation_config:
        return SamplingDefaults(
            NEUTRAL | of_flag, "--no-generation-config" + (" and --default-params" if of_flag else "")
        )
    known: Values = {}
    ignored = []
    for name in of_model.keys() & NEUTRAL.keys():
        try:
            known |= _checked({name: of_model[name]})
        except InvalidRequest as error:
            ignored.append(error.message)
    stated = known | of_flag
    is_shaped = any(name in stated for name in DRAW_COLUMNS)
    of_model_name = "the model" if recommendation is None else f"recommended by {recommendation.publisher}"
    origins = {"--default-params": of_flag, of_model_name: known, "built in": not is_shaped}
    origin = " and ".join(name for name, applies in origins.items() if applies)
    return SamplingDefaults(stated, origin, tuple(sorted(ignored)), recommendation)


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
    params = parameters.sampling_params(body, SamplingParams(), {}, _note_nothing)
    return {name: getattr(params, name) for name, value in values.items() if value is not None}


def _note_nothing(place: str, what: str) -> None:
    """Ignore the note: only `stop` can cause one, and it is not among these values."""
