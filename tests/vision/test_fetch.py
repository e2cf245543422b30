"""URLs are fetched from public hosts alone, a limited number of bytes in a limited time."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import UsageError
from toolkit.serve.options import ServerSettings
from toolkit.serve.state import image_rules
from toolkit.vision.fetch import Fetching, fetch
from toolkit.vl import load_image, load_video

LOCAL = Fetching(private=True)
PEM = Path(__file__).parents[1] / "serve" / "localhost.pem"


class Pages(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        name, _, number = self.path.strip("/").partition("-")
        if name == "to":  # redirects
            self.send_response(302)
            self.send_header("Location", f"/to-{int(number) - 1}" if number != "0" else "/bytes-5")
            self.end_headers()
        elif name == "away":
            self.send_response(307)
            self.send_header("Location", "http://127.0.0.1:1/inner")
            self.end_headers()
        elif name == "nowhere":
            self.send_response(302)
            self.send_header("Location", "http://[")
            self.end_headers()
        elif name == "bytes":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"x" * int(number))
        elif name == "slow":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"x")
            self.wfile.flush()
            self.server.wait.wait(30)  # type: ignore[attr-defined]
        elif self.path == "/%E7%8C%AB%20a.png?q=%C3%A9&k=a%2Fb":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"cat")
        elif name == "host":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.headers["Host"].encode())
        else:
            self.send_error(404)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    server.wait = threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.wait.set()  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()


def test_bytes_and_redirects(site: str) -> None:
    assert fetch(f"{site}/bytes-100", 100, LOCAL) == b"x" * 100
    assert fetch(f"{site}/to-1", 100, LOCAL) == b"xxxxx"
    refused = [("bytes-101", "at most 100 bytes"), ("to-9", "more than 3 redirects"), ("a", "answers 404")]
    for path, message in [*refused, ("nowhere", "cannot be fetched")]:
        with pytest.raises(UsageError, match=message):
            fetch(f"{site}/{path}", 100, LOCAL)


def test_blanks_and_letters_of_all_the_world_are_asked_for_as_browsers_do(site: str) -> None:
    assert fetch(f"{site}/猫 a.png?q=é&k=a%2Fb", 100, LOCAL) == b"cat"


def test_time_is_limited(site: str) -> None:
    with pytest.raises(UsageError, match="cannot be fetched"):
        fetch(f"{site}/slow", 100, Fetching(seconds=0.5, private=True))


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:9/a.png",
        "http://localhost:9/a.png",
        "http://[::1]:9/a.png",
        "http://[::ffff:10.0.0.1]/a.png",
        "http://0.0.0.0/a.png",
        "http://169.254.169.254/latest/meta-data",
        "http://10.1.2.3/a.png",
        "http://2130706433/a.png",
        "https://192.168.0.1/a.png",
        "http://192.0.0.8/a.png",
        "http://[64:ff9b::7f00:1]/a.png",
        "http://[2002:7f00:1::]/a.png",
        "http://[::7f00:1]/a.png",
        "http://[fec0::1]/a.png",
    ],
)
def test_private_addresses_are_not_asked(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "create_connection", lambda *_: pytest.fail("it was asked"))
    with pytest.raises(UsageError, match="not public") as caught:
        fetch(url, 100, Fetching())
    assert "\n" not in str(caught.value)


def test_private_addresses_are_asked_where_the_user_allows_it(site: str) -> None:
    """In Python; a server has to name the hosts too, or clients could have it ask its whole network."""
    for load in (load_image, load_video):
        with pytest.raises(UsageError, match=r"not public.* allow_private_media=True"):
            load(f"{site}/bytes-9")
        with pytest.raises(UsageError, match="found 9 bytes that are none"):
            load(f"{site}/bytes-9", allow_private_media=True)
    with pytest.raises(UsageError, match="--allow-private-media: name the hosts by --allowed-media-domains too"):
        ServerSettings(allow_private_media=True).check()
    settings = ServerSettings(allow_private_media=True, allowed_media_domains=["127.0.0.1"])
    settings.check()
    rules = image_rules(settings).fetching
    assert rules is not None and fetch(f"{site}/bytes-1", 100, rules) == b"x"
    with pytest.raises(UsageError, match=r"from 127\.0\.0\.1 alone"):
        fetch(f"{site.replace('127.0.0.1', 'localhost')}/bytes-1", 100, rules)
    with pytest.raises(UsageError, match=r"^allowed_media_domains: expected a list of hosts, found 'a\.example'"):
        Fetching.of("a.example", False)


def test_hosts_are_told_their_name_as_the_url_has_it(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the scheme's own port: a signed URL says what Host was signed."""
    assert fetch(f"{site}/host", 100, LOCAL).decode() == site.removeprefix("http://")
    server, context = ThreadingHTTPServer(("127.0.0.1", 0), Pages), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(PEM)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    connect = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", lambda _, *args: connect(server.server_address, *args))
    monkeypatch.setenv("SSL_CERT_FILE", str(PEM))
    try:
        assert fetch("https://localhost/host", 100, LOCAL) == b"localhost"
        assert fetch("https://localhost:8443/host", 100, LOCAL) == b"localhost:8443"
    finally:
        server.shutdown()
        server.server_close()


