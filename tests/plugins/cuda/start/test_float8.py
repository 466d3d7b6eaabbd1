"""GPUs without floats of eight bits refuse a KV cache and weights in these. Others quantize the weights they place."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oaiserve.checkpoints.source import find_model
from oaiserve.config import EngineOptions
from oaiserve.engine.start.described import describe_model
from oaiserve.engine.start.options import refuse_on_device
from oaiserve.errors import StartupError
from oaiserve.plugins.cuda.executor.executor import CudaWeights
from oaiserve.plugins.cuda.executor.packed import takes_float8
from oaiserve.plugins.cuda.start import on_gpu as start_on_gpu
from oaiserve.plugins.cuda.start.on_gpu import refuse_what_the_device_lacks
from tests.engine.executors.fake_gpu import GPU
from tests.engine.remembered import save
from tests.models.described import SmallModel


@pytest.mark.parametrize(("capability", "takes"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((12, 0), True)])
def test_fp8_is_refused_below_8_9(capability: tuple[int, int], takes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(start_on_gpu, "refuse_unless_possible", lambda *_: None)
    monkeypatch.setattr(start_on_gpu, "refuse_without_kernels", lambda *_: None)
    found: Any = SimpleNamespace(spec=SimpleNamespace(device=device), decoder=SimpleNamespace(adaptable=dict))
    assert takes_float8(device) == takes
    refuse_what_the_device_lacks(found, EngineOptions())
    if takes:
        refuse_what_the_device_lacks(found, EngineOptions(kv_cache_dtype="fp8", quantize="fp8"))
        return
    for settings in ({"kv_cache_dtype": "fp8"}, {"quantize": "fp8"}):
        with pytest.raises(StartupError, match=r"compute capability 8\.9 or more .* this one has 8\.[06]\."):
            refuse_what_the_device_lacks(found, EngineOptions(**settings))


def test_matrices_of_layers_are_quantized_on_a_gpu(loaded: SmallModel, tmp_path: Path) -> None:
    save(loaded.model, tmp_path)
    options = EngineOptions(quantize="fp8")
    model = describe_model(find_model(tmp_path), options, device=GPU)
    start_on_gpu.refuse_what_the_device_lacks(model, options)
    on_cpu = model._replace(spec=replace(model.spec, device=torch.device("cpu")))
    weights = start_on_gpu.place(on_cpu, options, "a model").weights
    assert isinstance(weights, CudaWeights)
    assert len(weights.packed) == 3 * len(model.decoder.layers)  # The last matrix of an MLP has too few columns.
    assert {one.kind for one in weights.packed} == {"float8"}
    without = start_on_gpu.place(on_cpu, EngineOptions(), "a model").weights
    assert isinstance(without, CudaWeights)
    assert not without.packed


@pytest.mark.parametrize(("quantize", "device"), [("fp8", "cpu"), ("int8", "cuda:0"), ("int4", "meta")])
def test_each_device_has_its_own_ways_to_quantize(quantize: Any, device: str) -> None:
    other = "cuda" if quantize == "fp8" else "cpu"
    with pytest.raises(StartupError, match=f"--quantize {quantize} is for --device {other}; the model is on {device}"):
        refuse_on_device(EngineOptions(quantize=quantize), device)
