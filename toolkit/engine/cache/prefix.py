"""Names for the content of KV blocks: chained digests of the tokens up to a block's end.

The key of block j digests the key of block j-1, the block's token ids and the pictures that stand in it, so equal keys
mean equal prefixes (BLAKE2b, 256 bits: a collision is out of reach). Whatever else changes keys and values — the rope
set, the adapter, the session where requests may not share, and what a client keeps others out by — is in the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from toolkit.engine.pictures.spans import Span


def root_key(turned_by: int, adapter: int | str, owner: str, salt: str = "") -> bytes:
    """``turned_by``: the rope set, or the length by which the request turns; ``adapter``: its number, or where keys
    outlive the engine a digest; ``owner``: "" where everybody shares, else the session whose turns share with each
    other alone; ``salt``: of requests that share with those alone that have the same."""
    within = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=32).digest() if salt else b""
    return blake2b(f"{turned_by}/{adapter}/{owner}".encode(), key=within, digest_size=32).digest()


def extend_keys(
    keys: list[bytes],
    root: bytes,
    tokens: NDArray[np.int32],
    length: int,
    block_size: int,
    spans: Sequence[Span] = (),
) -> None:
    """Append to ``keys`` those of the blocks that ``tokens[:length]`` fill and that are not in it yet. ``spans``: the
    pictures of the request, whose tokens are all alike."""
    parent = keys[-1] if keys else root
    for start in range(len(keys) * block_size, length - block_size + 1, block_size):
        stop = start + block_size
        parent = block_key(parent, tokens[start:stop], shows(spans, start, stop))
        keys.append(parent)


def block_key(parent: bytes, tokens: NDArray[np.int32], pictures: bytes = b"") -> bytes:
    """Of ``tokens`` behind the block ``parent``; ``pictures``: what ``shows`` said."""
    return blake2b(tokens.tobytes() + pictures, key=parent, digest_size=32).digest()


def shows(spans: Sequence[Span], start: int, stop: int) -> bytes:
    """Digests of the pictures of which places ``start`` to ``stop`` - 1 hold something; b"": of none."""
    return b"".join(s.picture.digest for s in spans if s.places[0] < stop and s.places[-1] >= start)
