"""A KV block of one cache group as bytes, sealed: for files, and for whatever else carries bytes between engines.

``MAGIC``, the seal's own bytes, then the head and the numbers as a runner exports them. Whoever opens one knows what it
asked for, so the whole head is compared and nothing of it is interpreted.
"""

from __future__ import annotations

import hmac
import secrets
import stat
import struct
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from xxhash import xxh3_128

from toolkit.base.lazy_dataclass import dataclass
from toolkit.engine.cache.prefix import shows
from toolkit.errors import UsageError

if TYPE_CHECKING:
    from toolkit.engine.sequence import Sequence

Buffer = bytes | bytearray | memoryview
_HEAD = struct.Struct("<32s32s32sIIIQ")
_DIGEST = 16
_NONCE, _TAG = 12, 16
_SECRET = 32


@dataclass(frozen=True)
class Block:
    """Which block it is. ``key``: of ``prefix.py``, of all tokens up to its end; ``parent``: of the block before it.
    ``tokens``: its own, int32; ``pictures``: digests of those that stand among them."""

    group: int
    key: bytes
    parent: bytes
    tokens: bytes
    pictures: bytes

    def head(self, model: bytes, size: int) -> bytes:
        """What stands before ``size`` bytes of numbers. ``model``: a digest of all that they depend on beside the
        tokens."""
        counts = (self.group, len(self.tokens), len(self.pictures), size)
        return _HEAD.pack(model, self.key, self.parent, *counts) + self.tokens + self.pictures

    def head_size(self) -> int:
        return _HEAD.size + len(self.tokens) + len(self.pictures)


def block_of(seq: Sequence, group: int, entry: int, size: int) -> Block:
    """A request's block ``entry``, of ``size`` tokens, whose key is known."""
    start, stop = entry * size, (entry + 1) * size
    tokens, pictures = seq.tokens[start:stop].tobytes(), shows(seq.spans, start, stop)
    return Block(group, seq.keys[entry], seq.parent(entry), tokens, pictures)


class Seal(Protocol):
    """How bytes are made safe from changes. ``extra``: bytes that it adds; ``name``: tells keys apart, "" without."""

    extra: int
    name: str

    def called(self, key: bytes) -> str:
        """A name for the block ``key`` that others may read, 64 hexadecimal digits."""

    def close(self, head: bytes, data: Buffer) -> list[Buffer]:
        """Both sealed, to be written one part behind the other."""

    def open(self, sealed: memoryview, head: bytes) -> memoryview | None:
        """The numbers behind ``head``; None for what was not sealed so, or holds another head."""


class Digest:
    """An XXH3 of 128 bits before all that it is of. It tells damage. Who may write the files can make any digest, so
    it is a fast one: SHA-256 was two thirds of the work of keeping a block, and half of that of bringing it back."""

    MAGIC = b"TKKV\r\n\x1a\x03"
    extra = len(MAGIC) + _DIGEST
    name = ""

    def called(self, key: bytes) -> str:
        return key.hex()

    def close(self, head: bytes, data: Buffer) -> list[Buffer]:
        digest = xxh3_128(head)
        digest.update(data)
        return [self.MAGIC + digest.digest() + head, data]

    def open(self, sealed: memoryview, head: bytes) -> memoryview | None:
        behind, stop = self.extra, self.extra + len(head)
        same = sealed[: len(self.MAGIC)] == self.MAGIC and sealed[behind:stop] == head
        if not same or xxh3_128(sealed[behind:]).digest() != sealed[len(self.MAGIC) : behind]:
            return None
        return sealed[stop:]


class Cipher:
    """AES-256-GCM: who has not the key can neither read nor make one, nor tell from its name what it holds."""

    MAGIC = b"TKKV\r\n\x1a\x02"
    extra = len(MAGIC) + _NONCE + _TAG

    def __init__(self, secret: bytes) -> None:
        self._names = self._made(secret, b"names")
        self._key = self._made(secret, b"blocks")
        self.name = self._made(secret, b"folder").hex()[:16]

    @staticmethod
    def _made(secret: bytes, use: bytes) -> bytes:
        return blake2b(b"", key=secret, person=b"toolkit " + use.ljust(8)[:8], digest_size=32).digest()

    @cached_property
    def _aes(self) -> Any:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(self._key)

    def called(self, key: bytes) -> str:
        return blake2b(key, key=self._names, digest_size=32).hexdigest()

    def close(self, head: bytes, data: Buffer) -> list[Buffer]:
        nonce = secrets.token_bytes(_NONCE)
        return [self.MAGIC + nonce, self._aes.encrypt(nonce, b"".join([head, data]), self.MAGIC)]

    def open(self, sealed: memoryview, head: bytes) -> memoryview | None:
        from cryptography.exceptions import InvalidTag

        at = len(self.MAGIC)
        if len(sealed) < self.extra + len(head) or sealed[:at] != self.MAGIC:
            return None
        try:
            plain = self._aes.decrypt(sealed[at : at + _NONCE], sealed[at + _NONCE :], self.MAGIC)
        except InvalidTag:
            return None
        return memoryview(plain)[len(head) :] if hmac.compare_digest(plain[: len(head)], head) else None


def read_secret(flag: str, file: Path) -> bytes:
    """The 32 bytes of a key file, as they are or as 64 hexadecimal digits. Raises UsageError for anything else, and for
    a file that others may read."""
    make = f"make one: (umask 077; openssl rand -hex {_SECRET} > {file})"
    try:
        with file.open("rb") as opened:
            mode = stat.S_IMODE(file.stat().st_mode)
            found = opened.read(4 * _SECRET)
    except OSError as error:
        raise UsageError(f"{flag}: {file}: cannot be read: {error.strerror}; {make}") from error
    if mode & 0o077:
        raise UsageError(f"{flag}: {file}: others may read it (mode {mode:04o}); chmod 600 it, or {make}")
    if len(found) != _SECRET:
        try:
            found = bytes.fromhex(found.decode("ascii").strip())
        except ValueError:
            found = b""
    if len(found) != _SECRET:
        raise UsageError(f"{flag}: {file}: expected {_SECRET} bytes, or twice as many hexadecimal digits; {make}")
    return found
