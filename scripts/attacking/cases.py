"""The attacks of ``scripts/attacks``, by name. Each gets a ``Target`` and yields what it was told, line by line."""

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

# name -> (numbers in the list of what was seen, attack, whether the engine does not outlive it)
ATTACKS: dict[str, tuple[str, Callable[[Target], Iterator[str]], bool]] = {
    "tiny temperature": ("1", tiny_temperature, False),
    "nested pattern": ("2", nested_pattern, False),
    "tiny penalty": ("3", tiny_penalty, False),
    "bad words": ("4", many_bad_words, False),
    "stop strings x n": ("5", long_stops, False),
    "long text": ("7", long_text, False),
    "token ids": ("7", many_ids, False),
    "long message": ("7", long_message, False),
    "slow grammars": ("8", slow_grammars, False),
    "abandoned grammars": ("8", abandoned_grammars, False),
    "many messages": ("11", many_messages, False),
    "half requests": ("12", half_requests, False),
    "no HTTP": ("17", no_http, False),
    "large pictures": ("39.3", large_pictures, False),
    "tiny pictures": ("39.3", tiny_pictures, False),
    "fetched pictures": ("39.4", fetched_pictures, False),
    "large videos": ("39.4", large_videos, False),
    "half heads": ("", half_heads, False),
    "smuggling": ("", smuggling, False),
    "usage errors": ("", usage_errors, False),
    "proxies in a circle": ("", circles, False),
    "hostile node": ("", hostile_node, False),
    "others' responses": ("39.2", others_responses, False),
    "pushed out": ("39.11", pushed_out, False),
    "taken places": ("39.1", taken_places, False),
    "batches": ("39.11", batches, False),
    "swapped": ("39.8", swapped, False),
    "held answers": ("39.10", held_answers, False),
    "forged roles": ("39.13", forged_roles, False),
    "greedy requests": ("", greedy_requests, False),
    "engine stopped": ("6, 10", stopped_engine, True),
    "engine killed": ("", killed_engine, True),
    "file truncated": ("15", truncated_file, True),
}
