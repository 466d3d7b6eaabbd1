"""The recurrence of layers with states, computed in chunks of tokens by matrix products in plain torch.

A kernel that goes token by token leaves most of a device idle. Within a chunk, all tokens are computed at once (Yang et
al. 2024, arXiv:2412.06464; Dao and Gu 2024, arXiv:2405.21060). Only the states between chunks depend on each other.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from oaiserve.engine.executors.reference.mixers import Recurrence

CHUNK = 64  # tokens
CHUNKED_FROM = 128  # tokens of a prompt; below this, launching the chunks takes longer than going token by token
LEAST_DECAY = 1e-30  # smaller decays count as this one, which leaves practically nothing of a state


def in_chunks(walk: Recurrence) -> Recurrence:
    """Return a recurrence that computes long prompts in chunks, and short ones by `walk`."""

    def recurrence(
        state: Tensor, decay: Tensor, key: Tensor, value: Tensor, query: Tensor, rate: Tensor | None
    ) -> Tensor:
        if value.shape[1] < CHUNKED_FROM:
            return walk(state, decay, key, value, query, rate)
        return chunked(state, decay, key, value, query, rate)

    return recurrence


def chunked(state: Tensor, decay: Tensor, key: Tensor, value: Tensor, query: Tensor, rate: Tensor | None) -> Tensor:
    """Compute `executors.reference.mixers.recurrence`, with one decay for a whole state.

    With the product d_t of all decays of a chunk up to its token t, and its first state S, the state after t is

        d_t S + sum of d_t / d_i key_i added_i over i <= t

    Tokens with a rate subtract what the state has at their key. So what they add solves a triangular system.
    """
    num_tokens, heads, value_dim = value.shape[1:]
    missing = -num_tokens % CHUNK
    of_key_head = heads // key.shape[2]

    def chunks(part: Tensor) -> Tensor:
        """Return numbers [sequences, tokens, heads, dim] as [sequences, heads, chunks, CHUNK, dim]. Tokens of padding
        are zeros: they neither decay nor change a state."""
        padded: Tensor = pad(part, (0, 0, 0, 0, 0, missing)).unflatten(1, (-1, CHUNK))
        return padded.permute(0, 3, 1, 2, 4)

    def of_heads(part: Tensor) -> Tensor:
        return part.repeat_interleave(of_key_head, dim=1)

    # Sums of logarithms over a chunk can be large, and their differences small.
    decays = chunks(decay.double().clamp(min=LEAST_DECAY).log()[..., None]).squeeze(-1).cumsum(-1)
    is_later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=decay.device).triu(1)
    between = (decays[..., :, None] - decays[..., None, :]).masked_fill(is_later, -torch.inf).exp().float()
    from_start = decays.exp().float()[..., None]
    to_end = (decays[..., -1:] - decays).exp().float()[..., None]
    whole = from_start[..., -1:, :]

    keys = chunks(key)
    queries = chunks(query)
    weights = of_heads(queries @ keys.mT) * between
    added = chunks(value)
    read: Tensor | None = None
    if rate is not None:
        rates = chunks(rate[..., None])
        system = of_heads(keys @ keys.mT) * between * rates
        known = torch.cat([added * rates, of_heads(keys) * from_start * rates], dim=-1)
        solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
        added = solved[..., :value_dim]
        read = solved[..., value_dim:]
    writes = (of_heads(keys) * to_end).mT

    # From here on, the heads of all sequences are one dimension, as `baddbmm` expects them.
    queries, weights, added, writes, whole = (
        part.flatten(0, 1) for part in (of_heads(queries) * from_start, weights, added, writes, whole)
    )
    current = state.float().flatten(0, 1)
    states = []
    all_added = []
    for place in range(added.shape[1]):
        states.append(current)
        of_chunk = added[:, place]
        if read is not None:
            of_chunk = torch.baddbmm(of_chunk, read.flatten(0, 1)[:, place], current, alpha=-1)
        current = torch.baddbmm(current * whole[:, place], writes[:, place], of_chunk)
        all_added.append(of_chunk)
    out = queries @ torch.stack(states, dim=1) + weights @ torch.stack(all_added, dim=1)
    state.copy_(current.view(state.shape))  # The first one of `states` may be this one.
    of_heads_apart: Tensor = out.unflatten(0, state.shape[:2])
    return of_heads_apart.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :num_tokens]
