"""How large a picture is, by the first bytes of its file: what decoding it will cost is known before it begins.

Only as much is read as it takes. Pillow, in a confined process, has the last word: it refuses a file in which it finds
more pixels than were counted here.
"""

from __future__ import annotations

import struct

from toolkit.base.lazy_dataclass import dataclass

SEGMENTS = 200  # of a JPEG that are stepped over on the way to its size
BEGINNING = 1 << 18  # bytes within which sizes are looked for
# Bytes that decoding holds at most for a pixel, measured: the picture, the same in RGB, and what the format's reader
# has beside them: coefficients (progressive JPEG), canvases (WebP), a strip that is the whole picture (TIFF).
COSTS = {"PNG": 9, "JPEG": 11, "GIF": 9, "BMP": 9, "WEBP": 17, "TIFF": 17}
FRAME = b"\xc0\xc1\xc2\xc3\xc5\xc6\xc7\xc9\xca\xcb\xcd\xce\xcf"  # markers of JPEG with a size
BARE = b"\x01\xd0\xd1\xd2\xd3\xd4\xd5\xd6\xd7\xd8\xff"  # those without a length
TAGS = {3: "H", 4: "I"}  # TIFF's types of a width


@dataclass(frozen=True)
class Header:
    """``format``: Pillow's name. ``size``: (width, height)."""

    format: str
    size: tuple[int, int]

    @property
    def pixels(self) -> int:
        return self.size[0] * self.size[1]

    @property
    def cost(self) -> int:
        """Bytes that decoding it holds at most."""
        return self.pixels * COSTS[self.format]


def header(data: bytes) -> Header | None:
    """Of a file, or of its beginning; None where its size is not found."""
    data = data[:BEGINNING]
    try:
        if data.startswith(b"\x89PNG\r\n\x1a\n") and data[12:16] == b"IHDR":
            return Header("PNG", struct.unpack_from(">II", data, 16))
        if data[:6] in (b"GIF87a", b"GIF89a"):
            return _gif(data)
        if data.startswith(b"\xff\xd8"):
            return _jpeg(data)
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            return _webp(data)
        if data.startswith(b"BM"):
            return _bmp(data)
        if data[:4] in (b"II*\0", b"MM\0*"):
            return _tiff(data)
    except struct.error:  # it ends before
        pass
    return None


def _gif(data: bytes) -> Header:
    """The screen, or the first picture on it where that is larger."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    while data[at : at + 1] == b"!":  # extensions
        at += 2
        while length := struct.unpack_from("B", data, at)[0]:
            at += 1 + length
        at += 1
    left, top, wide, high = struct.unpack_from("<HHHH", data, at + 1)
    return Header("GIF", (max(width, left + wide), max(height, top + high)))


def _jpeg(data: bytes) -> Header | None:
    at = 2
    for _ in range(SEGMENTS):
        mark, kind = struct.unpack_from("BB", data, at)
        if mark != 0xFF:
            return None
        if kind in BARE:
            at += 1 if kind == 0xFF else 2
            continue
        if kind in FRAME:
            height, width = struct.unpack_from(">HH", data, at + 5)
            return Header("JPEG", (width, height))
        at += 2 + struct.unpack_from(">H", data, at + 2)[0]
    return None


def _webp(data: bytes) -> Header | None:
    kind = data[12:16]
    if kind == b"VP8X":
        bits = int.from_bytes(data[24:30], "little")
        return Header("WEBP", ((bits & 0xFFFFFF) + 1, (bits >> 24) + 1)) if len(data) >= 30 else None
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return Header("WEBP", ((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1))
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return Header("WEBP", (width & 0x3FFF, height & 0x3FFF))
    return None


def _bmp(data: bytes) -> Header:
    if struct.unpack_from("<I", data, 14)[0] == 12:
        return Header("BMP", struct.unpack_from("<HH", data, 18))
    width, height = struct.unpack_from("<ii", data, 18)
    return Header("BMP", (abs(width), abs(height)))


def _tiff(data: bytes) -> Header | None:
    order = "<" if data[:1] == b"I" else ">"
    (at,) = struct.unpack_from(order + "I", data, 4)
    (count,) = struct.unpack_from(order + "H", data, at)
    found: dict[int, int] = {}
    for entry in range(at + 2, at + 2 + 12 * count, 12):
        tag, kind, values = struct.unpack_from(order + "HHI", data, entry)
        if tag in (256, 257) and values == 1 and kind in TAGS:
            (found[tag],) = struct.unpack_from(order + TAGS[kind], data, entry + 8)
        if tag > 257:
            break
    return Header("TIFF", (found[256], found[257])) if len(found) == 2 else None
