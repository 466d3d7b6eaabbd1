"""The facts of a model that its tensors don't show: numbers from its settings, and properties of its family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from oaiserve.engine.decoder.description import ClampedGate, NotKnown
from oaiserve.engine.decoder.reader import NormKind
from oaiserve.engine.decoder.settings import Settings

# Our names of activations, keyed by their names in settings.
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The facts of the mixtures of experts of one decoder, whose defaults are Mixtral's."""

    layers: tuple[bool, ...] | None = None  # layers with experts instead of an MLP; None: all layers
    num_experts: int | None = None  # how many experts the files must have in each layer; None: any number
    top_k: int
    is_sigmoid: bool = False  # Scores are sigmoids instead of a softmax.
    has_choice_bias: bool = False
    groups: int = 1
    top_groups: int = 1
    adds_best_two: bool = False
    renormalizes: bool = True
    scale: float = 1.0
    is_float32: bool = False  # The router and its biases are in float32, whatever the model's dtype.
    has_float32_bias: bool = False  # The bias affects only the choice of experts.
    is_router_adaptable: bool = False
    has_shared: bool = False  # A shared MLP is applied to every token.
    has_shared_gate: bool = False
    has_gates: bool = True  # False: an expert has no gate, and applies its activation to the up projection
    is_in_turns: bool = False  # Gate and up projections are one matrix, whose rows alternate.
    activation: str | ClampedGate | None = None  # activation of the experts; None: the same as in an MLP
    scales_inputs: bool = False  # An expert's weight multiplies its input instead of its output.

    def is_in(self, layer: int) -> bool:
        return self.layers is None or self.layers[layer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    query_rank: int | None
    rank: int  # rank of keys and values
    own_dim: int  # numbers of a head's key that are not rotated
    shared_dim: int  # rotated numbers, which all heads share
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts of one decoder. A family replaces the facts of Llama that differ."""

    num_layers: int
    mtp_layers: int = 0  # additional layers at the end that predict further tokens; they are left out
    heads: int
    kv_heads: int
    head_dim: int
    norm: NormKind
    activation: str  # a key of the executors' ACTIVATIONS
    scaling: float  # multiplies the products of queries and keys
    windows: tuple[int | None, ...]  # one for each layer
    chunks: tuple[int | None, ...] | None = None  # one for each layer; None: no layer attends in chunks
    rotates: tuple[bool, ...]  # whether layers rotate queries and keys by position
    is_interleaved: bool = False  # Neighbours are rotated together, instead of numbers of the two halves.
    rotates_before_norms: bool = False
    has_weightless_qk_norms: bool = False  # Layers that rotate queries and keys norm them, too.
    factors_are_for_unrotated: bool = False  # Only layers that don't rotate queries scale them by position.
    softcap: float | None = None  # cap of attention scores
    scaling_falls: bool = False  # Layers divide `scaling` by their numbers, counted from 1.
    thetas: tuple[float, ...] | None = None  # bases of the rotary tables of layers, if they differ
    first_position: int = 0  # row of the embedded positions for the first token
    qkv_parts: int = 0  # parts of each key head in `qkv`, whose rows are sorted by key head; 0: sorted by part
    has_attention_gates: bool = False  # The gates are rows of `q`: each head's gate follows its query.
    with_mixer: frozenset[int] = frozenset()  # numbers of the layers with a mixer
    without_attention: frozenset[int] = frozenset()
    without_mlp: frozenset[int] = frozenset()
    is_parallel: bool = False  # attention and MLP read the same hidden state
    gate_sparsity: tuple[float, ...] | None = None  # for each layer, the share of its MLP's gates that are 0
    is_tied: bool = False  # The output head shares the embedding's weights.
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = False  # Round `embedding_scale` to the model's dtype.
    vector_scale: float = 1.0  # factor of the vectors that replace embeddings
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    logits_softcap: float = 0.0
    mixture: Mixture | None = None
    latent: Latent | None = None

    def __post_init__(self) -> None:
        if any(window is not None and window < 1 for window in self.windows):
            raise NotKnown("its layers have windows of no tokens")


def llama(settings: Settings, *, epsilon: str | float = "rms_norm_eps", function: str | None = "hidden_act") -> Facts:
    """Return the facts of Llama.

    `epsilon` is the norms' epsilon or its key in the settings. `function` is the key of the activation; without it, the
    activation is silu.
    """
    num_layers = settings["num_hidden_layers"]
    return Facts(
        num_layers=num_layers,
        heads=settings["num_attention_heads"],
        kv_heads=settings["num_key_value_heads"],
        head_dim=settings["head_dim"],
        norm=NormKind(epsilon=settings[epsilon] if isinstance(epsilon, str) else epsilon),
        activation="silu" if function is None else activation(settings[function]),
        scaling=settings["head_dim"] ** -0.5,
        windows=(None,) * num_layers,
        rotates=(True,) * num_layers,
        is_tied=settings["tie_word_embeddings"],
    )


def with_layer_norms(
    settings: Settings, *, epsilon: str | float = "layer_norm_eps", function: str = "hidden_act"
) -> Facts:
    """Return the facts of Llama, but with LayerNorms. They are read from the same keys."""
    facts = llama(settings, epsilon=epsilon, function=function)
    return replace(facts, norm=replace(facts.norm, subtracts_mean=True))


def activation(name: str) -> str:
    """Return our name of an activation function. Raises NotKnown."""
    if name not in _ACTIVATIONS:
        raise NotKnown(f"its activation is {name}")
    return _ACTIVATIONS[name]


def windows_of_all(settings: Settings) -> tuple[int | None, ...]:
    window: int | None = settings["sliding_window"]
    num_layers: int = settings["num_hidden_layers"]
    return (window,) * num_layers


def windows_by_type(settings: Settings, *others: str) -> tuple[int | None, ...]:
    """Return the attention window of each layer, or None for layers of full attention. `others` are types without
    attention.

    Raises NotKnown for a layer of any other type.
    """
    refuse_other_types(settings, "full_attention", "sliding_attention", *others)
    window = settings["sliding_window"]
    return tuple(window if kind == "sliding_attention" else None for kind in settings["layer_types"])


def with_mixers(facts: Facts, settings: Settings, kind: str = "linear_attention", *others: str) -> Facts:
    """Return the facts with a mixer instead of attention in layers of one type. `others` are types with attention.

    Raises NotKnown for a layer of any other type.
    """
    refuse_other_types(settings, "full_attention", kind, *others)
    layers = layers_of_type(settings, kind)
    return replace(facts, with_mixer=layers, without_attention=layers)


def refuse_other_types(settings: Settings, *known: str) -> None:
    """Raise NotKnown for a layer of a type that is not listed."""
    if others := sorted({str(kind) for kind in settings["layer_types"]} - set(known)):
        raise NotKnown(f"it has layers of type '{others[0]}'")


def layers_of_type(settings: Settings, name: str) -> frozenset[int]:
    return frozenset(number for number, kind in enumerate(settings["layer_types"]) if kind == name)


MakeFacts = Callable[[Settings], Facts]
