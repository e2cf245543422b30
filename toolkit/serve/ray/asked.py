"""A request on its way from the front to a replica, and what of it says which replica is best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolkit.base.lazy_dataclass import dataclass
from toolkit.serve.http.in_process import scope_of
from toolkit.serve.proxy.forward import KEY_HEADERS, Incoming
from toolkit.serve.proxy.strategies import prefixes

SESSION = b"x-session-id"  # as Ray Serve calls it


@dataclass(frozen=True)
class Asked:
    """``prefixes``: digests of the beginnings of its prompt, the shortest first; ``session``: its requests are best at
    one replica, "" = it has none; ``avoid``: replicas that are to have it only where there is no other."""

    method: str
    target: str  # path and query
    headers: list[tuple[bytes, bytes]]
    body: bytes = b""
    prefixes: Sequence[bytes] = ()
    session: str = ""
    avoid: frozenset[str] = frozenset()

    @staticmethod
    def of(incoming: Incoming) -> Asked:
        """A client's request, without its key, and with whose it is."""
        headers, known = incoming.passed_on(True, KEY_HEADERS), prefixes(incoming.data)
        return Asked(incoming.method, incoming.target, headers, incoming.body, known, _session(incoming))

    def scope(self) -> dict[str, Any]:
        """What an ASGI application is called with. The front, which has looked at the key, is the client."""
        length = (b"content-length", str(len(self.body)).encode())
        headers = [*((k.lower(), v) for k, v in self.headers), *([length] if self.body else [])]
        return scope_of(self.method, self.target, headers, ("127.0.0.1", 1))


def _session(incoming: Incoming) -> str:
    """LMDeploy's session_id, whose history a replica keeps; a header; OpenAI's prompt_cache_key."""
    if incoming.session is not None:
        return str(incoming.session)
    for name, value in incoming.headers:
        if name.lower() == SESSION:
            return value.decode("latin-1")[:256]
    key = incoming.data.get("prompt_cache_key") if isinstance(incoming.data, dict) else None
    return key[:256] if isinstance(key, str) else ""
