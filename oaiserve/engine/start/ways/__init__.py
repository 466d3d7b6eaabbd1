"""The ways to start a model, a file each."""
