"""A KV cache in eight bits: what is written is what rounding gives, and attention is that of what was written."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from oaiserve.config import KVCacheDtype
from oaiserve.engine.decoder.description import Norm
from oaiserve.engine.decoder.spec import KEY_GROUP, KVShape
from oaiserve.engine.executors.native.kv_layout import LANES, new_cache
from oaiserve.engine.executors.native.native import NativeDecoder
from oaiserve.engine.executors.reference.attention import PlainAttention
from oaiserve.engine.model.attention import LayerCache
from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.start.compare import difference
from oaiserve.errors import StartupError
from tests.engine.doubles import SimulatedEngine
from tests.engine.executors.native.attention_layers import NUM_BLOCKS, QKV, Layer, NativeLayer
from tests.engine.executors.native.small_models import (
    WITHOUT_STEP,
    compiled_for,
    config,
    load,
    make_model,
    native_decoder,
)
from tests.engine.model.steps import BLOCK_SIZE, CPU, Shape, batch_of_prompt, shapes, two_steps
from tests.engine.remembered import save
from tests.models.described import SmallModel, described

pytestmark = [pytest.mark.kernels, pytest.mark.compiler]
# Each has something that no other has: heads that are no multiple of the group, several heads for a key, a softcap.
LAYERS = [
    Layer(6, KVShape(2, 64, 64, is_int8=True)),
    Layer(4, KVShape(4, 80, 96, is_int8=True), sliding_window=21),
    Layer(8, KVShape(1, 128, 128, is_int8=True), has_sinks=True),
    Layer(3, KVShape(3, 16, 240, is_int8=True), softcap=2.0, sliding_window=270),
    Layer(5, KVShape(1, 256, 256, is_int8=True)),
    Layer(4, KVShape(1, 512, 512, is_int8=True), sliding_window=300),
    Layer(4, KVShape(2, 48, 32, is_int8=True), softcap=3.0),
]
# Models with biases of keys, with norms of keys, with pairs of neighbours, with numbers that are not rotated.
OUTLIERS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "gemma3_text": {"head_dim": 32},
    "ernie4_5": {"use_bias": True},
    "phi": {},
}
APART = {"ernie4_5": 1, "phi": 4}  # the numbers of a pair; elsewhere half a head


class Read(NamedTuple):
    """The keys or values [tokens, kv_heads, dim] of some slots, and the scale of each number."""

    numbers: Tensor
    scales: Tensor


def read(cache: LayerCache, shape: KVShape, slots: Tensor) -> tuple[Read, Read]:
    """Return the keys and values that a cache in eight bits has in these slots."""

    def of_tokens(panels: Tensor) -> Tensor:
        """Return [tokens, kv_heads, ...] from [blocks, kv_heads, panels, 16, ...]."""
        return panels.transpose(1, 2).transpose(2, 3).flatten(0, 2)[slots]

    groups = -(-shape.key_dim // KEY_GROUP)
    scales, numbers = cache.keys.split([4 * LANES * groups, LANES * shape.key_dim], dim=-1)
    numbers = numbers.unflatten(-1, (-1, LANES, 2)).transpose(-3, -2).flatten(-2)
    scales = scales.contiguous().view(torch.float32).unflatten(-1, (groups, LANES)).transpose(-2, -1)
    of_numbers = of_tokens(scales).repeat_interleave(KEY_GROUP, dim=-1)[..., : shape.key_dim]
    keys = Read(of_tokens(numbers) * of_numbers, of_numbers)

    scales, numbers = cache.values.split([4 * LANES, LANES * shape.value_dim], dim=-1)
    numbers = numbers.unflatten(-1, (LANES // 2, -1, 2)).transpose(-2, -1).flatten(-3, -2)
    of_numbers = of_tokens(scales.contiguous().view(torch.float32))[..., None].expand(-1, -1, shape.value_dim)
    return keys, Read(of_tokens(numbers) * of_numbers, of_numbers)


def rounded(numbers: Tensor, group: int) -> Tensor:
    """Round numbers [..., dim] to integers of eight bits, with a scale for each `group`."""
    parts = []
    for part in numbers.split(group, dim=-1):
        scale = part.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
        parts.append((part / scale).round() * scale)
    return torch.cat(parts, dim=-1)


def in_sixteen_bits(query: Tensor) -> Tensor:
    """Round each query to integers that share a scale, as the native code does.

    That alone changes what a decode of wide heads gives by up to 6.5e-4 of its norm, and the rest by 1e-4.
    """
    scales = query.abs().amax(-1, keepdim=True) / (2**15 - 1)
    return (query / scales).round() * scales


@pytest.fixture(scope="module", params=["native", "x86-64-v3", "x86-64-v2"])
def natives(request: pytest.FixtureRequest) -> list[tuple[NativeLayer, NativeLayer]]:
    """Return each layer with one thread and with two."""
    with compiled_for(request.param):
        return [(NativeLayer(layer, torch.float32, 1), NativeLayer(layer, torch.float32, 2)) for layer in LAYERS]


@given(shape=shapes(200, 150, NUM_BLOCKS), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=8)
@example(shape=[(0, 1)], seed=0)
@example(shape=[(15, 1), (16, 1), (17, 1), (200, 1), (0, 1)], seed=1)
@example(shape=[(300, 1), (0, 150), (31, 2), (3, 128)], seed=2)
@example(shape=[(161, 1)], seed=73)
def test_attention_is_that_of_the_keys_and_values_that_were_written(
    natives: list[tuple[NativeLayer, NativeLayer]], shape: Shape, seed: int
) -> None:
    caches = [native.plain_cache() for native, _ in natives]
    generator = torch.Generator().manual_seed(seed)
    for step in two_steps(shape, torch.Generator().manual_seed(seed), num_blocks=NUM_BLOCKS):
        batch = build_batch(step, BLOCK_SIZE, CPU)
        reference = PlainAttention(batch)
        for (native, other), cache in zip(natives, caches, strict=True):
            x = native.inputs(len(batch.slots), generator)
            result = native.forward(batch, x)
            assert torch.equal(result, other.forward(batch, x)), "with one thread and with two"
            qkv = native.qkv(x)
            key, value = read(native.cache, native.layer.shape, batch.slots)
            value_dim = native.layer.shape.value_dim
            for each, wanted, group in ((key, qkv.key, KEY_GROUP), (value, qkv.value, value_dim)):
                assert ((each.numbers - wanted).abs() <= 0.5001 * each.scales).all()
                # A number in the middle between two integers may be rounded up by one of both only.
                differences = (each.numbers - rounded(wanted, group)).abs()
                assert (differences <= 1.0001 * each.scales).all()
                from_middle = ((wanted / each.scales).abs() % 1 - 0.5).abs()
                is_other = differences > 1e-5 * wanted.abs().max()
                assert (from_middle[is_other] < 1e-3).all()
                assert is_other.sum() <= max(2, 1 + 0.01 * wanted.numel())
            written = QKV(in_sixteen_bits(qkv.query), key.numbers, value.numbers)
            expected = native.expected(x, written, reference, cache)
            # Weights of keys have sixteen bits, too.
            torch.testing.assert_close(result, expected, rtol=1e-3, atol=5e-3)
            assert (result - expected).norm() <= 2e-4 * expected.norm()


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_bfloat16_reads_the_same_cache(layer: Layer) -> None:
    """It is less precise only in the queries, the weights of keys and the result."""
    generator = torch.Generator().manual_seed(5)
    (step,) = two_steps([(0, 200), (0, 30)], generator, num_blocks=NUM_BLOCKS)
    batch = build_batch(step, BLOCK_SIZE, CPU)
    natives = [NativeLayer(layer, dtype) for dtype in (torch.float32, torch.bfloat16)]
    x = natives[0].inputs(len(batch.slots), generator)
    exact, logits = (native.forward(batch, x) for native in natives)
    assert (logits - exact).norm() < 0.005 * exact.norm()
    for one, other in zip(*(read(native.cache, layer.shape, batch.slots) for native in natives), strict=True):
        assert torch.equal(one.numbers, other.numbers)


@pytest.mark.parametrize("is_nan", [True, False], ids=["nan", "inf"])
@pytest.mark.parametrize("kind", [0, 1, 2], ids=["query", "key", "value"])
def test_what_is_not_finite_reaches_those_who_see_it_and_no_others(kind: int, is_nan: bool) -> None:
    # A norm makes NaN of what is infinite.
    norm = Norm(torch.ones(LAYERS[0].shape.key_dim), None, 1e-6, subtracts_mean=False) if is_nan else None
    native = NativeLayer(LAYERS[0], torch.float32, norm_of_heads=norm)
    (step,) = two_steps([(0, 40), (0, 20)], torch.Generator().manual_seed(1), num_blocks=NUM_BLOCKS)
    batch = build_batch(step, BLOCK_SIZE, CPU)
    x = native.inputs(60, torch.Generator().manual_seed(2))
    expected = native.forward(batch, x)
    native.make_infinite(x[25], kind)
    logits = native.forward(batch, x)
    saw = torch.zeros(60, dtype=torch.bool)
    saw[25 : 26 if kind == 0 else 40] = True
    assert logits[saw].isnan().all()
    assert torch.equal(logits[~saw], expected[~saw])


def test_numbers_that_are_all_zero_stay_zero() -> None:
    native = NativeLayer(LAYERS[0], torch.float32)
    assert (native.forward(batch_of_prompt(20), torch.zeros(20, native.width)) == 0).all()


@given(st.integers(1, 4), st.integers(1, 16), st.integers(1, 16), st.booleans(), st.sampled_from([16, 48]))
def test_the_account_of_memory_is_what_a_cache_takes(
    heads: int, key_dim: int, value_dim: int, is_int8: bool, block_size: int
) -> None:
    shape = KVShape(heads, 16 * key_dim, 16 * value_dim, is_int8)
    for dtype in (torch.bfloat16, torch.float32):
        cache = new_cache(shape, dtype, num_blocks=3, block_size=block_size)
        assert sum(blocks.nbytes for blocks in cache) == 3 * block_size * shape.num_bytes(dtype)
        assert all(blocks.data_ptr() % 64 == 0 for blocks in cache)


@torch.inference_mode()
def logits(native: NativeDecoder) -> Tensor:
    """Return the logits of a prompt's last token and of a decode."""
    return torch.cat([native.forward(batch_of_prompt(90)).clone(), native.forward(batch_of_prompt(91, 90))])


