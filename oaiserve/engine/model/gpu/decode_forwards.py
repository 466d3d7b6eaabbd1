"""Captures the forward of decode steps, with inputs at fixed addresses; `graphs` writes these, and draws.

A step in which every sequence decodes one token is the same work each time. So it is captured for some numbers of rows,
and replayed with other inputs. Padding makes up for missing rows, and writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from oaiserve.engine.model.batch import ALIGNMENT, Batch
from oaiserve.engine.model.gpu.block_tables import BlockTables
from oaiserve.engine.model.padded_head import aligned
from oaiserve.engine.model.sampling.draw_rows import GREEDY
from oaiserve.engine.model.spec import ModelSpec

Run = Callable[[], object]
Capture = Callable[[Run], Run]  # runs its argument, and returns a function that launches the same work again

# The inputs of a padded row: its token id, the place to take the id from, position, slot, seq_len, row in the block
# tables, seed of its noise.
INPUT_PADDING = (0, 0, 0, -1, 0, 0, GREEDY.seed)
PARAMETER_PADDING = GREEDY[:-1]  # all but the seed


class DecodeForwards:
    """The captured forwards of decode steps, for `sizes` rows in ascending order.

    `forward` is the one of an executor whose attention writes nothing for padded rows, and reads `tables`. The
    constructor raises the errors of `capture`.
    """

    @torch.inference_mode()
    def __init__(
        self,
        forward: Callable[[Batch], torch.Tensor],
        capture: Capture,
        spec: ModelSpec,
        tables: BlockTables,
        *,
        sizes: list[int],
        max_model_len: int,
    ) -> None:
        self.sizes, self.tables = sizes, tables
        self._forward = forward
        self._max_model_len = max_model_len
        most, device = sizes[-1], spec.device
        # One tensor has the draws of the last step, ids and whether logits were finite, followed by all inputs of rows
        # from the host. So a single look-up can take ids from either part.
        self.first_input = 2 * aligned_size(most)
        num_inputs = len(INPUT_PADDING) * aligned_size(most)
        num_parameters = len(PARAMETER_PADDING) * aligned_size(most)  # two of these fit into one int64
        self.words = torch.zeros(self.first_input + num_inputs + num_parameters // 2, dtype=torch.int64, device=device)
        # Rows that begin at aligned addresses, see `padded_head`.
        logits = torch.zeros(most, aligned(spec.vocab_size), dtype=spec.dtype, device=device)
        self.logits = logits[:, : spec.vocab_size]
        self._row_numbers = torch.arange(most + 1, device=device)
        # The largest is captured first: all others fit into the memory that it has allocated.
        self._runs = {size: self._capture(size, capture) for size in reversed(sizes)}

    def replay(self, size: int) -> None:
        self._runs[size]()

    def pad(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Make all rows padding, and return inputs int64 [7, size] and parameters float32 [4, size]."""
        width = aligned_size(size)
        num_inputs, num_parameters = len(INPUT_PADDING) * width, len(PARAMETER_PADDING) * width
        words = self.words[self.first_input :]
        inputs = words[:num_inputs].view(-1, width)[:, :size]
        in_parameters = words[num_inputs : num_inputs + num_parameters // 2]
        parameters = in_parameters.view(torch.float32).view(-1, width)[:, :size]
        inputs.copy_(torch.tensor(INPUT_PADDING)[:, None])
        parameters.copy_(torch.tensor(PARAMETER_PADDING)[:, None])
        return inputs, parameters

    def _capture(self, size: int, capture: Capture) -> Run:
        inputs, _ = self.pad(size)

        def forward() -> None:
            self.logits[:size].copy_(self._forward(self._batch(inputs)))

        return capture(forward)

    def _batch(self, inputs: torch.Tensor) -> Batch:
        """Return the batch that reads `inputs` int64 [7, R] in place. Its lengths on the host are the longest."""
        _, sources, positions, slots, seq_lens, table_rows, _ = inputs
        num_rows = len(sources)
        return Batch(
            input_ids=self.words.index_select(0, sources),
            positions=positions,
            slots=slots,
            block_tables=self.tables.on_device,
            table_rows=table_rows,
            query_start=self._row_numbers[: num_rows + 1],
            seq_lens=seq_lens,
            logits_rows=self._row_numbers[:num_rows],
            num_decodes=num_rows,
            query_lens=[1] * num_rows,
            context_lens=[self._max_model_len] * num_rows,
        )


def aligned_size(size: int) -> int:
    """Return the size rounded up so that each row of inputs begins at an aligned address."""
    return -(-size // ALIGNMENT) * ALIGNMENT
