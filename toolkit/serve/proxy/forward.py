"""A request on its way to a node and the answer on its way back, byte by byte as it comes."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx2 as httpx
from pydantic_core import from_json
from starlette.requests import Request
from starlette.types import Send

from toolkit.base.lazy_dataclass import dataclass
from toolkit.serve.generation.read import read_body
from toolkit.serve.http.access.users import HEADER as USER
from toolkit.serve.http.access.users import asks_for, current_user, header_of
from toolkit.serve.http.errors import BUSY, OLLAMA, ApiError
from toolkit.serve.http.handed import HEADER as KV
from toolkit.serve.http.handed import Handed
from toolkit.serve.http.replies import Reply, event_of_error, line, send_error
from toolkit.serve.http.request_ids import HEADER, current
from toolkit.serve.http.sharing.lanes import Lanes
from toolkit.serve.ollama.fields import served_as
from toolkit.serve.proxy.ask import OddAnswer, check, plain
from toolkit.serve.proxy.nodes import ELSEWHERE, NO_FAULT, Node
from toolkit.serve.proxy.strategies import sticky

if TYPE_CHECKING:
    from toolkit.serve.proxy.state import ProxyState

logger = logging.getLogger("toolkit.proxy")
OWN_HEADERS = frozenset(  # of one connection, not of the request or answer; and what httpx makes itself
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade host "
    b"content-length expect".split()
)
ANSWER_HEADERS = OWN_HEADERS | {b"date", b"server"}  # left out of an answer: this server's own stand in it already
LEFT_IN = frozenset({b"content-type", b"content-encoding"})  # a body makes no sense without them
VIA = b"via"  # each proxy on a request's way adds itself
MOST_HOPS = 8
KEY_HEADERS = (b"authorization", b"x-api-key")
OF_ONE = "/v1/models/"  # what there is to say of the model that is named behind it
INTERACTIVE = "/v1/chat/interactive"  # its streams are JSON lines, which LMDeploy calls events


@dataclass(frozen=True)
class Incoming:
    """A client's request. ``data``: its body as JSON has it, None where it is none. ``owner``: whose it is, as a node
    is told; "" where the node has to see for itself."""

    method: str
    target: str  # path and query
    headers: list[tuple[bytes, bytes]]
    body: bytes
    data: Any
    owner: str = ""

    @staticmethod
    async def of(raw: Request, target: str, lanes: Lanes, node_key: str | None) -> Incoming:
        """The whole of a request. ``node_key``: a proxy before this one that has it may say whose it is."""
        body = await read_body(raw)
        data = await lanes.run(partial(_json_or_none, body), len(body)) if body else None
        owner = asks_for(raw.scope, current_user(), node_key)
        return Incoming(raw.method, target, raw.headers.raw, body, data, owner)

    def model_among(self, names: Sequence[str]) -> str | None:
        """What it asks for, as it is called there; None where it does not say."""
        data = self.data if isinstance(self.data, dict) else {}
        found = data.get("model", data.get("name") if self.path == "/api/show" else None)
        if self.path.startswith(OF_ONE):
            found = self.path.removeprefix(OF_ONE)
        if not isinstance(found, str) or not found:
            return None
        return served_as(found, names) if self.path.startswith(OLLAMA) else found

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def session(self) -> Any:
        """Whose history a node keeps: it has to go to the same one. LMDeploy's clients say -1 for none."""
        kept = self.path == INTERACTIVE and isinstance(self.data, dict)
        found = self.data.get("session_id") if kept else None
        return None if found == -1 else found

    @property
    def via(self) -> list[bytes]:
        """The proxies that it has come through."""
        values = b",".join(value for name, value in self.headers if name.lower() == VIA)
        return [hop.strip() for hop in values.split(b",") if hop.strip()]

    def passed_on(self, trusted: bool, without: Iterable[bytes]) -> list[tuple[bytes, bytes]]:
        """The headers for a server that answers it, and whose it is; not those ``without``, in lower case, nor what is
        this connection's. ``trusted``: as ``header_of`` has it."""
        own = {*OWN_HEADERS, USER.encode(), *without, *of_this_connection(self.headers)}
        more = [header_of(current_user(), self.owner, trusted)]
        if (named := current()) is not None:  # its client has sent none, or one that may not stand in a log
            own.add(HEADER.encode())
            more.append((HEADER.encode(), named.id.encode()))
        return [*((name, value) for name, value in self.headers if name.lower() not in own), *more]


