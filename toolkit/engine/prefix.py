"""Names for the content of KV blocks: chained digests of the tokens up to a block's end.

The key of block j digests the key of block j-1 and the block's token ids, so equal keys mean equal prefixes (BLAKE2b,
256 bits: a collision is out of reach). Whatever else changes keys and values — the rope set, the adapter, and the
session where requests may not share — is in the root.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray


def root_key(rope_set: int, adapter: int, owner: str) -> bytes:
    """``owner``: "" where everybody shares, else the session whose turns share with each other alone."""
    return blake2b(f"{rope_set}/{adapter}/{owner}".encode(), digest_size=32).digest()


def extend_keys(keys: list[bytes], root: bytes, tokens: NDArray[np.int32], length: int, block_size: int) -> None:
    """Append to ``keys`` those of the blocks that ``tokens[:length]`` fill and that are not in it yet."""
    parent = keys[-1] if keys else root
    for start in range(len(keys) * block_size, length - block_size + 1, block_size):
        parent = blake2b(tokens[start : start + block_size].tobytes(), key=parent, digest_size=32).digest()
        keys.append(parent)
