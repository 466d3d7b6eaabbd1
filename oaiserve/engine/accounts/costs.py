"""The cost of a request: its shares, also in bytes, joules and money. Engine thread only, stdlib."""

from __future__ import annotations

from dataclasses import dataclass

from oaiserve.engine.accounts.energy import Energy
from oaiserve.engine.accounts.shares import Shares
from oaiserve.explain.causes import RequestCauses
from oaiserve.explain.step_cost import StepCost, Work
from oaiserve.facts.record import EngineAccount

HOUR_NS = 3600 * 10**9


@dataclass(frozen=True, slots=True)
class Rates:
    """How to convert a request's shares into costs: the size of a block and of all weights, and the machine's price and
    power."""

    block_bytes: int
    weight_bytes: int  # bytes that each step reads
    price_per_hour: float | None
    energy: Energy

    def close(self, account: EngineAccount, own: RequestCauses, shares: Shares, *, is_last: bool) -> None:
        """Complete the account of a request that has ended, or of the last one that was open."""
        core_ns, machine_ns = shares.close(own, is_last=is_last)
        account.core_ns = core_ns
        account.machine_ns = machine_ns
        account.weight_bytes = round(own.weight_reads * self.weight_bytes)
        account.joules = self.energy.joules_of(core_ns, machine_ns)
        if self.price_per_hour is not None:
            account.price = machine_ns / HOUR_NS * self.price_per_hour

    def compare(
        self, account: EngineAccount, time: StepCost | None, cores: StepCost | None, work: Work, step_tokens: int
    ) -> None:
        """Record the expected engine time and core time of the request if it had been alone on the server.

        This takes for granted that its whole prompt is computed. A time is not recorded while the cost of such steps is
        unknown.
        """
        if time is not None and (alone_ns := time.alone_ns(work, step_tokens)) is not None:
            account.alone_ns = alone_ns + account.media.encode_ns
        if cores is not None and (alone_ns := cores.alone_ns(work, step_tokens)) is not None:
            account.alone_core_ns = alone_ns + account.media.core_ns
