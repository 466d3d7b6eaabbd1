"""Adds the operations of mixtures of experts to native code's list, from their descriptions."""

from __future__ import annotations

from typing import NamedTuple

from oaiserve.engine.decoder.blocks import Blocks
from oaiserve.engine.decoder.description import (
    ClampedGate,
    Expert,
    Experts,
    Matrix,
    MixtureNorms,
    Norm,
    NotKnown,
    Router,
    matrices_in,
)
from oaiserve.engine.executors.native.library import (
    MOST_EXPERTS,
    NONE,
    ExpertWeights,
    Gating,
    Normalize,
    Routing,
    WeightRange,
    place_of,
)
from oaiserve.engine.executors.native.operation_list import OperationList, whole_lanes


class Buffers(NamedTuple):
    """The indices of the buffers that all layers of a decoder share."""

    width: int  # width of the hidden state
    hidden: int
    normed: int  # the hidden state after a norm
    branch: int  # what a layer adds to the hidden state
    mlp: int  # the input of an MLP's last matrix


class ExpertOperations:
    """Adds the operations of mixtures of experts to a decoder's list."""

    def __init__(self, operations: OperationList, mixtures: list[Experts], buffers: Buffers) -> None:
        self._operations = operations
        self._buffers = buffers
        # Assignments of tokens to experts, by the number of experts and top_k.
        self._assignments: dict[tuple[int, int], int] = {}
        if not mixtures:
            return
        width = buffers.width
        rows_each = max(mixture.router.top_k for mixture in mixtures)
        inner = max(len(mixture.experts[0].up.weight) for mixture in mixtures)
        self._scores = operations.floats(whole_lanes(max(len(mixture.experts) for mixture in mixtures)))
        self._rows = operations.elements(width, rows_each)
        self._inner = operations.elements(inner, rows_each)
        self._out = operations.floats(width, rows_each)
        if any(mixture.norms is not None for mixture in mixtures):
            self._both = operations.floats(buffers.width)
        if any(isinstance(matrix.weight, Blocks) for matrix in matrices_in(mixtures)):
            self._groups = operations.groups(max(width, inner), rows_each)

    def add(self, mixture: Experts, out_norm: Norm | None, scale: float, factor: float) -> None:
        """Add the operations of a mixture, whose output is normed and added to the hidden state.

        If the parts of a mixture have their own norms, the caller has normed the hidden state for the shared MLP, and
        it is multiplied by `factor` in the end.
        """
        if mixture.scales_inputs:
            raise NotKnown("the weights of its experts multiply what these read")
        if mixture.norms is None:
            self._add_mixture(mixture, out_norm, scale)
        else:
            self._add_normed_mixture(mixture, mixture.norms, out_norm, scale, factor)

    def _add_mixture(self, mixture: Experts, out_norm: Norm | None, scale: float) -> None:
        operations = self._operations
        width, hidden, normed, branch, mlp = self._buffers
        assignment = self._route(mixture.router)
        adds = out_norm is None
        out, factor = (hidden, scale) if adds else (branch, 1.0)
        self._compute(mixture, assignment)
        self._combine(mixture, out, assignment, adds=adds, scale=factor)
        if mixture.shared is not None:
            operations.project_inner(mixture.shared, normed, mlp)
            if mixture.shared_gate is not None:
                inner = len(mixture.shared.up.weight)
                site = operations.site(normed, [mixture.shared_gate])
                gate = operations.weights.expanded(mixture.shared_gate.weight)[0].float()
                operations.add("gate and up", "scale_rows", normed, mlp, gate, site, width, inner)
            operations.project("down", mlp, out, [mixture.shared.down], adds=True, scale=factor)
        if out_norm is not None:
            operations.add_norm(branch, hidden, out_norm, scale)

    def _add_normed_mixture(
        self, mixture: Experts, norms: MixtureNorms, out_norm: Norm | None, scale: float, factor: float
    ) -> None:
        operations = self._operations
        _, hidden, normed, branch, mlp = self._buffers
        if mixture.shared is None or out_norm is None:
            raise NotKnown("its experts have norms, but no MLP next to them, or no norm after both")
        operations.project_inner(mixture.shared, normed, mlp)
        operations.project("down", mlp, branch, [mixture.shared.down])
        operations.add("norm", "norm_floats", branch, self._both, Normalize.of(norms.shared_out), False)
        self._norm(norms.router)
        assignment = self._route(mixture.router)
        self._norm(norms.experts)
        self._compute(mixture, assignment)
        self._combine(mixture, branch, assignment, adds=False, scale=1.0)
        operations.add_norm(branch, self._both, norms.experts_out, 1.0)
        operations.add_norm(self._both, hidden, out_norm, scale, factor)

    def _norm(self, norm: Norm) -> None:
        operations = self._operations
        buffers = self._buffers
        operations.add("norm", "norm", buffers.hidden, buffers.normed, Normalize.of(norm), False)

    def _route(self, router: Router) -> int:
        """Add the operations that assign tokens to experts, and return the assignment."""
        operations = self._operations
        library = self._operations.library
        number = len(router.weight)
        if number > MOST_EXPERTS:
            raise NotKnown(f"its layers have {number} experts, more than {MOST_EXPERTS}")
        routing = Routing.of(router)
        if (number, router.top_k) not in self._assignments:
            assignment = library.add_assignment(operations.handle, number, router.top_k)
            self._assignments[number, router.top_k] = assignment
        assignment = self._assignments[number, router.top_k]
        weight = router.weight.to(library.dtype).contiguous()
        bias = place_of(router.logits_bias)
        index = library.add_router(operations.handle, weight.data_ptr(), number, self._buffers.width, bias)
        normed = self._buffers.normed
        if router.module:
            site = operations.site(normed, [router.matrix])
        else:
            site = NONE
        operations.add("route", "route", normed, self._scores, index, site, routing, assignment)
        operations.add("route", "sort_rows", assignment)
        return assignment

    def _compute(self, mixture: Experts, assignment: int) -> None:
        """Add the operations that compute each expert's rows, from the normed tokens."""
        operations = self._operations
        weights = self._operations.weights
        x = self._buffers.normed
        width = self._buffers.width
        ups = [weights.pack_gated(_gate_of(expert), expert.up) for expert in mixture.experts]
        if ups[0] in weights.widths:  # a token is quantized once for all its experts
            x = operations.input_of(x, ups[0], len(ups), with_rests=True)
            rows = self._groups
            read_by = WeightRange(ups[0], len(ups))
            operations.add("route", "gather_groups", x, rows, width, read_by, assignment)
        else:
            rows = self._rows
            operations.add("route", "gather_rows", x, rows, width, assignment)
        arguments = (rows, self._inner, ExpertWeights(ups[0], assignment))
        way = mixture.activation
        if isinstance(way, ClampedGate):
            gating = Gating("none", way.alpha, way.limit)
        else:
            gating = Gating(way)
        operations.add("gate and up", "expert_gate", *arguments, gating)
        downs = [weights.pack([expert.down]) for expert in mixture.experts]
        inner = self._inner
        if downs[0] in weights.widths:
            k = weights.widths[downs[0]]
            top_k = mixture.router.top_k
            read_by = WeightRange(downs[0], len(downs))
            operations.add("quantize", "quantize", inner, self._groups, k, read_by, False, False, None, top_k)
            inner = self._groups
        operations.add("down", "expert_project", inner, self._out, ExpertWeights(downs[0], assignment))

    def _combine(self, mixture: Experts, out: int, assignment: int, *, adds: bool, scale: float) -> None:
        """Add the operation that sums a token's experts, and writes the sum to `out` or adds it."""
        arguments = (self._out, out, self._buffers.width, assignment, adds, scale)
        self._operations.add("down", "combine", *arguments)


def _gate_of(expert: Expert) -> Matrix:
    if expert.gate is None:
        raise NotKnown("its experts have no gates")
    return expert.gate
