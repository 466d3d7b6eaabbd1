"""`Outline`: the parts of a prompt as hashes, in the order in which chat templates write them. Stdlib only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from oaiserve.facts.record import ReadAgain

Digest = bytes
DIGEST_BYTES = 8


def digest_of(content: bytes) -> Digest:
    return blake2b(content, digest_size=DIGEST_BYTES).digest()


class Change(NamedTuple):
    """The first part in which a prompt differs from an earlier one."""

    reason: ReadAgain
    place: int | None = None  # of a tool, message or image
    option: str = ""  # the name of the variable of the template


@dataclass(frozen=True, slots=True)
class Outline:
    """The parts of a prompt. Parts that are equal have equal hashes."""

    model: str = ""  # the model, or the adapter
    salt: Digest = b""  # Prompts with different salts share no cache.
    tools: tuple[Digest, ...] = ()
    system: tuple[Digest, ...] = ()  # messages before the first one of another role
    options: Mapping[str, Digest] = field(default_factory=dict)  # what else the template reads, by name
    messages: tuple[Digest, ...] = ()  # all others, or the text of a prompt without messages
    images: tuple[Digest, ...] = ()  # and sounds

    @property
    def parts(self) -> tuple[Digest, ...]:
        """Return the parts by which prompts of one conversation are known, the latest first."""
        return (*reversed(self.messages), *self.system, *self.tools)

    def change_since(self, before: Outline) -> Change | None:
        """Return the first change since an earlier prompt; None if this one only goes on from it."""
        if self.model != before.model:
            return Change(ReadAgain.MODEL)
        if self.salt != before.salt:
            return Change(ReadAgain.SALT)
        if self.tools != before.tools:
            return Change(ReadAgain.TOOLS, _first_difference(before.tools, self.tools))
        if self.system != before.system:
            return Change(ReadAgain.SYSTEM, _first_difference(before.system, self.system))
        if self.options != before.options:
            names = self.options.keys() | before.options.keys()
            changed = min(name for name in names if self.options.get(name) != before.options.get(name))
            return Change(ReadAgain.OPTIONS, None, changed)
        message = _first_difference(before.messages, self.messages)
        image = _first_difference(before.images, self.images)
        if message < len(before.messages):
            return Change(ReadAgain.MESSAGE, len(self.system) + message)
        if image < len(before.images):
            return Change(ReadAgain.IMAGE, image)
        return None


def _first_difference(before: tuple[Digest, ...], now: tuple[Digest, ...]) -> int:
    """Return the place of the first part that differs; the length of the shorter one if there is none."""
    for place, (old, new) in enumerate(zip(before, now, strict=False)):
        if old != new:
            return place
    return min(len(before), len(now))
