"""Mean keys of each layer, which are taken off keys before few bits round them.

A softmax does not change where all scores of a query do by the same, so that nothing has to be added again. The mean
of keys that few bits round would else take most of their range.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import ToolkitError
from toolkit.models.rope import inv_freq
from toolkit.models.spec import AttentionSpec, DecoderSpec, Mixer
from toolkit.runners.base import Runner
from toolkit.runners.native.tensors import Floats

SLOW = 2048  # tokens over which a pair of numbers turns by less than a quarter where its mean is to be of use


def suits(mixer: AttentionSpec) -> bool:
    """Whether nothing but the softmax sees the mixer's scores, and from one place each."""
    return mixer.sinks is None and not mixer.softcap and not mixer.sink_tokens


def read_means(spec: DecoderSpec, text: str) -> list[Floats | None]:
    """Of each mixer that keeps rows of tokens (``spec.paged()``), heads one behind the other, what ``write_means``
    wrote; None where there is none. Raises ToolkitError for a text of another model."""
    mixers = _that_keep_rows(spec)
    sizes = [m.kv_heads * m.head_dim if m.kind == "attention" else 0 for m in mixers]
    if not text:
        return [None] * len(sizes)
    try:
        numbers = np.frombuffer(base64.b64decode(text, validate=True), np.float16).astype(np.float32)
    except ValueError:
        numbers = np.zeros(0, np.float32)
    if numbers.size != sum(sizes) or not np.isfinite(numbers).all():
        raise ToolkitError("mean keys: not of this model; run `tool convert --quant-policy auto` again")
    parts = np.split(numbers, np.cumsum(sizes)[:-1])
    return [
        part if mixer.kind == "attention" and suits(mixer) else None for part, mixer in zip(parts, mixers, strict=True)
    ]


def write_means(means: Sequence[Floats]) -> str:
    """As manifests and options have them: float16 in base64."""
    joined = np.concatenate([mean.ravel() for mean in means]) if means else np.zeros(0)
    return base64.b64encode(np.clip(joined, -65504, 65504).astype(np.float16).tobytes()).decode()


def key_sums(runner: Runner, tokens: int) -> list[Floats]:
    """Of each layer that keeps rows of tokens the sum of the keys in the first ``tokens`` places of an unrounded
    cache, heads one behind the other (empty where rows are no keys)."""
    spec, size = runner.spec, runner.options.block_size
    wide = runner.dtype == "float32"
    found: list[Floats] = []
    places = [0] * len(spec.cache_groups)
    blocks = {
        group: [np.frombuffer(runner.export_block(group, i), np.uint8) for i in range(-(-tokens // size))]
        for group in {group for _, group, _ in spec.paged()}
    }
    for _, group, kept in spec.paged():
        width = -(-kept.head_dim // 16) * 16
        part = size * width * (4 if wide else 2)
        if kept.kind == "latent":
            places[group] += part
            found.append(np.zeros(0, np.float32))
            continue
        total = np.zeros((kept.heads, kept.head_dim), np.float32)
        for head in range(kept.heads):
            at = places[group] + 2 * part * head
            rows = [_keys(block[at : at + part], runner.dtype, width) for block in blocks[group]]
            total[head] = np.concatenate(rows)[:tokens, : kept.head_dim].sum(0)
        places[group] += 2 * part * kept.heads
        found.append(total)
    return found


def slow_parts(spec: DecoderSpec, means: Sequence[Floats]) -> list[Floats]:
    """The means without what turns with the position: at other positions than those measured it is another."""
    mixers = _that_keep_rows(spec)
    found = []
    for mixer, mean in zip(mixers, means, strict=True):
        slow = mean.copy()
        if mixer.kind == "attention" and mixer.rope is not None:
            frequencies, _ = inv_freq(mixer.rope, False)
            fast = np.asarray(frequencies) * SLOW > np.pi / 2
            slow[:, : 2 * len(fast)][:, np.tile(fast, 2)] = 0
        found.append(slow)
    return found


def _that_keep_rows(spec: DecoderSpec) -> list[Mixer]:
    """The mixers of ``spec.paged()``."""
    return [mixer for _, mixer in spec.mixers() if (kept := mixer.keeps()) is not None and kept.kind != "state"]


def _keys(cells: NDArray[np.uint8], dtype: str, width: int) -> Floats:
    """Keys [tokens, width] of cells of 16 tokens as they are stored (``CellLayout`` in ops.h)."""
    if dtype == "float32":
        return cells.view(np.float32).reshape(-1, width, 16).swapaxes(1, 2).reshape(-1, width)
    if dtype == "float16":
        halves = cells.view(np.float16).astype(np.float32)
    else:
        halves = (cells.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return halves.reshape(-1, width // 2, 16, 2).transpose(0, 2, 1, 3).reshape(-1, width)
