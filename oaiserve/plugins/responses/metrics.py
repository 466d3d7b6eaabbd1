"""The metrics of the store of responses."""

from __future__ import annotations

from oaiserve.facts.metric import metric

STORED = metric("oaiserve_stored_responses", "Stored answers of /v1/responses.")
STORED_BYTES = metric("oaiserve_stored_response_bytes", "Bytes of stored answers with their inputs.")
DROPPED = metric(
    "oaiserve_stored_responses_dropped_total",
    "Stored answers that were dropped. reason: age (--response-store-seconds), room (--response-store-number, "
    "--response-store-bytes) or size (larger than the store).",
    "reason",
)
