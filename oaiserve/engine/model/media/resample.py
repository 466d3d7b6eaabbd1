"""Changes the rate of sounds: a new sample is a sum of the old ones around it, with the weights of a windowed sinc."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from math import ceil, gcd

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Samples = NDArray[np.float32]
ZEROS = 24  # zeros of the sinc on each side
BETA = 9.0  # shape of the Kaiser window, which damps frequencies over the new rate by some 90 dB
ROLLOFF = 0.94  # share of the highest frequency of the lower rate; sound is damped from there on


def resampled(pieces: Iterable[Samples], rate: int, new_rate: int) -> Iterator[Samples]:
    """Yield the pieces of a sound of one `rate` at another one, so that only the result need be in memory."""
    if rate == new_rate:
        yield from pieces
        return
    step = rate // gcd(rate, new_rate)
    phases = new_rate // gcd(rate, new_rate)
    cutoff = ROLLOFF * min(1.0, new_rate / rate)
    reach = ceil(ZEROS / cutoff)
    # New samples lie at one of `phases` places between two old ones.
    away = np.arange(-reach, reach + 1) - np.arange(phases)[:, None] / phases
    window = np.i0(BETA * np.sqrt(np.clip(1 - (away * cutoff / ZEROS) ** 2, 0, None))) / np.i0(BETA)
    weights = (cutoff * np.sinc(cutoff * away) * window).astype(np.float32)
    held = np.zeros(reach, np.float32)
    first = -reach  # index of the first old sample in `held`
    done = 0  # new samples so far
    for piece in chain(pieces, [np.zeros(reach, np.float32)]):
        held = np.concatenate((held, piece))
        end = -((first + len(held) - reach) * phases // -step)  # end of the new samples that have all their neighbours
        if end > done:
            at = np.arange(done, end, dtype=np.int64) * step
            around = sliding_window_view(held, 2 * reach + 1)[at // phases - reach - first]
            yield np.einsum("ij,ij->i", around, weights[at % phases])
            done = end
            held = held[done * step // phases - reach - first :]
            first = done * step // phases - reach
