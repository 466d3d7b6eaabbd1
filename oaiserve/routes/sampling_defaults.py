"""The sampling parameters for requests that set none: the operator's, or the model's, or else a mild fallback."""

from __future__ import annotations

from dataclasses import dataclass, fields

from oaiserve.checkpoints.recommended_sampling import Recommendation
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.sequences.draw_columns import DRAW_COLUMNS

Values = dict[str, float | int]

# OpenAI's documented defaults, which leave the model's distribution as it is.
NEUTRAL: Values = {
    each.name: getattr(SamplingParams(), each.name)
    for each in fields(SamplingParams)
    if each.type == "float" or each.name == "top_k"
}
# The fallback applies if neither the operator, nor the model's files, nor the client sets any of DRAW_COLUMNS. So a
# client that sets one of them gets OpenAI's defaults for the others.
FALLBACK: Values = {"temperature": 0.7, "min_p": 0.05}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The defaults of one server."""

    stated: Values  # set by the operator or the model
    origin: str  # origin of the values, for the banner
    ignored: tuple[str, ...] = ()  # errors of unusable values in the model's files
    recommendation: Recommendation | None = None  # the publisher's, if the model's values are recommended ones

    def of_request(self, body: object = None) -> Values:
        """Return the values of parameters that this body doesn't set, or of all parameters without a body."""
        is_shaped = any(name in self.stated or getattr(body, name, None) is not None for name in DRAW_COLUMNS)
        return NEUTRAL | ({} if is_shaped else FALLBACK) | self.stated

    def __str__(self) -> str:
        values = self.of_request()
        shown = [name for name in values if values[name] != NEUTRAL[name] or name == "temperature"]
        return f"{', '.join(f'{name} {values[name]:g}' for name in shown)} ({self.origin})"
