"""The waiting sequences, and the turns of their clients. Engine thread only, no torch.

Each client has a counter of service (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024), which grows
the slower the larger its share is. The next sequence to be admitted is the first one of the waiting client with the
lowest counter, and the prompts of a step are in the order of these counters, whether they wait or are under way. A
client that returns has its counter raised to the lowest one of all clients with a prompt that waits or is under way, or
to that of the last client that waited: being idle earns nothing.

While two clients wait all the time, the service of one in any interval exceeds the other's by at most
2 * max(prompt, GENERATED_WEIGHT * batch): the longest prompt, and the most tokens of all sequences in a batch (their
theorem 4.4, with our weights). No prompt of the client that is ahead is computed before the other client's, so it only
gets what its decodes still get, and half of a step. Overtaking (`may_overtake`) adds to the bound. Taking a slot from
the client that is ahead (`Order.gives_way`) only reduces the difference. A client that had nothing open goes before
those with the same amount of service, so a short prompt of such a client ends in one of the next two steps.

The requests of a client take turns, too. A request with nothing running goes before one that has a slot already. The
prompts of each client are computed in the order in which they would end if they shared equally (`EqualShares`), so a
short prompt passes long ones. Until a prompt ends, its client gets at most twice the prompt tokens that it would get
with equal shares, because a long prompt leaves half of a step to a shorter one after it.

Under a policy without turns, all sequences are of one request of one client.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from operator import attrgetter

from oaiserve.engine.sequences.clients import Client, EqualShares, RequestTurn
from oaiserve.engine.sequences.sequence import Place, Sequence
from oaiserve.engine.sequences.step import Chunk, Step

# A generated token counts this much as service, and a computed prompt token counts 1. The weights are the paper's
# default, which follows the price lists of hosted models: a generated token costs a step, while prompt tokens share
# one. Cached tokens don't count, and neither do tokens that are computed again after a preemption: the server decided
# to drop them, and the client has already waited for it.
GENERATED_WEIGHT = 2

MOST_ABSENT = 1024  # clients without open sequences that are remembered because they had more service than the others

_service = attrgetter("service")


class WaitingQueue:
    """The waiting sequences: first those of the client whose turn it is, then by request, and by their key.

    An absent client can be dropped once its counter is at most the value that it would be raised to. The queue keeps
    the MOST_ABSENT others with the highest counters.
    """

    def __init__(self, running: list[Sequence], *, by_client: bool) -> None:
        """Create an empty queue. `running` is its lane's list of running sequences."""
        self._running = running
        self._by_client = by_client
        self._clients: dict[str, Client] = {}
        # A heap with one entry for each waiting client: its counter, whether it had anything running, and a sequence
        # number. Among equal counters, clients with nothing running come first, then those that came earlier. As
        # counters only grow, an entry is never above its client's counter, and is corrected when its turn comes.
        self._turns: list[tuple[float, bool, int, Client]] = []
        self._numbers = itertools.count()
        self._last = Client("", EqualShares())  # the last client that stopped waiting
        self._held: list[Client] = []  # clients that are skipped until the end of the step
        self._most_clients = 2 * MOST_ABSENT  # with more than this, some are forgotten
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def has_several_clients(self) -> bool:
        return len(self._clients) > 1

    def next_client(self) -> Client | None:
        """Return the client whose turn it is, or None if none waits."""
        while self._turns:
            service, _, number, client = self._turns[0]
            if not client.num_waiting:
                heapq.heappop(self._turns)
                client.has_turn = False
            elif client.service > service:
                heapq.heapreplace(self._turns, (client.service, client.num_running > 0, number, client))
            else:
                return client
        return None

    def arrive(self, sequence: Sequence, num_tokens: int) -> None:
        """Assign a sequence to its client and request, and determine its place there from its number of prompt
        tokens."""
        if self._by_client:
            name = sequence.client_name
            request = sequence.request_id
        else:
            name = ""
            request = ""
        client = self._clients.get(name)
        if client is None:
            if len(self._clients) >= self._most_clients:
                self._forget()
            client = self._clients[name] = Client(name, EqualShares())
        turn = client.requests.get(request)
        if turn is None:
            turn = client.requests[request] = RequestTurn()
        client.share = sequence.share
        sequence.client = client
        sequence.turn = turn
        if self._by_client:
            sequence.num_due = num_tokens
            sequence.key = (client.shares.arrive(turn, num_tokens), *sequence.key)

    def add(self, sequence: Sequence) -> None:
        """Add a sequence. If its client had none waiting, the client's counter is raised to that of the others."""
        client = sequence.client
        if not client.num_waiting:
            client.service = max(client.service, self._floor())
        self.put_back(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Put back a sequence that was taken for this step but isn't part of it."""
        client = sequence.client
        turn = sequence.turn
        self._clients.setdefault(client.name, client)
        heapq.heappush(turn.waiting, (sequence.key, sequence))
        turn.num_waiting += 1
        client.num_waiting += 1
        self._num_waiting += 1
        self._list(client, turn)
        self._give_turn(client)

    def head(self) -> Sequence | None:
        """Return the next sequence, or None if none waits."""
        client = self.next_client()
        if client is None:
            return None
        turns = client.turns
        while True:
            place, number, turn = turns[0]
            while turn.waiting and turn.waiting[0][1].place is not Place.WAITING:
                heapq.heappop(turn.waiting)  # This sequence was discarded.
            if place != turn.listed:  # The request is listed at another position, too.
                heapq.heappop(turns)
            elif not turn.waiting:
                heapq.heappop(turns)
                turn.listed = None
            elif place != turn.place:
                turn.listed = turn.place
                heapq.heapreplace(turns, (turn.listed, number, turn))
            else:
                head: Sequence = turn.waiting[0][1]
                return head

    def heads(self) -> Iterator[Sequence]:
        """Yield one early sequence of each waiting client that isn't held back, in any order. It may not be the
        client's first."""
        for *_, client in self._turns:
            if client.num_waiting:
                yield from (turn.waiting[0][1] for _, _, turn in client.turns[:1] if turn.waiting)

    def take(self, head: Sequence) -> None:
        """Take the next sequence from the queue."""
        heapq.heappop(head.turn.waiting)
        self.discard(head)

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence from the queue. Its entry stays in the heap of its request, and is skipped later."""
        client = sequence.client
        self._num_waiting -= 1
        client.num_waiting -= 1
        sequence.turn.num_waiting -= 1
        if not client.num_waiting:
            for _, _, turn in client.turns:
                turn.waiting.clear()
                turn.listed = None
            client.turns.clear()
            self._last = client

    def hand_over(self, sequence: Sequence) -> None:
        """Forget a removed sequence. Otherwise, once it waits in another queue, this one would count it as waiting,
        too."""
        waiting = sequence.turn.waiting
        waiting[:] = [entry for entry in waiting if entry[1] is not sequence]
        heapq.heapify(waiting)
        self.served(sequence, sequence.num_due)

    def hold(self, client: Client) -> None:
        """Skip a client until `release` is called."""
        self._turns = [turn for turn in self._turns if turn[-1] is not client]
        heapq.heapify(self._turns)
        self._held.append(client)

    def release(self) -> None:
        while self._held:
            client = self._held.pop()
            client.has_turn = False
            self._give_turn(client)

    def begin(self, sequence: Sequence) -> None:
        """Count a sequence that begins to run."""
        client = sequence.client
        turn = sequence.turn
        client.num_running += 1
        if turn.num_running:
            client.num_spare += 1
        turn.num_running += 1

    def leave(self, sequence: Sequence) -> None:
        """Count a sequence that stops running."""
        client = sequence.client
        turn = sequence.turn
        client.num_running -= 1
        turn.num_running -= 1
        if turn.num_running:
            client.num_spare -= 1
        if turn.num_waiting:
            self._list(client, turn)

    def served(self, sequence: Sequence, num_tokens: int) -> None:
        """Advance the client's clock by prompt tokens that were computed or no longer need to be."""
        num_tokens = min(num_tokens, sequence.num_due)
        if num_tokens:
            sequence.num_due -= num_tokens
            sequence.client.shares.serve(num_tokens)

    def charge_prompt(self, chunk: Chunk) -> None:
        """Count the prompt tokens of a chunk as service, unless they were computed before."""
        sequence = chunk.sequence
        if sequence.num_due:
            self.served(sequence, sequence.num_due if chunk.max_draws else chunk.num_tokens)
        end = min(chunk.known_end, sequence.prompt_len)
        if end == sequence.prompt_len - 1:
            end += 1  # The last prompt token will be computed like a decode, so charge for it now.
        first = max(chunk.start, sequence.num_charged)
        if end > first:
            sequence.client.service += (end - first) / sequence.client.share
            sequence.num_charged = end

    def charge_draws(self, step: Step) -> None:
        """Count one token as service for each chunk that draws in this step. Further tokens count once they are
        drawn."""
        if len(self._clients) > 1:  # With a single client, nothing depends on its counter.
            for chunk in step.chunks:
                if chunk.max_draws:
                    client = chunk.sequence.client
                    client.service += GENERATED_WEIGHT / client.share

    def charge_further(self, sequence: Sequence, number: int) -> None:
        """Count the tokens after the first one of a step as service. They come from a draft, or a grammar forces
        them."""
        if len(self._clients) > 1:
            sequence.client.service += GENERATED_WEIGHT * number / sequence.client.share

    def _give_turn(self, client: Client) -> None:
        if not client.has_turn and client.num_waiting:
            client.has_turn = True
            heapq.heappush(self._turns, (client.service, client.num_running > 0, next(self._numbers), client))

    def _list(self, client: Client, turn: RequestTurn) -> None:
        """Put a request into its client's order, unless it is already listed at least as early."""
        while turn.waiting[0][1].place is not Place.WAITING:
            heapq.heappop(turn.waiting)
        if turn.listed is None or turn.place < turn.listed:
            turn.listed = turn.place
            heapq.heappush(client.turns, (turn.listed, next(self._numbers), turn))

    def _floor(self) -> float:
        """Return the lowest service of clients that need prompt tokens, or else that of the last client that waited."""
        services = [one.client.service for one in self._running if one.num_uncomputed > 1]
        if (client := self.next_client()) is not None:
            services.append(client.service)
        return min(services, default=self._last.service)

    def _forget(self) -> None:
        floor = self._floor()
        remaining = [client for client in self._clients.values() if client.is_present or client is self._last]
        ahead = [c for c in self._clients.values() if not c.is_present and c is not self._last and c.service > floor]
        remaining += heapq.nlargest(MOST_ABSENT, ahead, key=_service)
        self._clients = {client.name: client for client in remaining}
        self._most_clients = 2 * max(MOST_ABSENT, len(remaining))

    def check_integrity(self, running: list[Sequence]) -> None:
        """Raise AssertionError if the counts or the turns are wrong."""
        clients = list(self._clients.values())
        for client in clients:
            requests = {id(turn): turn for _, _, turn in client.turns}.values()
            waiting = [one for turn in requests for _, one in turn.waiting if one.place is Place.WAITING]
            if len(waiting) != client.num_waiting or any(sequence.client is not client for sequence in waiting):
                raise AssertionError(f"the number of waiting sequences of client {client.name!r} is wrong")
            if sum(sequence.client is client for sequence in running) != client.num_running:
                raise AssertionError(f"the number of running sequences of client {client.name!r} is wrong")
            begun = {id(sequence.turn) for sequence in running if sequence.client is client}
            if client.num_spare != client.num_running - len(begun):
                raise AssertionError(f"the number of spare sequences of client {client.name!r} is wrong")
            if any(turn.num_waiting and (turn.listed is None or turn.listed > turn.place) for turn in requests):
                raise AssertionError(f"a request of client {client.name!r} waits behind its turn")
        if sum(client.num_waiting for client in clients) != self._num_waiting:
            raise AssertionError("the number of waiting sequences is wrong")
        if not {id(sequence.client) for sequence in running} <= {id(client) for client in clients}:
            raise AssertionError("a client that runs was forgotten")
        if any(service > client.service for service, *_, client in self._turns):
            raise AssertionError("a client has lost service")
        turns = [client for *_, client in self._turns]
        if len(set(map(id, turns))) != len(turns) or not all(client.has_turn for client in turns):
            raise AssertionError("a client has two turns at once")
        if any(client.num_waiting and not client.has_turn for client in clients):
            raise AssertionError("a client that waits never gets its turn")
        if len(clients) > self._most_clients:
            raise AssertionError("too many clients are remembered")
