"""The attacks of ``attacks``, by name. Each gets a ``Target`` and yields what it was told, line by line."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attacking.connections import half_heads, half_requests, no_http, smuggling
from attacking.door import batches, taken_places
from attacking.engine import killed_engine, stopped_engine, truncated_file
from attacking.neighbours import others_responses, pushed_out, swapped
from attacking.pictures import fetched_pictures, large_pictures, large_videos, tiny_pictures
from attacking.proxies import circles, hostile_node
from attacking.roles import forged_roles
from attacking.target import Target
from attacking.work import (
    abandoned_grammars,
    greedy_requests,
    held_answers,
    long_message,
    long_stops,
    long_text,
    many_bad_words,
    many_ids,
    many_messages,
    nested_pattern,
    slow_grammars,
    tiny_penalty,
    tiny_temperature,
    usage_errors,
)

# name -> (attack, whether the engine does not outlive it)
ATTACKS: dict[str, tuple[Callable[[Target], Iterator[str]], bool]] = {
    "tiny temperature": (tiny_temperature, False),
    "nested pattern": (nested_pattern, False),
    "tiny penalty": (tiny_penalty, False),
    "bad words": (many_bad_words, False),
    "stop strings x n": (long_stops, False),
    "long text": (long_text, False),
    "token ids": (many_ids, False),
    "long message": (long_message, False),
    "slow grammars": (slow_grammars, False),
    "abandoned grammars": (abandoned_grammars, False),
    "many messages": (many_messages, False),
    "half requests": (half_requests, False),
    "no HTTP": (no_http, False),
    "large pictures": (large_pictures, False),
    "tiny pictures": (tiny_pictures, False),
    "fetched pictures": (fetched_pictures, False),
    "large videos": (large_videos, False),
    "half heads": (half_heads, False),
    "smuggling": (smuggling, False),
    "usage errors": (usage_errors, False),
    "proxies in a circle": (circles, False),
    "hostile node": (hostile_node, False),
    "others' responses": (others_responses, False),
    "pushed out": (pushed_out, False),
    "taken places": (taken_places, False),
    "batches": (batches, False),
    "swapped": (swapped, False),
    "held answers": (held_answers, False),
    "forged roles": (forged_roles, False),
    "greedy requests": (greedy_requests, False),
    "engine stopped": (stopped_engine, True),
    "engine killed": (killed_engine, True),
    "file truncated": (truncated_file, True),
}
