"""`Outline`: the parts of a prompt as hashes and sizes, in the order in which templates write them. Stdlib only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from oaiserve.facts.record import ReadAgain

DIGEST_BYTES = 8
# A system message or a tool of nearly the same size was edited, as by a clock in it, and not replaced.
EDITED = 0.1


class Part(NamedTuple):
    """A message, a tool, an image or an option of a prompt. Equal parts have equal digests."""

    digest: bytes
    size: int  # in bytes


def part_of(content: bytes) -> Part:
    return Part(blake2b(content, digest_size=DIGEST_BYTES).digest(), len(content))


class Change(NamedTuple):
    """The first part in which a prompt differs from an earlier one."""

    reason: ReadAgain
    place: int | None = None  # of a tool, message or image
    option: str = ""  # the name of the variable of the template


@dataclass(frozen=True, slots=True)
class Outline:
    """The parts of a prompt."""

    model: str = ""  # the model, or the adapter
    salt: Part | None = None  # Prompts with different salts share no cache.
    tools: tuple[Part, ...] = ()
    system: tuple[Part, ...] = ()  # messages before the first one of another role
    options: Mapping[str, Part] = field(default_factory=dict)  # what else the template reads, by name
    messages: tuple[Part, ...] = ()  # all others, or the text of a prompt without messages
    images: tuple[Part, ...] = ()  # and sounds

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return the parts by which prompts of one conversation are known, the latest first."""
        return (*reversed(self.messages), *self.system, *self.tools)

    @property
    def _in_order(self) -> tuple[Part, ...]:
        return (*self.tools, *self.system, *self.messages, *self.images)

    def share_known(self, before: Outline, change: Change) -> float:
        """Return which share of its text from a change on was in an earlier prompt, too. A change without a place is at
        the beginning. A system message or a tool that was edited counts as if it had been there."""
        now = self._in_order
        earlier = before._in_order
        first = 0 if change.place is None else _first_difference(earlier, now)
        known = set(earlier)
        if change.reason in (ReadAgain.SYSTEM, ReadAgain.TOOLS):
            pairs = zip(earlier[first : first + 1], now[first : first + 1], strict=False)
            known |= {new for old, new in pairs if abs(old.size - new.size) <= EDITED * old.size}
        parts = now[first:]
        return sum(part.size for part in parts if part in known) / max(1, sum(part.size for part in parts))

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


def _first_difference(before: tuple[Part, ...], now: tuple[Part, ...]) -> int:
    """Return the place of the first part that differs; the length of the shorter one if there is none."""
    for place, (old, new) in enumerate(zip(before, now, strict=False)):
        if old != new:
            return place
    return min(len(before), len(now))
