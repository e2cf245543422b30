"""The numbers that nearly every config.json states, and what else families read of theirs in the same way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.config.fields import MAX_EXPERTS, MAX_EXPERTS_IN_ALL, MAX_LAYERS, MAX_POSITION, MAX_VOCAB, Fields
from toolkit.models.config.rope import LAYER_TYPES, read_rope
from toolkit.models.spec import RopeSpec

Names = tuple[str, ...]
EPS_NAMES = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps")


@dataclass(frozen=True)
class Dims:
    """The numbers that every family states. ``max_position``: ``max_position_embeddings``."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    max_position: int
    tied: bool


def read_dims(
    config: Fields,
    *,
    eps: float = 1e-6,
    tied: bool = False,
    head_dim: int | None = None,
    kv_heads: int | None = None,
) -> Dims:
    """Read and check the dimensions; the arguments are the family's defaults: what an absent field means. ``head_dim``
    None: hidden / heads, ``kv_heads`` None: as many as heads; an explicit null means so in every family."""
    hidden = config.integer("hidden_size")
    heads = config.integer("num_attention_heads", high=100_000)
    stated = config.values
    kv = config.integer(
        "num_key_value_heads",
        default=heads if kv_heads is None or "num_key_value_heads" in stated else kv_heads,
        high=100_000,
    )
    if heads % kv:
        config.fail("num_key_value_heads", kv, f"a divisor of num_attention_heads ({heads})")
    head_dim = config.integer("head_dim", default=None if "head_dim" in stated else head_dim, high=65_536)
    if head_dim is None:
        if hidden % heads:
            config.fail("num_attention_heads", heads, f"a divisor of hidden_size ({hidden}), or head_dim to be given")
        head_dim = hidden // heads
    return Dims(
        vocab=config.integer("vocab_size", high=MAX_VOCAB),
        hidden=hidden,
        intermediate=config.integer("intermediate_size"),
        layers=config.integer("num_hidden_layers", "num_layers", high=MAX_LAYERS),
        heads=heads,
        kv_heads=kv,
        head_dim=head_dim,
        eps=config.number(*EPS_NAMES, default=eps, high=0.5),
        max_position=config.integer("max_position_embeddings", "max_sequence_length", high=MAX_POSITION),
        tied=config.flag("tie_word_embeddings", tied),
    )


def read_other_dims(
    config: Fields,
    *,
    hidden: Names,
    layers: Names,
    heads: Names,
    inner: Callable[[int], int],
    length: Names = (),
    tied: bool = False,
) -> Dims:
    """The dimensions of configs that call them by other names (those of each field), whose heads have keys of their own
    and share the hidden size out among them. ``inner``: the width of the MLP, by the hidden size; ``length``: of
    ``max_position_embeddings``, 2048 where none is stated; () = as everywhere. ``tied``: what its absence means."""
    width = config.integer(*hidden)
    usual: dict[str, int | None] = {
        "hidden_size": width,
        "num_hidden_layers": config.integer(*layers, high=MAX_LAYERS),
        "num_attention_heads": config.integer(*heads, high=100_000),
        "num_key_value_heads": None,
        "head_dim": None,
        "intermediate_size": inner(width),
    }
    if length:
        usual["max_position_embeddings"] = config.integer(*length, default=2048, high=MAX_POSITION)
    return read_dims(config.changed(usual), eps=1e-5, tied=tied)


def read_window(config: Fields, default: int | None = None) -> int | None:
    """``sliding_window``; an explicit null turns it off, absence means the family's ``default``."""
    if "sliding_window" in config.values and config.values["sliding_window"] is None:
        return None
    return config.integer("sliding_window", default=default, high=MAX_POSITION)


def read_windows(config: Fields, layers: int, window: int | None, fallback: Sequence[bool]) -> list[int | None]:
    """The window of each layer from ``layer_types``, or where absent from ``fallback`` (True: the layer slides)."""
    types = config.choices("layer_types", layers, LAYER_TYPES)
    slides = fallback if types is None else [t == "sliding_attention" for t in types]
    return [window if s else None for s in slides]


def layer_ropes(
    config: Fields, dims: Dims, windows: Sequence[int | None], *, theta: float, local_theta: float
) -> list[RopeSpec]:
    """The rope of each layer where those that slide have their own; files of before transformers 5 scale the others'
    alone. ``theta``, ``local_theta``: of both where the file does not say."""
    read = partial(read_rope, head_dim=dims.head_dim, max_position=dims.max_position)
    everywhere = read(config, default_theta=theta)
    if config.has("rope_parameters"):
        own = config.changed({"rope_scaling": None})
        local = read(own, default_theta=local_theta, layer_type="sliding_attention")
    else:
        local = RopeSpec(dims.head_dim, local_theta, max_position=dims.max_position)
    return [everywhere if window is None else local for window in windows]


def read_experts(config: Fields, layers: int, *names: str) -> tuple[int, int]:
    """(experts a layer, experts a token); ``names``: the field's spellings."""
    count = config.integer(*names, high=MAX_EXPERTS)
    if count * layers > MAX_EXPERTS_IN_ALL:
        config.fail(names[0], count, f"at most {MAX_EXPERTS_IN_ALL} experts in all {layers} layers")
    return count, config.integer("num_experts_per_tok", high=count)


def check_convolved(config: Fields, name: str) -> None:
    """What is convolved goes through SiLU in all released models; ``name``: the field that says so."""
    config.text(name, default="silu", choices=("silu", "swish"))
