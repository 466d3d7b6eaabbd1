"""The commands that other threads put into the inbox of the engine thread."""

from __future__ import annotations

from dataclasses import dataclass

from oaiserve.engine.request import Deliver, Request
from oaiserve.engine.tiers.lower_tier import BlocksArrived
from oaiserve.engine.tokenize import TokenizeEvent


@dataclass(frozen=True, slots=True)
class Submitted:
    request: Request
    deliver: Deliver
    at_ns: int


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str  # id of a request that may already have ended


@dataclass(frozen=True, slots=True)
class DropAdapter:
    number: int  # number of an adapter to drop after the end of its last request


@dataclass(frozen=True, slots=True)
class Stop:
    drain: bool  # whether the thread ends only when all open requests have; otherwise it fails them and ends at once


Command = Submitted | TokenizeEvent | BlocksArrived | Abort | DropAdapter | Stop
