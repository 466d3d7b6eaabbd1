"""The ways to start a model."""