def native_with(loaded: SmallModel, cache: KVCacheDtype) -> NativeDecoder:
    return native_decoder(loaded.with_cache(cache), num_blocks=8, block_size=BLOCK_SIZE, num_threads=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_bits_lose_little(dtype: torch.dtype) -> None:
    loaded = load(config("llama", initializer_range=0.1), dtype=dtype)
    lost = difference(logits(native_with(loaded, "int8")), logits(native_with(loaded, "auto")))
    assert 1e-4 < lost < 0.05


def with_outliers(family: str) -> PreTrainedModel:
    """Return a model some of whose keys' numbers are always 100 times as large as the others.

    Queries are as much smaller there, as they are in trained models.
    """
    model = make_model(config(family, **OUTLIERS[family], num_hidden_layers=2, initializer_range=0.1))
    for module in model.modules():
        if isinstance(queries := getattr(module, "q_proj", None), torch.nn.Linear):
            heads = queries.out_features // module.head_dim
            large = torch.tensor([2, 2 + APART.get(family, module.head_dim // 2)])
            with torch.no_grad():
                if hasattr(module, "k_norm"):
                    stored = float(family == "gemma3_text")  # Gemma adds this to weights.
                    module.k_norm.weight[large] = (module.k_norm.weight[large] + stored) * 100 - stored
                    module.q_norm.weight[large] = (module.q_norm.weight[large] + stored) / 100 - stored
                else:
                    module.k_proj.bias.view(-1, module.head_dim)[:, large] = 100
                    queries.weight.view(heads, module.head_dim, -1)[:, large] /= 100
                    queries.bias.view(heads, module.head_dim)[:, large] /= 100
    return model


@pytest.mark.parametrize("family", OUTLIERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_of_keys_that_are_always_large_take_no_digits_of_the_others(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = described(with_outliers(family).to(dtype))
    exact = logits(native_with(loaded, "auto"))
    lost = difference(logits(native_with(loaded, "int8")), exact)
    monkeypatch.setattr("oaiserve.engine.start.described.with_key_sizes", lambda layer: layer)
    lost_without = difference(logits(native_with(loaded, "int8")), exact)
    assert lost < lost_without / 3


def test_it_is_refused_without_the_native_step(tmp_path: Path) -> None:
    save(make_model(WITHOUT_STEP), tmp_path)
    reason = "needs the native step, which cannot be used: models of type 'apertus' have no description"
    with pytest.raises(StartupError, match=f"^--kv-cache-dtype int8 {reason}"):
        SimulatedEngine.from_pretrained(tmp_path, device="cpu", kv_cache_dtype="int8")
