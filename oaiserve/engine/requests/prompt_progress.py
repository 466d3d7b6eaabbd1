"""Reports how much of a request's prompts is computed. Engine thread only, no torch."""

from __future__ import annotations

from dataclasses import replace

from oaiserve.engine.request import PromptProgress
from oaiserve.engine.requests.event_outbox import Outbox
from oaiserve.engine.requests.open_request import OpenRequest
from oaiserve.engine.sequences.sequence import Sequence

LONG_PROMPT = 64  # tokens to compute; no progress is reported for shorter prompts
PROGRESS_NS = 1_000_000_000  # interval between two reports of a request


def begin_progress(outbox: Outbox, opened: OpenRequest, sequence: Sequence, now_ns: int) -> None:
    """Begin to report the progress of a request at its first step, if reports were requested and its prompt is long."""
    if opened.request.reports_progress and sequence.prompt_len - sequence.num_computed >= LONG_PROMPT:
        _emit_progress(outbox, opened, now_ns)


def report_progress(outbox: Outbox, opened: OpenRequest, now_ns: int) -> None:
    """Report the progress of a request's prompts if the last report is at least PROGRESS_NS old."""
    if opened.progress_ns is not None and now_ns - opened.progress_ns >= PROGRESS_NS:
        _emit_progress(outbox, opened, now_ns)


def _emit_progress(outbox: Outbox, opened: OpenRequest, now_ns: int) -> None:
    usage = opened.usage
    opened.progress_ns = now_ns
    elapsed_ns = now_ns - (opened.times.scheduled or now_ns)
    tokens = (usage.prompt_tokens, usage.cached_tokens, opened.computed_prompt_tokens)
    done = (*tokens, elapsed_ns, replace(opened.times))
    outbox.emit(opened, PromptProgress(opened.request.request_id, *done))
