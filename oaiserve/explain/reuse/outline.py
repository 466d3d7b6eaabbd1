"""`Outline`: the parts of a prompt as hashes and sizes, in the order in which templates write them. Stdlib only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from oaiserve.facts.record import ReadAgain

DIGEST_BYTES = 8
# A system message or a tool whose size changed by no more than this share was edited (it may contain a clock), not
# replaced.
EDITED = 0.1
OPENING = "opening"
ASSISTANT = "assistant"


class Part(NamedTuple):
    """A message, a tool, an image or an option of a prompt. Equal parts have equal digests."""

    digest: bytes
    size: int  # in bytes of text
    role: str = ""  # role of a message


def part_of(content: bytes, role: str = "") -> Part:
    return Part(blake2b(content, digest_size=DIGEST_BYTES).digest(), len(content), role)


class Change(NamedTuple):
    """The first part in which a prompt differs from an earlier one."""

    reason: ReadAgain
    place: int | None = None  # index of a tool, message or image
    option: str = ""  # the name of a variable of the template, or OPENING


@dataclass(frozen=True, slots=True)
class Outline:
    """The parts of a prompt."""

    model: str = ""  # the model's or the adapter's name
    salt: Part | None = None  # prompts with different salts share no cached blocks
    tools: tuple[Part, ...] = ()
    system: tuple[Part, ...] = ()  # the messages before the first one with another role
    options: Mapping[str, Part] = field(default_factory=dict)  # other variables of the template, by name
    messages: tuple[Part, ...] = ()  # all other messages, or the text of a prompt without messages
    images: tuple[Part, ...] = ()  # images and sounds
    opening: Part | None = None  # text after the template's generation prompt

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return the parts by which prompts of the same conversation are recognized, the latest first."""
        return (*reversed(self.messages), *self.system, *self.tools)

    @property
    def num_parts(self) -> int:
        return sum(map(len, (self.tools, self.system, self.options, self.messages, self.images)))

    @property
    def _in_order(self) -> tuple[Part, ...]:
        return (*self.tools, *self.system, *self.messages, *self.images)

    def share_kept(self, later: Outline, change: Change) -> float:
        """Return the share of the text after a change that is also in a later prompt. A change without a place counts
        from the beginning, and a changed image from the first message, because any message may have images. An edited
        system message or tool counts as unchanged."""
        parts = self._in_order
        after = later._in_order
        if change.reason is ReadAgain.IMAGE:
            first = len(self.tools) + len(self.system)
        else:
            first = 0 if change.place is None else _first_difference(parts, after)
        known = set(after)
        if change.reason in (ReadAgain.SYSTEM, ReadAgain.TOOLS):
            pairs = zip(parts[first : first + 1], after[first : first + 1], strict=False)
            known |= {old for old, new in pairs if abs(old.size - new.size) <= EDITED * old.size}
        rest = parts[first:]
        return sum(part.size for part in rest if part in known) / max(1, sum(part.size for part in rest))

    def continues(self, before: Outline) -> bool:
        """Return whether this prompt continues an earlier one after an answer, or repeats one that contains an
        answer."""
        number = len(before.messages)
        if not number or self.messages[:number] != before.messages:
            return False
        return any(message.role == ASSISTANT for message in self.messages[number : number + 1] or self.messages)

    def has_other_images(self, before: Outline) -> bool:
        """Return whether an image or a sound differs from the one at the same index of the earlier prompt."""
        return _first_difference(before.images, self.images) < min(len(before.images), len(self.images))

    def change_since(self, before: Outline) -> Change | None:
        """Return the first change since an earlier prompt; None if this prompt only continues it."""
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
        if self.opening != before.opening:
            return Change(ReadAgain.OPTIONS, None, OPENING)
        return None


def _first_difference(before: tuple[Part, ...], now: tuple[Part, ...]) -> int:
    """Return the index of the first difference, or the length of the shorter tuple if there is none."""
    for place, (old, new) in enumerate(zip(before, now, strict=False)):
        if old != new:
            return place
    return min(len(before), len(now))
