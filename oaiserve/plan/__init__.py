"""`oaiserve plan` finds the needs of a recorded load, by a replay through the real scheduler without a model."""
