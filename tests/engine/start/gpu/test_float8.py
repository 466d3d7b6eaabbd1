"""GPUs without floats of eight bits refuse a KV cache in these, and expand weights in these."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.executors.cuda.packed import takes_float8
from oaiserve.engine.start.ways import gpu as start_on_gpu
from oaiserve.engine.start.ways.gpu import refuse_what_the_device_lacks
from oaiserve.errors import StartupError


@pytest.mark.parametrize(("capability", "takes"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((12, 0), True)])
def test_a_cache_in_fp8_is_refused_below_8_9(
    capability: tuple[int, int], takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(start_on_gpu, "refuse_unless_possible", lambda *_: None)
    monkeypatch.setattr(start_on_gpu, "refuse_without_kernels", lambda *_: None)
    found: Any = SimpleNamespace(spec=SimpleNamespace(device=device), decoder=SimpleNamespace(adaptable=dict))
    assert takes_float8(device) == takes
    refuse_what_the_device_lacks(found, EngineOptions())
    if takes:
        refuse_what_the_device_lacks(found, EngineOptions(kv_cache_dtype="fp8"))
        return
    with pytest.raises(StartupError, match=r"compute capability 8\.9 or more .* this one has 8\.[06]\."):
        refuse_what_the_device_lacks(found, EngineOptions(kv_cache_dtype="fp8"))
