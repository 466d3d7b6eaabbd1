"""Types that the engine's packages share: adapters, media, log-probabilities and rules. No torch."""
