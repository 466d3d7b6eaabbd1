"""Time limits of open requests: when their turns come, which deadlines they have, and which requests miss these.

Engine thread only, unless a method says otherwise. No torch.
"""

from __future__ import annotations

from collections.abc import Callable

from oaiserve.engine.backpressure import Deadlines, Limit
from oaiserve.engine.open_request import Bounds, OpenRequest
from oaiserve.engine.request import Request
from oaiserve.engine.scheduling.slack import Slack, alone_ns, refusal, turn_ns
from oaiserve.errors import APIError, DeadlineMissed, DeadlineRefused, RequestTimeout, Unavailable
from oaiserve.explain.step_cost import StepCost
from oaiserve.facts.forecast import Forecast
from oaiserve.facts.report import Pace

PACE_TOKENS = 512  # routers get the time of a prompt token from a prompt of this length


class TimeLimits:
    """The deadlines of open requests, by the server's bounds and by those of each request."""

    def __init__(
        self, bounds: Bounds, slack: Slack, cost: Callable[[], StepCost | None], is_open: Callable[[str], bool]
    ) -> None:
        """Begin without requests. `cost` returns what steps cost, if that is known."""
        self._bounds = bounds
        self._slack = slack
        self._cost = cost
        self.deadlines = Deadlines(is_open)

    @property
    def pace(self) -> Pace:
        """Return the recent time of a prompt token and of an answer, for routers. Any thread may call it."""
        answer_ns = self._slack.answer_ns(self._bounds.max_model_len)
        return Pace(alone_ns(self._cost(), PACE_TOKENS) / PACE_TOKENS / 1e9, answer_ns / 1e9)

    def turn(self, request: Request, prompts: list[list[int]], arrived_ns: int) -> tuple[int, int | None]:
        """Return when the turn of a request comes under the policy `deadline`, and its latest start, or None without a
        deadline. Any thread may call it."""
        prompt_ns = alone_ns(self._cost(), sum(map(len, prompts)))
        start_ns = None
        deadlines_ns = (request.first_token_deadline_ns, request.deadline_ns)
        if prompts and deadlines_ns != (None, None):
            most_tokens = self._bounds.length(len(prompts[0]), request.params.max_tokens) - len(prompts[0])
            start_ns = self._slack.latest_start_ns(*deadlines_ns, prompt_ns, most_tokens)
        return turn_ns(arrived_ns, start_ns, self._slack.turn_share(prompt_ns)), start_ns

    def begin(self, request: Request, submitted_ns: int) -> None:
        """Note the deadlines of a request, which count from `submitted_ns`."""
        queue_seconds = self._bounds.queue_timeout_seconds
        seconds = self._bounds.request_timeout_seconds
        if request.is_background:  # only its own deadlines hold
            queue_seconds = seconds = 0
        for at_ns, limit in (
            (queue_seconds and submitted_ns + int(queue_seconds * 1e9), Limit.QUEUE),
            (seconds and submitted_ns + int(seconds * 1e9), Limit.REQUEST),
            (request.first_token_deadline_ns, Limit.FIRST_TOKEN),
            (request.deadline_ns, Limit.END),
        ):
            if at_ns:
                self.deadlines.add(int(at_ns), request.request_id, limit)

    def refusal(self, opened: OpenRequest, forecast: Forecast) -> DeadlineRefused | None:
        """Return the error of a request that will very probably miss one of its own deadlines, by its forecast."""
        deadlines_ns = (opened.request.first_token_deadline_ns, opened.request.deadline_ns)
        received_ns = opened.times.received or 0
        first_ns, end_ns = (None if at_ns is None else at_ns - received_ns for at_ns in deadlines_ns)
        return refusal(forecast, first_ns, end_ns)

    def overdue(self, opened: OpenRequest, limit: Limit, retry_after_seconds: int) -> APIError | None:
        """Return the error of a request at one of its limits, or None if it has kept it."""
        times = opened.times
        match limit:
            case Limit.QUEUE if times.scheduled is None:
                seconds = f"{self._bounds.queue_timeout_seconds:g}"
                message = f"The request waited {seconds} seconds and was not begun; try again later."
                return Unavailable(message, retry_after_seconds=retry_after_seconds)
            case Limit.REQUEST:
                seconds = f"{self._bounds.request_timeout_seconds:g}"
                return RequestTimeout(f"The request took longer than {seconds} seconds, the limit here.")
            case Limit.FIRST_TOKEN if times.first_token is None:
                missed = "begun"
                at_ns = opened.request.first_token_deadline_ns
            case Limit.END:
                missed = "ended"
                at_ns = opened.request.deadline_ns
            case _:
                return None
        within_ms = ((at_ns or 0) - (times.received or 0)) / 1e6
        return DeadlineMissed(f"The answer has not {missed} within {within_ms:,.0f} ms, as the request asks for.")

    def note_end(self, opened: OpenRequest, now_ns: int, num_tokens: int, *, is_whole: bool) -> None:
        """Note how long an ended request took, to estimate the next ones."""
        times = opened.times
        if times.scheduled is not None and times.first_token is not None:
            prompt_ns = alone_ns(self._cost(), opened.usage.prompt_tokens - opened.usage.cached_tokens)
            decode_ns = (times.last_token or now_ns) - times.first_token
            self._slack.note(prompt_ns, times.first_token - times.scheduled, decode_ns, num_tokens, is_whole=is_whole)
