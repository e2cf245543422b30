"""Pictures and videos that are larger than their files."""

from __future__ import annotations

import base64
import http.server
import io
import struct
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from attacking.target import Target


def black_png(number: int, side: int = 8192) -> bytes:
    """One bit a pixel, a palette with transparency; another file for each number."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", side, side, 1, 3, 0, 0, 0)
    lines = zlib.compress(bytes((1 + side // 8) * side), 9)
    colours = number.to_bytes(3, "big") + b"\xff\xff\xff"
    pieces = ((b"IHDR", head), (b"PLTE", colours), (b"tRNS", b"\x7f"), (b"IDAT", lines), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*piece) for piece in pieces)


def tiny_webp(number: int) -> bytes:
    """34 bytes of lossless WebP that are up to 8192 x 8192 pixels of one colour; another size for each number."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGBA", (8192 - number, 8192)).save(file, "WEBP", lossless=True, quality=0, method=0)
    return file.getvalue()


def _data_url(file: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


def _looking(target: Target, requests: list[list[dict[str, Any]]]) -> Iterator[str]:
    """Chats with these parts, all at once."""
    bodies = [{"messages": [{"role": "user", "content": parts}]} for parts in requests]
    with ThreadPoolExecutor(len(bodies)) as pool:
        yield from pool.map(lambda body: target.post(body, "/v1/chat/completions"), bodies)


def _images(urls: list[str]) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": url}} for url in urls]


def large_pictures(target: Target) -> Iterator[str]:
    """Four requests of twelve, each of some kilobytes and 64 million pixels."""
    yield from _looking(target, [_images([_data_url(black_png(12 * i + k)) for k in range(12)]) for i in range(4)])


def tiny_pictures(target: Target) -> Iterator[str]:
    urls = [[_data_url(tiny_webp(2 * i + k), "image/webp") for k in range(2)] for i in range(3)]
    yield from _looking(target, [_images(some) for some in urls])


def fetched_pictures(target: Target) -> Iterator[str]:
    """One of each request's pictures is another host's."""
    small = black_png(0, 8)

    class Host(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(small)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Host) as host:
        threading.Thread(target=host.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{host.server_port}/a.png"
        yield from _looking(
            target, [_images([url, *(_data_url(black_png(100 + 9 * i + k)) for k in range(3))]) for i in range(6)]
        )
        host.shutdown()


def large_videos(target: Target) -> Iterator[str]:
    """Each as many frames as it may be."""
    import av
    import numpy as np

    requests = []
    for number in range(4):
        file = io.BytesIO()
        with av.open(file, "w", format="mp4") as container:
            stream = container.add_stream("mpeg4", rate=8)
            stream.width, stream.height, stream.pix_fmt = 2560, 1440, "yuv420p"
            frame = av.VideoFrame.from_ndarray(np.full((1440, 2560, 3), number, np.uint8), format="rgb24")
            for k in range(44):
                frame.pts = k
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
        url = _data_url(file.getvalue(), "video/mp4")
        requests.append([{"type": "video_url", "video_url": {"url": url, "num_frames": 44}}])
    yield from _looking(target, requests)
