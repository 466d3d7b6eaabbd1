"""What kernels or graphs compute differently from plain torch is found, whatever it is. The device is a double."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oaiserve.checkpoints.source import find_model
from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.description import Experts
from oaiserve.engine.executors.reference.products import Products
from oaiserve.engine.model.attention import Scoring
from oaiserve.engine.model.batch import Batch
from oaiserve.engine.model.sampling.sampled_ids import DeviceEdits, SampledIds
from oaiserve.engine.sequences.draw_columns import DrawRow
from oaiserve.engine.start.described import Described, describe_model
from oaiserve.plugins.cuda.executor.cuda_capture import Run
from oaiserve.plugins.cuda.executor.device_matrices import PackedMatrix, expanded_product
from oaiserve.plugins.cuda.executor.kernels import PlainAttention
from oaiserve.plugins.cuda.start import comparison
from oaiserve.plugins.cuda.start.comparison import difference_from_plain
from oaiserve.plugins.cuda.start.on_gpu import graphs_of
from oaiserve.plugins.cuda.start.probe import first_layers
from tests.models.decoders import FAMILIES, LLAMA_OF_ONE_LAYER
from tests.models.described import described
from tests.models.in_blocks import written
from tests.models.packed import Packing
from tests.models.pinned import pinned_model
from tests.models.small_configs import config_of
from tests.plugins.cuda.executor.step_runs import Model, PlainSampler, model_of, run_again
from tests.plugins.cuda.start.ready import BLOCK_SIZE, ready_model


@pytest.fixture(scope="module")
def llama() -> Model:
    return model_of(LLAMA_OF_ONE_LAYER)


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "LENGTHS", (9, 5, 17, 12))
    monkeypatch.setattr(comparison, "ROWS", (20,))


@pytest.mark.parametrize("kind", ["attention", "states", pytest.param("adapters", marks=pytest.mark.kernels)])
@pytest.mark.parametrize("is_right", [True, False])
def test_graphs_that_compute_something_else_are_found(llama: Model, kind: str, is_right: bool) -> None:
    if kind == "adapters":
        pytest.importorskip("triton", reason="Triton has no wheels for this system")
    own = ready_model(model_of(config_of("falcon_h1")) if kind == "states" else llama, has_adapters=kind == "adapters")
    graphs = graphs_of(own, run_again if is_right else lambda run: lambda: None)
    problem = difference_from_plain(own, graphs)
    if is_right:
        assert problem is None
    else:
        assert str(problem).startswith("the outputs would differ by 100.0% (allowed: 0.1%) of a decode in graphs")


@pytest.mark.parametrize("of", ["a decode", "4 prompts", "decodes beside a prompt"])
def test_graphs_of_each_kind_of_step_are_compared(llama: Model, of: str) -> None:
    own = ready_model(llama)
    executor: Any = own.executor
    forward = executor.forward

    def wrong(batch: Any) -> torch.Tensor:
        kinds = {(True, False): "a decode", (False, True): "4 prompts", (True, True): "decodes beside a prompt"}
        has_decodes = batch.num_decodes > 0 if batch.decode_slots is None else bool((batch.decode_slots >= 0).any())
        kind = kinds[has_decodes, batch.num_decodes < len(batch.query_lens)]
        return forward(batch) * (1.1 if is_captured and kind == of else 1.0)

    is_captured = True
    executor.forward = wrong

    def capture(run: Run) -> Run:
        def replay() -> None:
            nonlocal is_captured
            is_captured = True
            run()
            is_captured = False

        replay()
        return replay

    assert f" of {of} in graphs" in str(difference_from_plain(own, graphs_of(own, capture)))


def test_graphs_that_draw_with_other_parameters_are_found(llama: Model) -> None:
    class OtherSeeds(PlainSampler):
        def draw(
            self,
            logits: torch.Tensor,
            parameters: torch.Tensor,
            seeds: torch.Tensor,
            out: SampledIds,
            edits: Any = None,
        ) -> None:
            super().draw(logits, parameters, seeds + 1, out, edits)

    own = ready_model(llama, sampling=OtherSeeds())
    expected = "other tokens would be drawn from the outputs of a decode in graphs"
    assert difference_from_plain(own, graphs_of(own, run_again)) == expected


@pytest.mark.parametrize("has_graphs", [True, False])
@pytest.mark.parametrize("ignored", [[0], [1, 2]])
def test_draws_that_ignore_penalties_are_found(llama: Model, ignored: list[int], has_graphs: bool) -> None:
    class WithoutPenalties(PlainSampler):
        def sample_ids(self, logits: torch.Tensor, rows: list[DrawRow], edits: Any = None) -> SampledIds:
            return super().sample_ids(logits, rows, edits if has_graphs else without(edits))

        def draw(self, *given: Any) -> None:
            super().draw(*given[:-1], without(given[-1]))

    def without(edits: DeviceEdits) -> DeviceEdits:
        factors = edits.penalties.factors.clone()
        factors[:, ignored] = torch.tensor([1.0, 0.0, 0.0])[ignored]
        return edits._replace(penalties=edits.penalties._replace(factors=factors))

    own = ready_model(llama, sampling=WithoutPenalties())
    problem = difference_from_plain(own, graphs_of(own, run_again) if has_graphs else None)
    assert problem == f"other tokens would be drawn from the outputs of 4 decodes{' in graphs' * has_graphs}"


@pytest.mark.parametrize("family", ["gemma2", "gpt2"])
def test_rounding_is_no_difference(family: str) -> None:
    def rounds(batch: Batch) -> Any:
        plain = PlainAttention(batch)
        return lambda *given: plain(*given) * (1 + 1e-5)

    assert difference_from_plain(ready_model(model_of(FAMILIES[family]), attention=rounds), None) is None


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_rounding_cannot_change_the_experts_that_a_probe_chooses(name: str) -> None:
    """In bfloat16, another order of sums changed choices, and these changed the outputs by up to a third."""
    whole = described(pinned_model(name))
    few = first_layers(Described(whole, whole.decoder, None))
    routers = [layer.mlp.router for layer in few.decoder.layers if isinstance(layer.mlp, Experts)]
    assert routers
    for router in routers:
        chosen, weights = router.choose(torch.randn(50, len(router.weight)))
        assert len(chosen.unique(dim=0)) == 1
        assert router.top_k == 1 or len(weights.unique(dim=0)) == 50


@pytest.mark.kernels
def test_triton_kernels_differ_by_rounding_alone(llama: Model) -> None:
    pytest.importorskip("triton", reason="Triton has no wheels for this system")
    from oaiserve.plugins.cuda.executor.kernels import triton_kernels

    kernels = triton_kernels()._asdict()
    del kernels["adapters"]
    own = ready_model(llama, has_adapters=True, **kernels)
    assert difference_from_plain(own, None) is None


def test_no_step_writes_a_key_that_it_reads_as_another_one(llama: Model) -> None:
    """Which of both a program reads would be chance, and no difference from plain torch would mean anything."""
    own = ready_model(llama)
    for name, _, step in comparison._steps(own, with_adapters=False):
        read = Counter[int]()
        written = set[int]()
        for chunk in step.chunks:
            blocks = chunk.sequence.blocks
            slots = [blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(chunk.end)]
            read.update(slots)
            written.update(slots[chunk.start :])
        assert all(read[slot] == 1 for slot in written), name


def without_the_last_key(batch: Batch) -> PlainAttention:
    """Return attention in which decodes do not see their own token."""
    lengths = batch.seq_lens.clone()
    lengths[: batch.num_decodes] -= 1
    return PlainAttention(replace(batch, seq_lens=lengths))


def without_writing(batch: Batch) -> Any:
    """Return attention that leaves the cache as it was."""

    def attend(query: Any, key: Any, value: Any, cache: Any, scoring: Scoring) -> torch.Tensor:
        copies = type(cache)(cache.keys.clone(), cache.values.clone())
        return PlainAttention(batch)(query, key, value, copies, scoring)

    return attend


@pytest.mark.parametrize("attention", [without_the_last_key, without_writing])
def test_attention_that_computes_something_else_is_found(llama: Model, attention: Any) -> None:
    own = ready_model(llama, attention=attention)
    assert str(difference_from_plain(own, None)).startswith("the outputs would differ by ")


def test_products_with_packed_weights_that_are_wrong_are_found(tmp_path: Path) -> None:
    written(tmp_path, Packing("awq"))
    options = EngineOptions(dtype="float32", max_model_len=128)
    found = describe_model(find_model(tmp_path), options, device=torch.device("meta"))
    model = Model(replace(found.spec, device=torch.device("cpu")), found.decoder)

    def doubled(x: torch.Tensor, matrix: PackedMatrix, bias: torch.Tensor | None, *_: Any) -> torch.Tensor:
        return 2 * expanded_product(x, matrix, bias)

    assert ready_model(model).weights.packed
    assert difference_from_plain(ready_model(model), None) is None
    assert difference_from_plain(ready_model(model, multiply=doubled), None) is not None


def test_draws_that_are_others_are_found(llama: Model) -> None:
    class NextIds(PlainSampler):
        def sample_ids(self, logits: torch.Tensor, rows: list[DrawRow], edits: Any = None) -> SampledIds:
            ids, are_finite = super().sample_ids(logits, rows, edits)
            return (ids + 1) % logits.shape[1], are_finite

    assert difference_from_plain(ready_model(llama), None) is None
    assert "other tokens would be drawn" in str(difference_from_plain(ready_model(llama, sampling=NextIds()), None))


def test_draws_that_do_not_notice_infinite_logits_are_found(llama: Model) -> None:
    class AllFinite(PlainSampler):
        def sample_ids(self, logits: torch.Tensor, rows: list[DrawRow], edits: Any = None) -> SampledIds:
            token_ids, are_finite = super().sample_ids(logits, rows, edits)
            return token_ids, torch.ones_like(are_finite)

    assert "not finite" in str(difference_from_plain(ready_model(llama, sampling=AllFinite()), None))


def test_adapters_that_are_wrong_are_found(llama: Model) -> None:
    pytest.importorskip("triton", reason="Triton has no wheels for this system")
    own = ready_model(llama, has_adapters=True)
    executor: Any = own.executor

    class OfTheFirstAlone:
        def __init__(self, batch: Batch) -> None:
            first = next(filter(None, batch.adapters))
            self.modules = first.parts.keys()
            of_first = [adapter if adapter is first else None for adapter in batch.adapters]
            self._products = Products(replace(batch, adapters=of_first))

        def __call__(self, module: str, x: torch.Tensor, out: torch.Tensor) -> None:
            self._products.add_to(module, x, out)

    executor.kernels.adapters.of_batch = OfTheFirstAlone
    assert " with adapters" in str(difference_from_plain(own, None))
