"""Tables of types that the other rooms of the engine share: adapters, media, log-probabilities and rules. No torch."""
