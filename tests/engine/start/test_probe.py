"""Native code is probed on layers of all kinds, once on each machine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oaiserve.engine.decoder.blocks import FORMATS
from oaiserve.engine.decoder.description import Decoder, NotKnown
from oaiserve.engine.executors.native.library import Library
from oaiserve.engine.executors.reference.executor import ReferenceExecutor
from oaiserve.engine.start import probe
from oaiserve.engine.start.probe_layers import ProbeLayers

pytestmark = pytest.mark.compiler


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_this_machine_computes_all_kinds_of_layers_right(dtype: torch.dtype) -> None:
    with torch.inference_mode():
        probe.probe(Library(dtype))
    names = {name for name, _ in ProbeLayers(dtype).decoders()}
    assert {f"weights in {kind.name}" for number, kind in FORMATS.items() if number != 1104} <= names


def _with_another_norm(decoder: Decoder) -> Decoder:
    return replace(decoder, final_norm=replace(decoder.final_norm, weight=decoder.final_norm.weight.flip(0)))


def _with_another_window(decoder: Decoder) -> Decoder:
    (layer,) = decoder.layers
    if layer.attention is None or layer.attention.parameters.sliding_window is None:
        return decoder
    parameters = replace(layer.attention.parameters, sliding_window=5)
    return replace(decoder, layers=[replace(layer, attention=replace(layer.attention, parameters=parameters))])


@pytest.mark.parametrize(
    ("change", "named"),
    [(_with_another_norm, "attention and an MLP"), (_with_another_window, "attention with a window")],
)
def test_a_layer_that_is_computed_otherwise_is_named(change: Any, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(decoder: Decoder, **sizes: Any) -> ReferenceExecutor:
        return ReferenceExecutor(change(decoder), **sizes)

    monkeypatch.setattr(probe, "ReferenceExecutor", other)
    with torch.inference_mode(), pytest.raises(NotKnown, match=f"computes {named} otherwise than plain torch"):
        probe.probe(Library(torch.float32))


def test_a_library_is_probed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(torch.float32)  # from the usual cache, since compiling takes long
    monkeypatch.setenv("OAISERVE_CACHE", str(tmp_path))
    probed: list[Library] = []
    monkeypatch.setattr(probe, "probe", probed.append)
    for _ in range(2):
        probe.refuse_unless_probed(library)
    assert probed == [library]
    monkeypatch.setattr(probe, "version_of", lambda package: f"another {package}")
    probe.refuse_unless_probed(library)
    assert len(probed) == 2
