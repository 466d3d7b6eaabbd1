"""Replays a recorded load through the engine's scheduler, without a model: tools.goodput and tools.forecasts use it."""
