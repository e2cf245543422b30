"""The servers behind a proxy: which there are, what they serve, and which of them work."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import orjson

from toolkit.artifacts.json_file import read_json_object
from toolkit.artifacts.output.stage import write_file
from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.record import read
from toolkit.configs.checks import shown
from toolkit.errors import ToolkitError, UsageError
from toolkit.serve.model_cards import MOST_NAME, good_name
from toolkit.serve.proxy.ask import MOST_MODELS

ELSEWHERE = (429, 502, 503, 504, 508)  # answers of a node that another may do better
NO_FAULT = (429, 508)  # of these, those that say nothing against the node
LATENCIES = 15  # of the last requests, that a node is judged by
OLD_S = 120.0  # after which a latency says nothing any more
FIRST_PAUSE_S = 0.5  # before a node that failed is looked at again; doubles with every failure
LONGEST_PAUSE_S = 30.0
UNSEEN = "not looked at yet"  # why a new node gets no requests
ITSELF = "this is the proxy itself"  # why one never gets any
LEADS_BACK = "a proxy that leads back to this one"  # likewise
MOST_NODES = 1024
MOST_URL = 300  # characters


@dataclass(frozen=True)
class Kept:
    """What of a node is kept over a restart: fields of Node."""

    models: list[str]
    speed: float | None = None
    lease: float | None = None
    trusted: bool = True  # absent in older files, which had the operator's nodes alone


@dataclass(frozen=True)
class _State:
    nodes: dict[str, Kept]


@dataclass(frozen=True)
class Lends:
    """The engine of a node that lends blocks, new at each start, and what another node is to be told of it."""

    engine_id: str
    endpoint_info: str


@dataclass
class Node:
    """``name``: what metrics call it, "" = its URL. ``speed``: how much it does in a time, in any measure that is the
    same for all; None = not known. ``lease``: seconds after which it is forgotten unless it is added again; None =
    never. ``trusted``: the operator has named it, not a client. ``proxies``: ids of the proxies that it leads to, its
    own first where it is one. ``role``: LMDeploy's Prefill or Decode, "" = both; ``lends``: of the former;
    ``engine_id``: new at each start, "" where it has no such role. ``down``: why it gets no requests. ``failures``: in
    a row; a request that works ends the row."""

    url: str
    models: list[str] = field(default_factory=list)
    name: str = ""
    speed: float | None = None
    lease: float | None = None
    trusted: bool = False
    unfinished: int = 0
    proxies: list[str] = field(default_factory=list)
    role: str = ""
    lends: Lends | None = None
    engine_id: str = ""
    down: str | None = None
    failures: int = 0
    look_at: float = 0.0  # when its health is looked at next
    expires: float = float("inf")
    latency: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=LATENCIES))  # (when, seconds)

    @property
    def label(self) -> str:
        return self.name or self.url

    @property
    def loops(self) -> bool:
        """Whether a request to it would come back here."""
        return self.down in (ITSELF, LEADS_BACK)

    def failed(self, why: str, now: float) -> None:
        """It gets no requests until it is found healthy, for which it has the longer the more often it failed."""
        self.down = why
        self.look_at = now + min(FIRST_PAUSE_S * 2 ** min(self.failures, 16), LONGEST_PAUSE_S)
        self.failures += 1

    def worked(self, seconds: float, now: float) -> None:
        """A request to it ended well after ``seconds``."""
        self.failures = 0
        self.latency.append((now, seconds))

    def observed(self, now: float) -> float | None:
        """Mean seconds of its last requests, None where there were none of late."""
        recent = [seconds for when, seconds in self.latency if now - when < OLD_S]
        return sum(recent) / len(recent) if recent else None

    def status(self) -> dict[str, Any]:
        """LMDeploy's fields, and whether it works."""
        latency = [round(seconds, 4) for _, seconds in self.latency]
        told = {"models": self.models, "unfinished": self.unfinished, "latency": latency, "speed": self.speed}
        told |= {"role": self.role} if self.role else {}
        return {**told, "healthy": self.down is None, "reason": self.down, "failures": self.failures}

    def kept(self) -> Kept:
        return Kept(self.models, self.speed, self.lease, self.trusted)


