"""Prompts of clients share each step by what the clients have got: one that wants little never waits for the others."""

from random import Random

import pytest

from oaiserve.engine.scheduling import order
from oaiserve.engine.scheduling.order import SHORT_BESIDE
from oaiserve.engine.scheduling.pacing import BESIDE_SHORT, UNIT, StepTime
from oaiserve.engine.scheduling.policy import fair
from oaiserve.engine.sequences.clients import Client
from oaiserve.engine.sequences.sequence import Place, Sequence
from oaiserve.engine.sequences.step import Step
from oaiserve.engine.sequences.step_load import load_of
from oaiserve.explain.step_cost import KNOTS, StepCost
from tests.engine.memory import make, sequence
from tests.world.schedules import seeds

NUM_MIXES = 40
LONGEST = 3000  # tokens of a prompt
# The step in which it begins comes after the one under way, and half of that step, or of the next one, is its own.
MOST_STEPS = 2


class Mix:
    """Heavy clients, who send a long prompt after the other in several threads, on a device whose cost is known."""

    def __init__(
        self,
        seed: int,
        *,
        is_timed: bool,
        most_new: int = 64,
        most_clients: int = 5,
        shares: tuple[float, ...] = (1,),
    ) -> None:
        draw = self.draw = Random(seed)
        self.most_new = most_new
        base_ns = draw.choice([1e6, 6e6, 20e6])
        row_ns = draw.choice([0.02e6, 0.3e6])
        self.cost = StepCost(
            tuple(base_ns + row_ns * rows for rows in KNOTS), prompt_context_ns=draw.choice([0.0, 170.0]), draw_ns=1e5
        )
        most_tokens = draw.choice([256, 512, 2048])
        self.step_time = StepTime(lambda: self.cost, most_tokens)
        self.scheduler = make(
            kv_blocks=4_000,
            block_size=64,
            max_running=256,
            max_step_tokens=most_tokens,
            policy=fair,
            step_time=self.step_time if is_timed else None,
            prefix_cache=False,
        )
        self.names = [f"heavy {number}" for number in range(draw.randint(1, most_clients))]
        self.shares = {name: draw.choice(shares) for name in self.names}
        self.open: dict[Sequence, str] = {}
        self.now = 0.0
        self.num_steps = 0
        for name in self.names:
            for _ in range(draw.randint(1, 8)):
                self.ask(name)

    def ask(self, name: str, prompt_len: int | None = None, max_tokens: int | None = None) -> Sequence:
        draw = self.draw
        prompt = [7] * (prompt_len or draw.randint(100, LONGEST))
        max_tokens = max_tokens or min(self.most_new, draw.choice([1, 16, 64]))
        one = sequence(f"{name}, {draw.random()}", prompt, max_tokens, client_name=name, share=self.shares.get(name, 1))
        self.open[one] = name
        self.scheduler.add(one)
        return one

    def step(self) -> Step:
        """Compute a step. Each request of a heavy client that ends is followed by another one."""
        step = self.scheduler.schedule(int(self.now * 1e9))
        assert step is not None
        self.scheduler.advance(step)
        for chunk in step.chunks:
            if chunk.max_draws:
                self.scheduler.commit(chunk, [7])
        self.now += self.cost.expected_ns(load_of(step)) / 1e9
        self.num_steps += 1
        for one, name in [*self.open.items()]:
            if one.place is Place.NOWHERE:
                del self.open[one]
                if name in self.names:
                    self.ask(name)
        return step

    def wanted(self) -> dict[Client, int]:
        """Return how many prompt tokens each client's sequences want."""
        wanted: dict[Client, int] = {}
        for one in self.open:
            if one.num_uncomputed > 1:
                wanted[one.client] = wanted.get(one.client, 0) + one.num_uncomputed
        return wanted