def test_an_address_that_takes_no_connection_gives_way_to_the_next(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a host has an IPv6 address and this machine no way there. None is asked before all are looked at."""
    port, public = int(site.rpartition(":")[2]), ["93.184.215.14", "93.184.215.15"]
    connect, resolve = socket.create_connection, socket.getaddrinfo
    asked: list[str] = []

    def connected(address: Any, *args: Any) -> Any:
        asked.append(address[0])
        if address[0] == public[0]:
            raise OSError("Network is unreachable")
        return connect(("127.0.0.1", port), *args)

    def resolved(host: str, port: int, *args: Any, **options: Any) -> Any:
        if host != "public.example":
            return resolve(host, port, *args, **options)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in public]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    monkeypatch.setattr(socket, "create_connection", connected)
    assert fetch("http://public.example/bytes-3", 100, Fetching()) == b"xxx" and asked == public
    public[1:] = [public[0]]
    with pytest.raises(UsageError, match="cannot be fetched: Network is unreachable"):
        fetch("http://public.example/bytes-3", 100, Fetching())
    public[1:] = ["127.0.0.1"]
    asked.clear()
    with pytest.raises(UsageError, match="not public"):
        fetch("http://public.example/bytes-3", 100, Fetching())
    assert not asked


def test_a_redirect_into_the_own_network_is_not_followed(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The public host is this machine, by another name; what it points at is looked at as well."""
    asked: list[Any] = []
    port = int(site.rpartition(":")[2])
    connect, resolve = socket.create_connection, socket.getaddrinfo

    def resolved(host: str, *args: Any, **options: Any) -> Any:
        public = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.215.14", port))]
        return public if host == "public.example" else resolve(host, *args, **options)

    def connected(address: Any, *args: Any) -> Any:
        asked.append(address)
        return connect(("127.0.0.1", port), *args)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    monkeypatch.setattr(socket, "create_connection", connected)
    with pytest.raises(UsageError, match="not public"):
        fetch(f"http://public.example:{port}/away", 100, Fetching())
    assert asked == [("93.184.215.14", port)]
    assert fetch(f"http://public.example:{port}/bytes-3", 100, Fetching()) == b"xxx"


@pytest.mark.parametrize("url", ["ftp://a/b", "http://", "https:///a", "http://a b/", "http://[::1/"])
def test_no_url_is_one_line(url: str) -> None:
    with pytest.raises(UsageError, match=r"^image ") as caught:
        fetch(url, 100, LOCAL)
    assert "\n" not in str(caught.value)


def test_hosts_may_be_listed(site: str) -> None:
    with pytest.raises(UsageError, match=r"from a.example alone \(--allowed-media-domains\)"):
        fetch(f"{site}/bytes-1", 100, Fetching(private=True, hosts=("a.example",)))
    assert fetch(f"{site}/bytes-1", 100, Fetching(private=True, hosts=("127.0.0.1",))) == b"x"
    with pytest.raises(UsageError, match="not public"):  # it is one of them, however it is spelled
        fetch("http://localHost:9/", 100, Fetching.of(["LocalHost"], False))