class Nodes:
    """All nodes, by URL. ``file``: where they are kept over a restart. ``on_end``: gets each that is forgotten."""

    def __init__(self, file: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = file
        self._clock = clock
        self._nodes: dict[str, Node] = {}
        self.on_end: Callable[[Node], object] = lambda node: None
        if file is not None and file.exists():
            for url, kept in _read(file).items():
                self._put(url, kept)

    def __iter__(self) -> Iterator[Node]:
        return iter(list(self._nodes.values()))

    def find(self, url: str) -> Node | None:
        return self._nodes.get(url.rstrip("/"))

    def add(
        self,
        url: str,
        models: list[str] | None = None,
        speed: float | None = None,
        lease: float | None = None,
        trusted: bool = False,
    ) -> Node:
        """A node, new or once more; what is None stays as it was, and so does trust. It is looked at now.

        Raises UsageError.
        """
        url = checked(url)
        _check_names(models or [])
        before = self._nodes.get(url)
        if before is None and len(self._nodes) >= MOST_NODES:
            raise UsageError(f"url: there are {MOST_NODES:,} nodes already; remove some")
        kept = None if before is None else before.kept()
        if before is not None:
            models, speed = (before.models if models is None else models), (before.speed if speed is None else speed)
            trusted = trusted or before.trusted
        node = self._put(url, Kept(models or [], speed, lease, trusted))
        if node.kept() != kept:
            self._write()
        return node

    def remove(self, url: str) -> bool:
        """Whether there was one."""
        found = self._nodes.pop(url.rstrip("/"), None)
        if found is not None:
            self.on_end(found)
            self._write()
        return found is not None

    def drop_expired(self) -> None:
        """Forget those whose lease is over."""
        now = self._clock()
        for node in list(self._nodes.values()):
            if node.expires < now:
                self.remove(node.url)

    def serving(self, model: str | None) -> list[Node]:
        """Those that serve ``model`` (None: whatever), the ones that work; where none does, all of them."""
        found = [n for n in self._nodes.values() if (model is None or model in n.models) and not n.loops]
        return [n for n in found if n.down is None] or sorted(found, key=lambda n: n.failures)

    def models(self) -> list[str]:
        """What can be asked for, each name once. Any thread may ask."""
        return list(dict.fromkeys(name for node in self if not node.loops for name in node.models))

    def proxies(self) -> list[str]:
        """Ids of the proxies that requests may come to from here."""
        return list(dict.fromkeys(name for node in self._nodes.values() if not node.loops for name in node.proxies))

    def _put(self, url: str, kept: Kept) -> Node:
        node = self._nodes.setdefault(url, Node(url, down=UNSEEN))
        node.models, node.speed, node.lease, node.trusted = kept.models, kept.speed, kept.lease, kept.trusted
        node.expires = float("inf") if kept.lease is None else self._clock() + kept.lease
        node.look_at = self._clock()
        return node

    def _write(self) -> None:
        if self._file is not None:
            state = _State({node.url: node.kept() for node in self._nodes.values()})
            with write_file(self._file) as scratch:
                scratch.write_bytes(orjson.dumps(state, option=orjson.OPT_INDENT_2))


def checked(url: str, option: str = "url") -> str:
    """A node's URL as it is kept: scheme, host and port. Raises UsageError, which names ``option``, for anything
    else."""
    try:
        parts = urlsplit(url.strip())
        fair = url.isprintable() and len(url) <= MOST_URL
        good = fair and parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
        good = good and httpx.URL(url.strip()).host == parts.hostname  # it refuses hosts that urlsplit takes
        (parts.hostname or "").encode("idna")  # the system's own refuses a name with two dots in a row
    except (ValueError, httpx.InvalidURL):
        good = False
    if not good or parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise UsageError(
            f"{option}: expected the address of a server, such as http://127.0.0.1:23333, found {url!r:.200}"
        )
    return f"{parts.scheme}://{parts.netloc}"


def _check_names(models: list[str]) -> None:
    """Raise UsageError where a node is said to serve what no model can be called."""
    if len(models) > MOST_MODELS:
        raise UsageError(f"status.models: expected at most {MOST_MODELS:,} names, found {len(models):,}")
    for name in models:
        if not good_name(name):
            text = f"expected names of 1 to {MOST_NAME} visible characters, found {shown(name)}"
            raise UsageError(f"status.models: {text}")


def _read(file: Path) -> dict[str, Kept]:
    """By URL what a state file holds. Raises ToolkitError."""
    try:
        nodes = read(_State, read_json_object(file)).nodes
        for url, kept in nodes.items():
            if not all(number is None or number > 0 for number in (kept.speed, kept.lease)):
                raise ValueError(f"{url!r:.60}: speed and lease: expected numbers above 0")
            _check_names(kept.models)
    except (ValueError, UsageError) as error:
        raise ToolkitError(f"{file}: {error}; remove the file to start anew") from None
    return {checked(url): kept for url, kept in nodes.items()}