def _json_or_none(body: bytes) -> Any:
    """A body as far as it has to be known here; what is no JSON is the node's to refuse."""
    try:
        return from_json(body)
    except ValueError:
        return None


def of_this_connection(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """Names of headers that a message's ``Connection`` says are for the next one alone (RFC 9110, 7.6.1), in lower
    case."""
    values = b",".join(value for name, value in headers if name.lower() == b"connection")
    return frozenset(word.strip().lower() for word in values.split(b",")) - LEFT_IN


def is_stream(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether an answer with these is one of events."""
    return any(k == b"content-type" and v.startswith(b"text/event-stream") for k, v in headers)


def last_words(error: ApiError, path: str, events: bool = True) -> bytes:
    """What ends an answer that grows, whatever it was in the middle of: ``error`` as the API of ``path`` tells it."""
    told = error.envelope_at(path)
    return b"\n\n" + (event_of_error(told) if events and path != INTERACTIVE else line(told))


class NodeFailed(Exception):
    """A node did not answer. ``sent``: whether it may have begun to work on the request."""

    def __init__(self, why: str, sent: bool) -> None:
        super().__init__(why)
        self.sent = sent


class Forward(Reply):
    """The answer of one node; of another where the first fails before its first byte.

    A request that never reached a node goes to the next one. One that may have begun to run goes to one other, so that
    a request which ends its node does not end them all.
    """

    def __init__(self, state: ProxyState, request: Incoming) -> None:
        super().__init__()
        self._state = state
        self._request = request

    async def produce(self, send: Send) -> None:
        try:
            self._check_way()
            await self._try_nodes(send)
        except ApiError as error:
            self._state.metrics.requests.labels("", str(error.status)).inc()
            await send_error(send, error, error.envelope_at(self._request.path))

    @property
    def _hop(self) -> bytes:
        return b"1.1 toolkit-" + self._state.id.encode()

    def _check_way(self) -> None:
        """Raise ApiError for a request that has been here, or has come through too many proxies."""
        via = self._request.via
        if self._hop in via:
            raise ApiError(508, "this request has been here: a node of this proxy leads back to it", code="proxy_loop")
        if len(via) > MOST_HOPS:
            text = f"via: expected at most {MOST_HOPS} proxies on a request's way, found {len(via)}; is there a loop?"
            raise ApiError(508, text, code="proxy_loop")

    async def _try_nodes(self, send: Send) -> None:
        state, request = self._state, self._request
        names = state.nodes.models()
        model = request.model_among(names) or next(iter(names), None)
        left, tries, why = state.candidates(model), 0, ""
        lender = None
        if state.apart is not None:
            lending, left = state.apart.split(left)
            if lending and state.apart.wants(request):
                lender = await state.apart.lent(lending, request.data, self._lent)
        while left and tries < 2:
            if why:
                state.metrics.retries.inc()
            takers = state.apart.takers(left) if state.apart is not None and lender is not None else []
            node = self._choose(takers or left)
            left = [other for other in left if other is not node]
            again = bool(left) and tries == 0
            with state.running(node) as run:
                try:
                    async with self._asked(node, await self._source(node, lender)) as reply:
                        run.status = reply.status_code
                        if reply.status_code in ELSEWHERE and again:
                            why, tries = f"HTTP {reply.status_code}", tries + 1
                            if reply.status_code not in NO_FAULT and BUSY not in reply.headers:
                                node.failed(why, state.clock())
                            continue
                        await self._pass_on(reply, node, send)
                        return
                except NodeFailed as error:
                    run.status = 0
                    node.failed(str(error), state.clock())
                    logger.warning("%s: %s", node.url, error)
                    why, tries = str(error), tries + error.sent
        raise ApiError(503, f"no node could answer; the last one: {why}", code="no_node")

    def _choose(self, nodes: list[Node]) -> Node:
        if (session := self._request.session) is not None:
            return sticky(nodes, session)
        return self._state.strategy(nodes, self._request.data, self._state.clock())

    async def _lent(self, node: Node) -> bool:
        """Have a node compute the prompt alone."""
        try:
            with self._state.running(node) as run:
                async with self._asked(node, Handed(lend=True)) as reply:
                    run.status = reply.status_code
                    pieces = reply.aiter_raw()
                    while await _next(pieces):
                        pass
                    return reply.status_code == 200
        except NodeFailed as error:
            node.failed(str(error), self._state.clock())
            logger.warning("%s: a prompt is computed elsewhere: %s", node.url, error)
            return False

    async def _source(self, node: Node, lender: Node | None) -> Handed | None:
        """What a node is told of who has computed the prompt."""
        if lender is None or self._state.apart is None:
            return None
        engine_id = await self._state.apart.linked(node, lender)
        return Handed(source=engine_id) if engine_id else None

    def _asked(self, node: Node, handed: Handed | None = None) -> AbstractAsyncContextManager[httpx.Response]:
        """The answer of a node. Raises NodeFailed."""
        keys = KEY_HEADERS if self._state.settings.node_key else ()
        headers = self._request.passed_on(node.trusted, (VIA, KV.encode(), *keys))
        headers.append((VIA, b", ".join([*self._request.via, self._hop])))
        headers += [(k.lower().encode(), v.encode()) for k, v in self._state.key_headers(node).items()]
        if handed is not None:
            headers.append(handed.header())
        request = self._state.http.build_request(
            self._request.method, node.url + self._request.target, headers=headers, content=self._request.body
        )
        return _exchange(self._state.http, request)

    async def _pass_on(self, reply: httpx.Response, node: Node, send: Send) -> None:
        """From the first byte on it is this node's answer, whatever happens to it."""
        own = ANSWER_HEADERS | of_this_connection(reply.headers.raw)
        headers = [(k.lower(), v) for k, v in reply.headers.raw if k.lower() not in own]
        streams = is_stream(headers)
        length = reply.headers.get("content-length")
        if length is not None:
            headers.append((b"content-length", length.encode()))
        pieces = reply.aiter_raw()
        first = await _next(pieces)
        await send({"type": "http.response.start", "status": reply.status_code, "headers": headers})
        try:
            while first:
                await send({"type": "http.response.body", "body": first, "more_body": True})
                first = await _next(pieces)
        except NodeFailed as error:
            node.failed(str(error), self._state.clock())
            self._state.metrics.broken.inc()
            logger.warning("%s: an answer broke off: %s", node.url, error)
            if not streams:
                return  # the connection is closed: half an answer must not be taken for a whole one
            await self._end_stream(
                send, ApiError(502, "the node that sent this answer is gone; ask again", code="node_lost")
            )
            return
        await send({"type": "http.response.body", "body": b""})

    async def _end_stream(self, send: Send, error: ApiError) -> None:
        """End a stream by one more event, which says why."""
        last = last_words(error, self._request.path)
        await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def _exchange(http: httpx.AsyncClient, request: httpx.Request) -> AsyncIterator[httpx.Response]:
    """The answer to one request to a node. Raises NodeFailed where there is none."""
    try:
        reply = await http.send(request, stream=True)
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
        raise NodeFailed(_why(error), sent=False) from error
    except httpx.HTTPError as error:
        raise NodeFailed(_why(error), sent=True) from error
    try:
        try:
            check(reply)
        except OddAnswer as error:
            raise NodeFailed(str(error), sent=True) from None
        yield reply
    finally:
        with suppress(httpx.HTTPError):
            await reply.aclose()


async def _next(pieces: AsyncIterator[bytes]) -> bytes:
    """The next bytes that are any, b"" at the end."""
    try:
        while True:
            if piece := await anext(pieces):
                return piece
    except StopAsyncIteration:
        return b""
    except httpx.HTTPError as error:
        raise NodeFailed(_why(error), sent=True) from error


def _why(error: Exception) -> str:
    return plain(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
