"""Fetching a picture by its URL, for clients who may not be trusted.

A server that fetches what it is told could be made to ask its own network. So a host must have public addresses alone,
the connection goes to an address that was looked at (a name may have another a moment later), every redirect is looked
at anew, and bytes, time and redirects are limited. Proxies of the environment are not used: they would hide addresses.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from urllib.parse import quote, urljoin, urlsplit

from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.option import spelled
from toolkit.errors import UsageError

REDIRECTS = 3
ADDRESSES = 4  # of a host that are tried
PIECE = 1 << 16
AGENT = "toolkit"
SPELLED = "!$%&'()*+,/:;=?@[]~"  # signs of a URL that are sent as they stand; blanks and letters beyond ASCII cannot be
# What Python's ``is_global`` lets pass: special uses, and IPv6 that a gateway turns into an IPv4 address.
NOT_PUBLIC = tuple(
    ipaddress.ip_network(text)
    for text in ("192.0.0.0/24", "::/96", "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "fec0::/10")
)


@dataclass(frozen=True)
class Fetching:
    """``private``: addresses that are not public may be asked too. ``hosts``: those alone, None = any."""

    seconds: float = 10.0
    private: bool = False
    hosts: tuple[str, ...] | None = None

    @classmethod
    def of(cls, hosts: Sequence[str] | None, private: bool, seconds: float = seconds) -> Fetching:
        """``hosts`` as a user has them. Raises UsageError for what is no list of names."""
        if hosts is not None and (isinstance(hosts, str) or not all(isinstance(host, str) for host in hosts)):
            raise UsageError(f"allowed_media_domains: expected a list of hosts, found {hosts!r:.60}")
        named = None if hosts is None else tuple(host.lower() for host in hosts)  # as those of URLs are compared
        return cls(seconds, private, named)


def fetch(
    url: str,
    most_bytes: int,
    rules: Fetching,
    what: str = "image",
    arrived: Callable[[int], None] = lambda count: None,
) -> bytes:
    """What is at an http or https URL, ``what`` messages call it. ``arrived`` is told how many bytes each piece has.
    Raises UsageError, one line, for one that may not or cannot be fetched, and what ``arrived`` raises."""
    import http.client  # with the first URL

    shown = f"{what} {shortened(url)}"
    until = time.monotonic() + rules.seconds
    for _ in range(REDIRECTS + 1):
        try:
            status, where, body = _ask(url, most_bytes, rules, until, shown, arrived)
            url = urljoin(url, where or "")
        except (OSError, http.client.HTTPException, ValueError) as e:
            raise UsageError(f"{shown}: cannot be fetched: {str(e) or type(e).__name__}") from e
        if status == 200:
            return body
        if status not in (301, 302, 303, 307, 308) or not where:
            raise UsageError(f"{shown}: cannot be fetched: the server answers {status}")
    raise UsageError(f"{shown}: cannot be fetched: more than {REDIRECTS} redirects")


def shortened(text: str) -> str:
    """A URL or path for a message: one line that is not too long."""
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= 80 else text[:77] + "…"


def _ask(
    url: str, most_bytes: int, rules: Fetching, until: float, shown: str, arrived: Callable[[int], None]
) -> tuple[int, str | None, bytes]:
    import http.client

    parts = urlsplit(url)
    host = parts.hostname
    if parts.scheme not in ("http", "https") or not host:
        raise UsageError(f"{shown}: expected an http or https URL")
    if rules.hosts is not None and host not in rules.hosts:
        named = spelled("allowed_media_domains")
        raise UsageError(
            f"{shown}: images and videos are fetched from {', '.join(rules.hosts) or 'no host'} alone ({named})"
        )
    port = parts.port or (443 if parts.scheme == "https" else 80)
    addresses = _addresses(host, port, rules, shown)
    connection = http.client.HTTPConnection(host, port)
    stream = _connected(addresses, until)
    if parts.scheme == "https":
        import ssl

        context = ssl.create_default_context()
        # It knows that 443 is no part of the Host that is sent: with one, signed URLs (S3's) are refused.
        connection = http.client.HTTPSConnection(host, port, context=context)
        stream = context.wrap_socket(stream, server_hostname=host)
    with stream, _cut_off(stream, _left(until)):
        connection.sock = stream
        path = quote((parts.path or "/") + (f"?{parts.query}" if parts.query else ""), SPELLED)
        connection.request(
            "GET", path, headers={"User-Agent": AGENT, "Accept": "image/*,video/*", "Connection": "close"}
        )
        answer = connection.getresponse()
        if answer.status != 200:
            return answer.status, answer.getheader("Location"), b""
        pieces, found = [], 0
        while piece := answer.read1(PIECE):
            found += len(piece)
            if found > most_bytes:
                raise UsageError(f"{shown}: expected at most {most_bytes:,} bytes, found more")
            arrived(len(piece))
            pieces.append(piece)
        _left(until)
        return 200, None, b"".join(pieces)


@contextmanager
def _cut_off(connected: socket.socket, seconds: float) -> Iterator[None]:
    """Inside, for ``seconds`` at most: a host that sends byte by byte would outlast a limit on single reads."""

    def cut() -> None:
        with suppress(OSError):
            connected.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _left(until: float) -> float:
    if (left := until - time.monotonic()) <= 0:
        raise TimeoutError("it takes too long")
    return left


def _connected(addresses: Sequence[tuple[str, int]], until: float) -> socket.socket:
    """A connection to the first of these that takes one; each has its share of the time left. Raises OSError."""
    *others, last = addresses
    for i, address in enumerate(others):
        with suppress(OSError):
            return socket.create_connection(address, _left(until) / (len(addresses) - i))
    return socket.create_connection(last, _left(until))


def _addresses(host: str, port: int, rules: Fetching, shown: str) -> list[tuple[str, int]]:
    """The host's first addresses, each once, where all that it has may be asked."""
    found = [info[4] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    for address in found:
        if not rules.private and not _public(str(address[0])):
            raise UsageError(
                f"{shown}: its host has an address that is not public, which is not fetched from unless "
                f"{spelled('allow_private_media')} (in Python allow_private_media=True) allows it"
            )
    return list(dict.fromkeys((str(address[0]), int(address[1])) for address in found))[:ADDRESSES]


def _public(text: str) -> bool:
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if any(address in network for network in NOT_PUBLIC):
        return False
    return address.is_global and not address.is_multicast
