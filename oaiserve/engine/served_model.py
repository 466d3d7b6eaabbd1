"""`ServedModel`: a loaded model, ready to compute. It is everything that a start passes to `Engine`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oaiserve.checkpoints.recommended_sampling import Recommendation
from oaiserve.engine.encoder import Media
from oaiserve.engine.grammars.grammar import Grammars
from oaiserve.engine.sequences.step import Runner
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.engine.tiers.lower_tier import MakeTier
from oaiserve.engine.types.adapters import AdapterTable
from oaiserve.engine.types.pooling import Pooling
from oaiserve.engine.types.sampling_rule import SamplingRule

if TYPE_CHECKING:
    from oaiserve.engine.profiler_ranges import Ranges


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """A model with its runner, its tokenizer and their sizes, and what its device provides."""

    tokenizer: Tokenizer
    runner: Runner
    num_blocks: int  # blocks of the KV cache
    max_model_len: int  # tokens of prompt and answer together
    vocab_size: int
    num_states: int = 0  # number of sequences that can keep a state, if layers keep one
    counts_tokens: bool = False  # its device counts tokens for penalties, see `Sequence.is_counted`
    max_step_tokens_default: int = 512
    eos_token_ids: frozenset[int] = frozenset()
    grammars: Grammars | None = None  # None: the tokenizer's grammars
    default_params: Mapping[str, Any] = field(default_factory=dict)  # request defaults that come with the model
    recommendation: Recommendation | None = None  # the publisher's recommendation, if the defaults contain it
    pooling: Pooling | None = None  # None: the model generates text
    adapters: AdapterTable = field(default_factory=AdapterTable)
    media: Media | None = None  # None: the model reads only text
    rules: tuple[SamplingRule, ...] = ()  # sampling rules of plug-ins
    make_tier: MakeTier | None = None  # makes the tier below the KV blocks (--prefix-cache-dir or --kv-offload)
    warm_up: Callable[[], None] = lambda: None  # called on the engine thread before the first step
    # Called on the engine thread after an error has ended it. Returns whether the device has failed as well.
    failed: Callable[[BaseException], bool] = lambda error: False
    ranges: Ranges | None = None  # ranges for a profiler (--nvtx)
    block_bytes: int = 0  # size of a block
    weight_bytes: int = 0  # weights that each step reads
    path: Path | None = None  # the model's folder or GGUF file
    # for telemetry
    device: str = ""
    dtype: str = ""
    # Optional features, each with the reason why it is off, or "" if it is on.
    features: Mapping[str, str] = field(default_factory=dict)
