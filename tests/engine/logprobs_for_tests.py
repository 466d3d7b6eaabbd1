"""Log-probabilities by position, as tests write and compare them."""

from oaiserve.engine.types.logprobs import Entry, TokenLogprobs


def token_logprobs(*positions: list[Entry], rank: int = 0) -> TokenLogprobs:
    """Return the log-probabilities of these positions: in each, the token first, then its alternatives."""
    rows = TokenLogprobs()
    for entries in positions:
        rows.add(*zip(*entries, strict=True), rank=rank)
    return rows


def values_of(rows: TokenLogprobs | None) -> list[float]:
    """Return the log-probability of each token."""
    return [] if rows is None else [value for _, _, value in rows.tokens()]
