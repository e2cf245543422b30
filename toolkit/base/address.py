"""The address of a server, as users type it."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from toolkit.errors import UsageError


def split_address(url: str) -> SplitResult:
    """Its parts. Raises UsageError for what is no address."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")
        good = url.startswith(("http://", "https://")) and host != b"" and parts.port != 0
    except ValueError:  # half an IPv6 address, a port that is no number or too large, a part of a name that is too long
        good = False
    if not good:
        raise UsageError(f"{url}: expected the address of a server, such as http://127.0.0.1:23333")
    return parts
