"""Bytes that a model needs on the native runner beside its weights."""

from __future__ import annotations

from toolkit.models.eyes.vision import patch_numbers
from toolkit.models.spec import DecoderSpec, Latent, Paged
from toolkit.runners.base import RunnerOptions
from toolkit.runners.native.mixers import state_numbers
from toolkit.runners.native.share import Share

KV_BITS = {8: (8, 8), 65: (6, 5), 4: (6, 4), 55: (5, 5), 54: (5, 4), 44: (4, 4)}  # of keys and of values, by policy


def kept_bytes(kept: Paged | Latent, policy: int, dtype: str) -> int:
    """Of a token in the cache of one layer. ``policy``: one of ``RunnerOptions.kv_layers``."""
    width = -(-kept.head_dim // 16) * 16
    plain = 32 if dtype == "float32" else 16
    keys, values = KV_BITS.get(policy, (plain, plain))
    sides = (keys, values) if kept.kind == "paged" else (values,)
    return kept.heads * sum(width * bits // 8 + (4 if policy else 0) for bits in sides)


def block_bytes(spec: DecoderSpec, options: RunnerOptions, dtype: str, share: Share) -> tuple[int, ...]:
    """Of a block of each cache group, as a rank has it."""
    total = [0] * len(spec.cache_groups)
    rows = spec.paged()
    policies = options.kv_layers or (options.quant_policy,) * len(rows)
    for (_, group, kept), policy in zip(rows, policies, strict=True):
        token = kept_bytes(kept, policy, dtype) // kept.heads * share.kept(kept.heads)
        total[group] += token * options.block_size
    for _, mixer in spec.mixers():
        total[mixer.group] += 4 * state_numbers(mixer)
    return tuple(total)


def activation_bytes(spec: DecoderSpec) -> int:
    """Of each token of a step, at its widest: float32 rows and int8 copies. Buffers hold 512 tokens at most."""
    hidden = spec.hidden_size
    given = 0 if spec.per_layer is None else spec.per_layer.columns
    return (4 * hidden + given + max(4 * hidden, *(mixer.width(hidden) for _, mixer in spec.mixers()))) * 4


def picture_bytes(spec: DecoderSpec) -> tuple[int, int]:
    """Of a patch of a picture: while it is encoded, and in bfloat16 as long as it is looked at (``MemoryNeed``)."""
    vision = spec.vision
    looks = [mixer for _, mixer in spec.mixers() if mixer.kind == "cross"]
    looked_at = sum(2 * m.kv_heads * (-(-m.head_dim // 16) * 16) for m in looks) * 4  # half of it is in use
    return 0 if vision is None else (patch_numbers(vision) + 2 * vision.tower.hidden) * 4, looked_at
