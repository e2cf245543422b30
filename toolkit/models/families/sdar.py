"""SDAR: Qwen3's layers, whose tokens see their own block both ways. Those of a block are guessed together. Source:
Cheng et al., "SDAR" (arXiv 2510.06303), and the authors' ``generate.py``."""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built
from toolkit.models.families import qwen3
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import Sublayer

MASK_TOKEN = 151669  # <|MASK|> of the tokenizer
LONGEST = 1024  # block of tokens
NO_GGUF = "GGUF files of models that guess blocks of tokens are neither read nor written"


def build(config: Fields) -> Built:
    return in_blocks(config, qwen3.build(config))


def in_blocks(config: Fields, built: Built) -> Built:
    """A model that guesses one token after another, as one that guesses blocks of them."""
    spec, stored = built
    if any(a.window is not None for _, a in spec.attention_layers()):
        config.fail("use_sliding_window", True, "false: a block is seen whole")
    block = config.integer("block_size", default=4, high=LONGEST)
    mask = config.integer("mask_token_id", default=MASK_TOKEN, low=0)
    if mask >= spec.vocab_size:
        config.fail("mask_token_id", mask, f"a token id below vocab_size ({spec.vocab_size})")

    def seen(_: int, s: Sublayer) -> Sublayer:
        return replace(s, mixer=replace(s.mixer, block=block)) if s.mixer.kind == "attention" else s

    return replace(spec.changed(seen), mask_token=mask), stored


SIZES = dict(head_dim=32, mask_token_id=4)
FAMILY = Family(
    "sdar",
    "SDAR 1.7B, 4B, 8B; TraDo",
    ("SDARForCausalLM",),
    build,
    (
        Tiny(dict(SIZES), twin=dict(head_dim=32)),
        Tiny(
            dict(SIZES, block_size=8, num_key_value_heads=1, tie_word_embeddings=True),
            twin=dict(head_dim=32, num_key_value_heads=1, tie_word_embeddings=True),
        ),
    ),
    NO_GGUF,
    twin="qwen3",
)
