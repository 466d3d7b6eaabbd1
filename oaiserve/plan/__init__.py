"""`oaiserve plan` says what a recorded load needs, by replaying it through the real scheduler without a model."""
