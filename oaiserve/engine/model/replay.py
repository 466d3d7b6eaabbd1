"""The protocols of what a device may keep between steps, so that a step needs few launches and no copies."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Sequenced
from typing import Any, Protocol

import torch

from oaiserve.engine.model.adapters import Adapter
from oaiserve.engine.model.sampling.sampled_ids import DeviceEdits
from oaiserve.engine.model.sampling.sampler import Sampled
from oaiserve.engine.model.transfer import ReadBack
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Chunk, Masks, Step


class PendingDraws(Protocol):
    """The drawn tokens of some rows, while the device is still computing them."""

    token_ids: torch.Tensor  # int64, on the device

    @property
    def read_back(self) -> ReadBack:
        """The pending copy of the results to the host."""

    def wait(self) -> Sampled:
        """Return the results once they are on the host."""


class Replays(Protocol):
    """Runs steps that were recorded earlier, in one launch each."""

    def find(self, step: Step, adapters: Sequenced[Adapter | None] = ()) -> Any | None:
        """Return the recorded size for a step, or None if it cannot be replayed. `adapters` has the adapter of each
        chunk; it is empty if no chunk has one."""

    def launch(
        self,
        size: Any,
        step: Step,
        draws: list[Chunk],
        table_rows: list[int],
        drawn_ids: torch.Tensor | None,
        drawn_rows: Mapping[Sequence, int],
        began: torch.cuda.Event | None = None,
        adapters: Sequenced[Adapter | None] = (),
    ) -> tuple[torch.Tensor, PendingDraws | None]:
        """Launch a step without waiting, and return its logits [R, vocab], which the next launch overwrites.

        `size` is the one that `find` returned, and `draws` are the chunks, each cut after a token that a draw follows.
        If no draw needs edits of logits or log-probabilities, the results of the draws are returned, too. `table_rows`
        are the step's rows of the tables. `drawn_ids` int64 [R] are the ids that the previous step drew. For
        `drawn_rows` see `build_batch`. `began` is recorded when the device has the step's inputs.
        """


class SequenceTables(Protocol):
    """The block tables of sequences, on the device."""

    on_device: torch.Tensor

    def update(self, step: Step) -> list[int]:
        """Bring the tables of a step's sequences up to date, and return their rows."""


class TokenCounts(Protocol):
    """How often each token occurs in each sequence, counted on the device."""

    def edits_of(self, draws: list[Chunk], masks: Masks | None) -> DeviceEdits:
        """Return the edits for draws that are launched next. Each draw has a row of its own."""