def test_the_client_with_the_least_service_gets_half_of_each_step_or_what_it_wants() -> None:
    for seed in seeds(NUM_MIXES):
        mix = Mix(seed, is_timed=False)
        for _ in range(40):
            if mix.draw.random() < 0.2:
                mix.ask("light", mix.draw.randint(1, 300), 4)
            wanted = mix.wanted()
            services = {client: client.service for client in wanted}
            step = mix.step()
            got = dict.fromkeys(wanted, 0)
            for chunk in step.chunks:
                if chunk.num_tokens > 1 and chunk.sequence.client in got:
                    got[chunk.sequence.client] += chunk.num_tokens
            if len(services) > 1:
                client, other = sorted(services, key=services.__getitem__)[:2]
                has_caught_up = client.service >= services[other]  # then it's the other one's turn, within the step
                assert has_caught_up or got[client] >= min(wanted[client], sum(got.values()) // 2), f"SEED={seed}"


@pytest.mark.parametrize("is_timed", [False, True], ids=["by tokens", "by time"])
def test_a_light_client_waits_two_steps_at_most_after_the_one_under_way(is_timed: bool) -> None:
    for seed in seeds(NUM_MIXES):
        mix = Mix(seed, is_timed=is_timed)
        for _ in range(mix.draw.randint(1, 40)):
            mix.step()
        for _ in range(8):
            for _ in range(mix.draw.randint(1, 10)):
                mix.step()
            light = mix.ask("light", mix.draw.randint(2, UNIT), 1)
            began = mix.num_steps
            while len(light.token_ids) == light.prompt_len:
                mix.step()
            assert mix.num_steps - began <= MOST_STEPS, f"SEED={seed}"


def test_heavy_clients_get_the_same_however_many_requests_they_send() -> None:
    for seed in seeds(NUM_MIXES):
        mix = Mix(seed, is_timed=True, most_new=1)  # answers of one token, so that prompts always wait
        clients = {one.client for one in mix.open}
        for _ in range(150):
            mix.step()
        services = [client.service for client in clients]
        assert max(services) - min(services) <= 2 * LONGEST, f"SEED={seed}"  # the bound of waiting.py


@pytest.mark.parametrize("is_timed", [False, True], ids=["by tokens", "by time"])
def test_clients_with_larger_shares_get_as_much_more(is_timed: bool) -> None:
    for seed in seeds(NUM_MIXES // 4):
        mix = Mix(seed, is_timed=is_timed, most_new=1, shares=(1, 4))
        clients = {one.client for one in mix.open}
        for _ in range(400):
            mix.step()
        services = [client.service for client in clients]
        assert max(services) - min(services) <= 2 * LONGEST, f"SEED={seed}"


def test_a_short_prompt_ends_in_the_next_step_which_longer_ones_of_its_client_lengthen_by_a_quarter() -> None:
    for seed in seeds(NUM_MIXES):
        mix = Mix(seed, is_timed=True, most_clients=1)
        num_cut = 0
        for _ in range(20):
            for _ in range(mix.draw.randint(1, 12)):
                mix.step()
            short = mix.ask("heavy 0", mix.draw.randint(2, UNIT), 1)
            prompts = [one for one in mix.open if one is not short and one.num_uncomputed > 1]
            others = [one for one in prompts if one.num_uncomputed < SHORT_BESIDE * UNIT or one.key < short.key]
            step = mix.step()
            if others or mix.step_time._spare_ns <= 0:
                continue  # Others are due, or not much longer, or steps have been shorter too often.
            assert len(short.token_ids) > short.prompt_len, f"SEED={seed}"
            needed = [chunk for chunk in step.chunks if chunk.num_tokens == 1 or chunk.sequence is short]
            needed_ns = mix.cost.expected_ns(load_of(Step(needed)))
            assert mix.cost.expected_ns(load_of(step)) <= BESIDE_SHORT * needed_ns, f"SEED={seed}"
            num_cut += 1
        assert num_cut, f"SEED={seed}"


@pytest.mark.parametrize("clients", ["of one client", "of several"])
def test_short_prompts_cost_a_tenth_of_the_tokens_per_second_at_most(
    clients: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokens_per_second(seed: int, short_beside: float) -> float:
        """Return how fast prompts are computed if short ones come in all the time, and those that are queued."""
        monkeypatch.setattr(order, "SHORT_BESIDE", short_beside)
        mix = Mix(seed, is_timed=True, most_new=1)
        name = "heavy 0" if clients == "of one client" else "light"
        lengths = Random(seed)
        num_tokens = 0
        for _ in range(400):
            if not any(one.prompt_len <= 64 for one in mix.open):
                mix.ask(name, lengths.randint(2, 64), 1)
            num_tokens += sum(chunk.num_tokens for chunk in mix.step().chunks)
        return num_tokens / mix.now

    for seed in seeds(NUM_MIXES // 10):
        rate = tokens_per_second(seed, SHORT_BESIDE)
        assert rate >= 0.9 * tokens_per_second(seed, float("inf")), f"SEED={seed}"
