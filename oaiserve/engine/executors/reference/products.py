"""Products with the matrices of a decoder, including the additions of the step's adapters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from oaiserve.engine.decoder.description import HeadRows, Matrix
from oaiserve.engine.model.adapters import AdapterPart
from oaiserve.engine.model.batch import Batch, rows_of
from oaiserve.engine.model.transfer import on_device


def product(x: Tensor, matrix: Matrix) -> Tensor:
    """Return the product float32 [..., n] of `x` [..., k], computed in the dtype of the weights."""
    assert isinstance(matrix.weight, Tensor)
    out = torch.nn.functional.linear(x.to(matrix.weight.dtype), matrix.weight).float()
    if matrix.bias is None:
        return out
    return out + matrix.bias.float()


class Products:
    def __init__(self, batch: Batch) -> None:
        if batch.adapters:
            of_adapters = rows_of(batch.adapters, batch.query_lens)
        else:
            of_adapters = {}
        device = batch.input_ids.device
        self._rows = [(adapter, on_device(rows, device)) for adapter, rows in of_adapters.items()]

    def __call__(self, x: Tensor, matrix: Matrix) -> Tensor:
        """Return the product float32 [T, n] of `x` [T, k]."""
        out = product(x, matrix)
        for rows, part in self.parts_of(matrix.module):
            own = replace(part, b=matrix.rows_of(part.b))
            out.index_add_(0, rows, own.added(x[rows].to(part.a.dtype)).float())
        return out

    def of_heads(self, x: Tensor, rows: HeadRows) -> Tensor:
        """Return the products float32 [T, heads, n] of each head's numbers [T, heads, k] with that head's rows."""
        assert isinstance(rows.matrix.weight, Tensor)
        chosen = slice(rows.first, rows.first + rows.count)
        weight = rows.matrix.weight.unflatten(0, (rows.heads, -1))[:, chosen]
        weight = weight.mT if rows.is_transposed else weight
        out = torch.einsum("thk,hnk->thn", x.to(weight.dtype), weight).float()
        for adapted, part in self.parts_of(rows.module):
            own_x = x[adapted].to(part.a.dtype)
            b = rows.matrix.rows_of(part.b).unflatten(0, (rows.heads, -1))[:, chosen]
            if rows.is_transposed:
                added = torch.einsum("thn,hnr->thr", own_x, b) @ part.a
            else:
                added = torch.einsum("thr,hnr->thn", own_x @ part.a.T, b)
            out.index_add_(0, adapted, added.float() * part.scale)
        return out

    def add_to(self, module: str, x: Tensor, out: Tensor) -> None:
        """Add the adapters' products to the products `out` [T, n] of a whole module, whose input is `x` [T, k]."""
        for rows, part in self.parts_of(module):
            out.index_add_(0, rows, part.added(x[rows]))

    def parts_of(self, module: str) -> Iterator[tuple[Tensor, AdapterPart]]:
        """Yield each adapter's part for this module, with the rows int64 of the tokens that use the adapter."""
        for adapter, rows in self._rows:
            if (part := adapter.parts.get(module)) is not None:
                yield rows, part
