"""Positions and windows that a model's attention cannot have: the whole line."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from toolkit.errors import UsageError
from toolkit.models.positions import by_request, grow_queries
from toolkit.models.registry import build, get
from toolkit.models.spec import DecoderSpec
from toolkit.models.streaming import stream
from toolkit.models.tiny import tiny_config

OUT = "leave it out"


def window(size: int) -> Callable[[DecoderSpec], DecoderSpec]:
    return lambda spec: stream(spec, size, 4)


@pytest.mark.parametrize(
    ("family", "change", "told"),
    [
        (
            "mamba2",
            grow_queries,
            f"use_logn_attn: this model has no attention with keys of its own, whose queries could grow; {OUT}",
        ),
        (
            "llama",
            by_request,
            "dynamic_rope: expected session, found request: this model's positions do not scale dynamically; leave it "
            "out, or give rope_scaling_factor too",
        ),
        (
            "bert",
            window(64),
            f"kv_window: this model computes tokens together, texts or pictures as wholes; {OUT}",
        ),
        ("mamba2", window(64), f"kv_window: this model keeps no token for ever as it is; {OUT}"),
        (
            "deepseek_v2",
            window(64),
            f"kv_window: this model has layers whose rows are key and value at once (MLA); {OUT}",
        ),
        (
            "gemma4_text",
            window(16),
            f"kv_window: this model has layers that read keys of others; give kv_sinks 0, or {OUT}",
        ),
        ("gemma4_text", grow_queries, f"use_logn_attn: this model has layers that read keys of others; {OUT}"),
        (
            "llama",
            window(4096),
            "kv_window: found 4096 and kv_sinks 4, expected at most 512 together, the length that the model was "
            "trained for",
        ),
    ],
)
def test_windows(family: str, change: Callable[[DecoderSpec], DecoderSpec], told: str) -> None:
    spec, _ = build(tiny_config(get(family)))
    with pytest.raises(UsageError) as error:
        change(spec)
    assert str(error.value) == told
