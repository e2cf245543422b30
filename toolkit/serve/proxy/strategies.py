"""Which node gets a request."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

from toolkit.errors import UsageError
from toolkit.serve.http.replies import as_json
from toolkit.serve.proxy.nodes import Node

PIECE = 512  # bytes of a prompt that are known as one
MOST_PIECES = 512  # of one prompt
KNOWN_PIECES = 1 << 17  # of all prompts, the ones used last
FASTEST = 1e300  # a node that says more counts as so fast: the sum of all is to be a number
UNEVEN = 2  # times as many requests as the least busy node has, and so many more, are too many for a cached prefix
PROMPT_FIELDS = ("system", "instructions", "tools", "messages", "prompt", "input", "query")

Strategy = Callable[[Sequence[Node], Any, float], Node]  # (nodes that serve the model, the body, now)


def _speeds(nodes: Sequence[Node]) -> list[float]:
    """Stated speeds; nodes without one count as the average."""
    known = [min(node.speed, FASTEST) for node in nodes if node.speed is not None]
    average = sum(known) / len(known) if known else 1.0
    return [average if node.speed is None else min(node.speed, FASTEST) for node in nodes]


def at_random(nodes: Sequence[Node], body: Any, now: float) -> Node:
    """By speed: twice the speed, twice the requests."""
    return random.choices(nodes, _speeds(nodes))[0]


def min_expected_latency(nodes: Sequence[Node], body: Any, now: float) -> Node:
    """Where the requests that are there already, and this one, are soonest done."""
    waits = [
        ((node.unfinished + 1) / speed, random.random(), node)
        for node, speed in zip(nodes, _speeds(nodes), strict=True)
    ]
    return min(waits, key=lambda wait: wait[:2])[2]


def min_observed_latency(nodes: Sequence[Node], body: Any, now: float) -> Node:
    """Where the last requests took the shortest time on average; a node without any counts as the average, and is tried
    when it has nothing to do."""
    observed = [node.observed(now) for node in nodes]
    known = [seconds for seconds in observed if seconds is not None]
    average = sum(known) / len(known) if known else 0.0
    found = []
    for node, seconds in zip(nodes, observed, strict=True):
        expected = seconds if seconds is not None else (average if node.unfinished else 0.0)
        found.append((expected, node.unfinished, random.random(), node))
    return min(found, key=lambda entry: entry[:3])[3]


class Sent:
    """Where beginnings of prompts were sent, by name."""

    def __init__(self) -> None:
        self._places: OrderedDict[bytes, str] = OrderedDict()  # the last used at the end

    def find(self, keys: Sequence[bytes], fair: Callable[[str], bool]) -> str | None:
        """The ``fair`` place that has had the longest of these beginnings, the shortest of which stands first."""
        found = (self._places.get(key) for key in reversed(keys))
        return next((place for place in found if place is not None and fair(place)), None)

    def note(self, keys: Sequence[bytes], place: str) -> None:
        """It has had them."""
        for key in keys:
            self._places[key] = place
            self._places.move_to_end(key)
        while len(self._places) > KNOWN_PIECES:
            self._places.popitem(last=False)


def uneven(unfinished: int, least: int) -> bool:
    """Whether one with so much to do has far more than another, who has ``least``."""
    return unfinished > UNEVEN * (least + 1)


class PrefixCacheAware:
    """Where the longest beginning of the prompt was sent before, unless that node has far more to do than another."""

    def __init__(self) -> None:
        self._sent = Sent()

    def __call__(self, nodes: Sequence[Node], body: Any, now: float) -> Node:
        keys = prefixes(body)
        by_url = {node.url: node for node in nodes}
        least = min(node.unfinished for node in nodes)
        url = self._sent.find(keys, lambda url: url in by_url and not uneven(by_url[url].unfinished, least))
        chosen = min_expected_latency(nodes, body, now) if url is None else by_url[url]
        self._sent.note(keys, chosen.url)
        return chosen


def prefixes(body: Any) -> list[bytes]:
    """Digests of the beginnings of a request's prompt, the shortest first."""
    if not isinstance(body, dict):
        return []
    most = PIECE * MOST_PIECES
    text = as_json(_beginning([body[name] for name in PROMPT_FIELDS if body.get(name)], most)[0])
    found, state = [], blake2b(digest_size=8)
    for start in range(0, min(len(text), most), PIECE):
        state.update(text[start : start + PIECE])
        found.append(state.digest())
    return found


def _beginning(value: Any, room: int) -> tuple[Any, int]:
    """As much of a JSON value as ``room`` characters of its text have, or a little more; and the room that is left."""
    if isinstance(value, str):
        return value[: max(room, 0)], room - len(value)
    if isinstance(value, dict):
        kept = {}
        for name, item in value.items():
            if room <= 0:
                break
            kept[name], room = _beginning(item, room - len(name))
        return kept, room
    if isinstance(value, list):
        items = []
        for item in value:
            if room <= 0:
                break
            part, room = _beginning(item, room)
            items.append(part)
        return items, room
    return value, room - 1


def sticky(nodes: Sequence[Node], session: Any) -> Node:
    """Always the same node for a session, as long as it is there."""
    by_url = {node.url: node for node in nodes}
    return by_url[sticky_among(list(by_url), session)]


def sticky_among(names: Sequence[str], session: Any) -> str:
    """Always the same of these names for a session, as long as it is among them."""
    return max(names, key=lambda name: blake2b(f"{name} {session}".encode(), digest_size=8).digest())


_NAMES: dict[str, Callable[[], Strategy]] = {
    "random": lambda: at_random,
    "min_expected_latency": lambda: min_expected_latency,
    "min_observed_latency": lambda: min_observed_latency,
    "prefix_cache_aware": PrefixCacheAware,
}
NAMES = tuple(_NAMES)
ALIASES = {"cache_aware": "prefix_cache_aware", "prefixaware": "prefix_cache_aware"}  # SGLang's, vLLM's


def strategy(name: str) -> Strategy:
    """Raises UsageError for a name that is none."""
    known = ALIASES.get(name, name)
    if known not in _NAMES:
        raise UsageError(f"--strategy: expected one of {', '.join(NAMES)}, found {name!r}")
    return _NAMES[known]()
