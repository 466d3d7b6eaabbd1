"""Long prompts by a library's attention: a double of torch's function, which needs a GPU, gets what it expects."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from oaiserve.engine.executors.cuda.executor import CudaWeights
from oaiserve.engine.model.attention import FP8, LayerCache, ScaledCache, Scoring, StepAttention
from oaiserve.engine.model.attention.long_prompts import LongPrompts
from oaiserve.engine.model.attention.reference import ReferenceAttention
from oaiserve.engine.model.attention.tiles import BatchTiles
from oaiserve.engine.model.batch import Batch
from oaiserve.engine.start.gpu.long_prompts import flash_attention, long_prompts_checked
from oaiserve.engine.start.gpu.trials import Trials
from oaiserve.engine.start.prepare import prepare
from tests.engine.model.attention_inputs import make_inputs, varlen
from tests.engine.model.cpu.small_models import described
from tests.models.decoders import LLAMA_OF_ONE_LAYER, random_model

LENGTHS = ((7, 1), (90, 1), (0, 5), (70, 40))  # (tokens in the cache, tokens of this step) of each sequence


def wrong(*given: Any, **more: Any) -> torch.Tensor:
    return varlen(*given, **more) * 1.5


def triton_attention(batch: Batch, long_prompts: LongPrompts | None = None) -> StepAttention:
    """Attend as Triton's backend does, but by the reference."""
    own, by_library = ReferenceAttention(batch), long_prompts and long_prompts.of(batch)

    def attend(query: Any, key: Any, value: Any, cache: LayerCache, scoring: Scoring) -> torch.Tensor:
        out = own(query, key, value, cache, scoring)
        if by_library:
            by_library(query, cache, out, scoring.scaling)
        return out

    return attend


@pytest.mark.kernels
@pytest.mark.parametrize("scales", [None, (0.5, 0.0625)])
def test_prompts_beside_decodes_get_what_the_reference_computes(scales: tuple[float, float] | None) -> None:
    pytest.importorskip("triton", reason="Triton has no wheels for this system")
    from oaiserve.engine.model.attention.triton import TritonAttention

    query, key, value, cache, batch = make_inputs(LENGTHS)
    cache = LayerCache(*(blocks.nan_to_num() for blocks in cache))
    if scales is not None:
        floats = (blocks.div(scale).to(FP8) for blocks, scale in zip(cache, scales, strict=True))
        cache = ScaledCache.of(LayerCache(*floats), scales)
    calls: list[int] = []

    def noting(*given: Any, **more: Any) -> torch.Tensor:
        calls.append(len(given[0]))
        return varlen(*given, **more)

    long_prompts = LongPrompts(noting, least_tokens=5, least_keys=5)
    for window, called in ((None, [5, 40]), (30, [])):  # a window is for Triton's kernels
        scoring = Scoring(0.25, window)
        want = ReferenceAttention(batch)(query, key, value, cache.copy(), scoring)
        got = TritonAttention(batch, long_prompts)(query, key, value, cache.copy(), scoring)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert calls == called
        calls.clear()


def test_only_steps_whose_prompts_are_all_long_are_for_the_library() -> None:
    batch = make_inputs(LENGTHS).batch
    assert LongPrompts(varlen, 5, 5).of(batch) is not None
    assert LongPrompts(varlen, 6, 5).of(batch) is None
    assert LongPrompts(varlen, 5, 6).of(batch) is None
    assert LongPrompts(varlen, 5, 5, most_keys=109).of(batch) is None
    assert LongPrompts(varlen, 1, 1).of(make_inputs(LENGTHS[:2]).batch) is None, "there are decodes alone"
    assert LongPrompts(varlen, 5, 5).of(replace(batch, tiles=BatchTiles(batch))) is None, "its prompts are captured"


@pytest.mark.parametrize(
    ("attend", "times", "reason", "warned"),
    [
        (varlen, (2.0, 1.0), "", False),
        (varlen, (1.0, 2.0), "it took 2 s, Triton's kernels 1 s", False),
        (wrong, (2.0, 1.0), "would differ", True),
    ],
)
def test_a_library_is_used_if_it_computes_the_same_and_faster(
    attend: Callable[..., torch.Tensor],
    times: tuple[float, ...],
    reason: str,
    warned: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    loaded = prepare(random_model(LLAMA_OF_ONE_LAYER))
    decoder = described(loaded)
    tables = replace(decoder.layers[0].attention.rotary, cosines=torch.ones(8192, 4), sines=torch.zeros(8192, 4))
    attention = replace(decoder.layers[0].attention, rotary=tables)
    decoder = replace(decoder, layers=[replace(decoder.layers[0], attention=attention)])
    weights = CudaWeights(decoder, dtype=torch.bfloat16, device=loaded.device)
    spec = replace(loaded, dtype=torch.bfloat16, max_model_len=8192)
    trials, left = Trials(), list(times)

    def seconds(call: Callable[[], torch.Tensor]) -> float:
        assert call().isfinite().all()
        return left.pop(0)

    with caplog.at_level(logging.WARNING):
        found = long_prompts_checked(spec, weights, triton_attention, 16, trials, lambda: attend, seconds)
    assert found == (None if reason else LongPrompts(attend))
    assert reason in trials.off["long_prompts"]
    assert [message.partition(":")[0] for message in caplog.messages] == ["Long prompts by FlashAttention"] * warned
    assert long_prompts_checked(replace(spec, max_model_len=8191), weights, triton_attention, 16, trials) is None


def test_torch_has_the_function() -> None:
    found = flash_attention()
    assert torch.nn.attention.current_flash_attention_impl() is None, "no package with it is installed"
    query, ends = torch.zeros(4, 2, 16), torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises((RuntimeError, NotImplementedError), match="CPU|CUDA|backend"):
        found(query, query[:, :1], query[:, :1], ends, ends, 4, 4, scale=1.0, window_size=(-1, 0))
