"""The rights of a tool in a task without a user at the terminal, and the line that `launch` prints about them.

`launch` grants no rights by itself: it prints the command that does, before the tool starts.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Rights:
    """The rights of a tool in a task that it does alone, and how the user changes them."""

    alone: tuple[str, ...]  # arguments that begin such a task
    default: str  # a sentence: what the tool may do
    purpose: str  # purpose of the change, such as "To allow both"
    arguments: tuple[str, ...] = ()  # the change: a flag with its value, after the user's own
    environment: Mapping[str, str] = field(default_factory=dict)  # the change, if it is a variable
    decided: tuple[str, ...] = ()  # other arguments with which the user has decided
    takes_bare_task: bool = False  # A task needs no argument before it.

    def note(self, launch: Sequence[str], arguments: Sequence[str], environment: Mapping[str, str]) -> str:
        """Return the line to print, "" if a user is at the terminal or has decided. `launch` are the words before the
        tool's own arguments."""
        names = {argument.partition("=")[0] for argument in arguments}
        # A task is a sentence. A single word may be the value of a flag.
        is_alone = names & {*self.alone} or (self.takes_bare_task and any(" " in word for word in arguments))
        has_decided = names & {*self.decided, *self.arguments[:1]} or environment.keys() & self.environment.keys()
        if not is_alone or has_decided:
            return ""
        variables = "".join(f"{name}={shlex.quote(value)} " for name, value in self.environment.items())
        return f"{self.default} {self.purpose}: {variables}{shlex.join([*launch, *arguments, *self.arguments])}"
