"""Attacks of all families at once, whose requests are partly left before their answers."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

from tools.attack.attack import ENDED, FULL, Attack, Family, Sent, Strike, outcomes
from tools.attack.families.access import victims_bytes
from tools.attack.families.bodies import of_form
from tools.attack.families.connections import sockets
from tools.attack.families.generated import generate
from tools.attack.forms import forms

ASKED_AT_ONCE = 6
LEFT_AT_ONCE = 4
LEFT_SECONDS = 0.05
NUM_GENERATED = 400
NUM_GROWING = 200
SIZES = (7_000, 60_000, 2**20)  # bytes of a growing body
ANY = outcomes(*range(200, 500), "left", "cut") | ENDED | FULL


def mixture(attacks: Sequence[Attack]) -> Family:
    """Return a family of one attack: the requests of bursts, generated ones and growing bodies, in another order each
    time. Meanwhile, seeded requests must have the same answers, and sockets are left."""
    family = Family("mixed", "a client that takes all")
    bursts = [attack for attack in attacks if attack.requests and attack.server == "keys" and not attack.bare]

    @family.attack("requests of all kinds in any order, some of which are left, and sockets", ANY, is_work=True,
                   answer_seconds=300, limit_seconds=900, bare=True)  # fmt: skip
    async def mixed(strike: Strike) -> None:
        rng = random.Random(time.time_ns())
        sent = [one for attack in bursts if attack.requests for one in attack.requests(lambda full, quick: quick)]
        sent += generate(rng.randrange(2**32), NUM_GENERATED)
        sent += [of_form(form, rng.choice(SIZES)) for form in rng.sample(forms(), NUM_GROWING)]
        rng.shuffle(sent)
        sent = sent[: strike.number(len(sent), len(sent) // 10)]
        left = [one for one in sent[::3] if isinstance(one, bytes)]
        asked: list[Sent] = [one for number, one in enumerate(sent) if number % 3]
        async with asyncio.TaskGroup() as group:
            group.create_task(victims_bytes(strike))
            group.create_task(strike.ask_all(asked, ASKED_AT_ONCE))
            group.create_task(strike.leave_all(left, LEFT_AT_ONCE, LEFT_SECONDS))
            group.create_task(sockets(strike))

    return family
