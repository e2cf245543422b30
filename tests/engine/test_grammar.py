"""Grammars from strangers: hostile ones end in one line, in time, and honest ones are what they were."""

from __future__ import annotations

import contextlib
import json
import random
import re
import resource
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from toolkit.box import box
from toolkit.box.box import Cancelled, Limits, OutOfTime, Ticket
from toolkit.engine.constraints import grammar, grammar_job
from toolkit.engine.constraints.grammar import Grammars, GrammarState
from toolkit.engine.constraints.grammar_cost import HOSTILE, HOSTILE_S, Hostility, least_seconds
from toolkit.engine.constraints.grammar_format import check_format, fitted_format
from toolkit.engine.constraints.grammar_pace import Pace
from toolkit.errors import BusyError, UsageError

SIZE = 300
EOS = SIZE - 1


class Letters:
    """One token a byte, some of several letters, and an end."""

    special_ids = frozenset({EOS})
    eos_ids = (EOS,)
    token_bytes = [bytes([b]) for b in range(256)] + [b"aa", b"aaaa", b"a" * 16, b'{"', b'":', b", ", b"  "]
    token_bytes += [b"x%d" % i for i in range(SIZE - 1 - len(token_bytes))] + [b"</s>"]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(Letters(), SIZE)  # type: ignore[arg-type]


def refusal(grammars: Grammars, response_format: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as error:
        grammars.state(grammars.compiled(response_format), [])
    assert "\n" not in str(error.value) and str(error.value).startswith("response_format: "), str(error.value)
    return str(error.value)


def follow(grammars: Grammars, response_format: dict[str, Any], text: bytes) -> bool:
    """Whether ``text`` is by the grammar from its start to a possible end."""
    state = grammars.state(grammars.compiled(response_format), [])
    mask = np.zeros((1, -(-SIZE // 32)), np.int32)
    for byte in text:
        state.fill(mask, 0)
        if not mask[0, byte >> 5] >> (byte & 31) & 1:
            return False
        state.accept(byte)
    state.fill(mask, 0)
    return bool(mask[0, EOS >> 5] >> (EOS & 31) & 1)


def test_what_is_forced_ends_before_half_a_character(grammars: Grammars) -> None:
    """A guess does; an answer that comes to such a place goes on as any."""
    state = grammars.state(grammars.compiled({"type": "choice", "choice": ["größe", "grün"]}), [])
    state._spelled = lambda text: list(text.encode())
    assert state.forced() == list(b"gr")
    for byte in b"gr\xc3":
        assert state.accept(byte) is False
    assert state.forced() == [] and state.failure is None
    assert state.accept(0xB6) is False
    assert state.forced() == list("ße".encode()) and state.failure is None


def test_it_is_not_asked_what_is_forced_where_that_has_no_end(grammars: Grammars) -> None:
    """The engine would look for it for ever, and take all memory."""
    node = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
    for endless in (
        {"type": "grammar", "grammar": 'root ::= "a" root'},
        {"type": "json_schema", "json_schema": {"schema": node}},
    ):
        with contextlib.suppress(UsageError):  # xgrammar may refuse it by itself one day
            state = grammars.state(grammars.compiled(endless), [])
            assert state.forced() == [] and state.failure is None


def test_what_is_too_large_is_refused_before_it_is_compiled(corpus: Any) -> None:
    for response_format, words in corpus("grammars").too_large():
        with pytest.raises(UsageError, match=words) as error:
            check_format(response_format)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("schema", [{"$ref": "#/$defs/\ud800"}, {"enum": ["\ud800"]}])
def test_half_a_character_is_refused(schema: Any) -> None:
    """An error that names it could be sent by no engine in another process, which ended of it."""
    with pytest.raises(UsageError, match="half a character"):
        check_format({"type": "json_schema", "json_schema": {"schema": schema}})


def test_what_leads_nowhere_is_refused_or_ends_alone(grammars: Grammars) -> None:
    """What refers to itself without an end, behind a text that can be written: no token can be drawn there."""
    dead: dict[str, Any] = {"$ref": "#/$defs/b"}
    schema = {"type": "object", "properties": {"a": dead}, "required": ["a"], "$defs": {"b": dead}}
    asked = {"type": "json_schema", "json_schema": {"schema": schema}}
    assert "can never be fulfilled" in refusal(grammars, asked)
    compiled = grammar.Compiled(grammars._compilers.compile(asked), True, 0)  # past the box, which does not find all
    state, mask = grammars.state(compiled, []), np.zeros((1, -(-SIZE // 32)), np.int32)
    for byte in b'{"a": ':
        state.fill(mask, 0)
        assert state.failure is None and state.accept(byte) is False
    state.fill(mask, 0)
    assert state.failure is not None and "no text goes on" in state.failure and not mask.any()


def test_what_would_hold_the_engine_up_is_refused_or_soon_followed_no_further(grammars: Grammars, corpus: Any) -> None:
    at_once = 0
    for response_format in corpus("grammars").too_slow():
        started = time.thread_time()
        try:
            state = grammars.state(grammars.compiled(response_format), [])
        except UsageError as error:
            assert re.search("takes too long to follow|s of processor time", str(error)) and "\n" not in str(error)
            at_once += 1
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(box.Box, "run", lambda *_, **__: pytest.fail("it was compiled again"))
                refusal(grammars, response_format)  # known by now
            continue
        letter = ord("x" if response_format["type"] == "grammar" else "a")
        mask = np.zeros((1, -(-SIZE // 32)), np.int32)
        tokens = 0
        while state.failure is None:
            state.fill(mask, 0)
            assert state.accept(letter) is False
            tokens += 1
        state.fill(mask, 0)
        assert "takes too long to follow" in state.failure and not mask.any()
        assert time.thread_time() - started < 30 + 0.04 * tokens
    assert at_once >= 3


def test_what_cannot_be_compiled_within_limits_costs_this_process_nothing(
    corpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "LIMITS", Limits(512 << 20, cpu_seconds=0.4, reply=8 << 20))
    grammars = Grammars(Letters(), SIZE)  # type: ignore[arg-type]
    grammars.state(grammars.compiled({"type": "json_object"}), [])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for response_format in corpus("grammars").heavy():
        try:
            grammars.state(grammars.compiled(response_format), [])
        except UsageError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused >= 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10
    assert follow(grammars, {"type": "json_object"}, b"{}")


def test_what_is_hopeless_is_told_from_its_text(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> Any:
        raise AssertionError("a process works on it")

    monkeypatch.setattr(box.Box, "run", none)
    optional = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(990)}}
    hopeless = ["[^x]{1,8000}", "(ab|cd)?" * 1000, "a?" * 300, r"-(\d[^,]{0,500})*", "(" + "[a-z]?" * 200 + "|x)+"]
    formats = [{"type": "regex_schema", "regex_schema": text} for text in hopeless]
    rows = [text for text in hopeless if "[^" not in text]  # what a schema's pattern counts beyond 128 costs nothing
    formats += [{"type": "json_schema", "json_schema": {"schema": {"items": {"pattern": text}}}} for text in rows]
    formats += [{"type": "grammar", "grammar": f"root ::= x\nx ::= {text}"} for text in ('"ab"? ' * 200, "[^x]{2,900}")]
    for response_format in [*formats, {"type": "json_schema", "json_schema": {"schema": {"anyOf": [optional]}}}]:
        assert "it takes more than 1 s of processor time (about " in refusal(grammars, response_format)
    many = {"properties": {f"p{n}": {"type": "string", "maxLength": 200 + n} for n in range(40)}}
    assert "processor time (about 36.0 s)" in refusal(
        grammars, {"type": "json_schema", "json_schema": {"schema": many}}
    )


@pytest.mark.parametrize(
    "text", ["[", "-", ".", "1", '"', "(", "\\[", '"\\', "{1", "a ", "[a-z]{1", "-" + " " * 99, "(?<a"]
)
def test_texts_that_close_nothing_are_read_once(text: str) -> None:
    """The server waits while they are read."""
    pattern = (text * (1 << 13))[: 1 << 13]
    began = time.thread_time()
    least_seconds({"type": "grammar", "grammar": (text * (1 << 18))[: 1 << 18]})
    least_seconds({"type": "json_schema", "json_schema": {"allOf": [{"pattern": pattern}] * 31}})
    assert time.thread_time() - began < 20, "hours, if each were looked at from each place"


def test_counts_of_very_many_digits_are_counts() -> None:
    for count in ("{" + "9" * 5000 + "}", "{0," + "9" * 5000 + "}"):
        assert least_seconds({"type": "regex_schema", "regex_schema": f"[^x]{count}"}) > 1.0


def test_honest_formats_are_cheap_by_their_text(corpus: Any) -> None:
    patterns = [
        r"^[a-zA-Z0-9.!#$%&'*+/=?^_`{|}~-]+@[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?(?:\.[a-zA-Z0-9]{2,63})*$",
        r"^\d{4}-[01]\d-[0-3]\dT[0-2]\d:[0-5]\d(:[0-5]\d(\.\d+)?)?(Z|[+-]\d\d:?\d\d)?$",
        "^.{1,100}$",
        r"^\w{1,255}$",
        "^(([0-9]|[1-9][0-9]|1[0-9]{2}|2[0-4][0-9]|25[0-5])\\.){3}[0-9]{1,3}$",
        "-?" + "[0-9]?" * 40,
    ]
    formats = [{"type": "regex_schema", "regex_schema": text} for text in patterns]
    many = {f"p{i}": {"type": "string", "maxLength": (4000, 255, 100, 20)[i % 4]} for i in range(300)}
    formats.append({"type": "json_schema", "json_schema": {"schema": {"properties": many}}})
    for response_format in [*formats, *corpus("grammars").harmless()]:
        assert least_seconds(response_format) <= (5.0 if response_format["type"] == "json_schema" else 1.0)


def test_what_is_cheap_is_compiled_again_here_and_is_the_same(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []
    run = grammar.Box.run

    def ran(self: Any, *args: Any, **more: Any) -> Any:
        told.append((answer := run(self, *args, **more))[0])
        return answer

    wanted = FORMATS["objects"]
    monkeypatch.setattr(grammar.Box, "run", ran)
    here = Grammars(Letters(), SIZE).compiled(wanted)  # type: ignore[arg-type]
    assert told == [True]
    text = here.grammar.serialize_json()
    assert grammar.CORE.CompiledGrammar.deserialize_json(text, grammars._info).serialize_json() == text


@pytest.mark.parametrize(("least", "most"), [(500, 5), (10**6, 10**7), (10**400, 10**401), (-5, 200), (True, 300)])
def test_lengths_that_nobody_means_end_no_process_for_others(grammars: Grammars, least: int, most: int) -> None:
    asked = {"type": "string", "minLength": least, "maxLength": most}
    grammars.compiled({"type": "json_object"})  # there is a process from now on
    with contextlib.suppress(UsageError):
        grammars.compiled({"type": "json_schema", "json_schema": {"schema": asked}})
    (box,) = {child._process.pid for child in grammars._box._idle if child.alive} or {0}
    assert follow(grammars, {"type": "choice", "choice": ["yes", f"{most}"]}, b"yes")
    assert {child._process.pid for child in grammars._box._idle} == {box}, "it was replaced"


def test_what_no_limit_ends_does_not_go_on_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths that strangers think up are compiled before the fork only in long turns, and few of them."""
    made: list[tuple[int, int]] = []
    compiled = grammar_job.compile_format

    def counted(compiler: Any, response_format: dict[str, Any]) -> Any:
        text = response_format["json_schema"]["schema"]
        made.append((text["minLength"], text["maxLength"]))
        return compiled(compiler, response_format)

    monkeypatch.setattr(grammar_job, "compile_format", counted)
    compilers = grammar_job.Compilers(Grammars(Letters(), SIZE)._info)  # type: ignore[arg-type]

    def prepare(first: int, seconds: float) -> set[tuple[int, int]]:
        texts = [{"type": "string", "maxLength": first + i} for i in range(4)]
        made.clear()
        compilers.prepare({"type": "json_schema", "json_schema": {"schema": {"anyOf": texts}}}, seconds)
        return set(made) - {(0, grammar_job.COUNTED)}

    assert prepare(200, 0.25) == set(), "a short turn"
    assert prepare(200, 100.0) == {(0, 200 + i) for i in range(4)} and prepare(200, 100.0) == set()
    assert sum(len(prepare(300 + 10 * i, 100.0)) for i in range(9)) == grammar_job.PREPARED - 4


def test_a_client_s_format_has_less_time_than_many_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def run(self: Any, value: Any, ticket: Any = None, cpu_seconds: float = 0.0, nice: int = 0) -> Any:
        asked.append(cpu_seconds)
        raise ValueError("is not valid")

    grammars = Grammars(Letters(), SIZE)  # type: ignore[arg-type]
    monkeypatch.setattr(grammar.Box, "run", run)
    tools = {"type": "structural_tag", "structural_tag": {"format": "x" * 40_000}}
    name = {"type": "json_schema", "json_schema": {"schema": {"type": "string", "maxLength": 200}}}
    names = {"anyOf": [{"type": "string", "maxLength": n} for n in (100, 200, 300, 300)]}
    several = {"type": "json_schema", "json_schema": {"schema": names}}
    for response_format in (
        {"type": "json_object"},
        {"type": "regex_schema", "regex_schema": "[abc]+"},
        tools,
        name,
        several,
    ):
        with pytest.raises(UsageError):
            grammars.compiled(response_format)
    assert asked[0] == asked[1] == 1.0 and 5 < asked[2] < 10 and asked[3:] == pytest.approx([3.4, 5.8])


def test_texts_whose_letters_are_counted(grammars: Grammars) -> None:
    """Many lengths in one schema; a pattern that says no more than one; patterns that xgrammar cannot keep."""
    lengths = {f"p{n}": {"type": "string", "maxLength": n} for n in (5, 60, 128, 129, 500)}
    lengths["any"] = {"type": "string", "pattern": "^.{2,300}$"}
    lengths["counted"] = {"type": "string", "pattern": "^[a-z]{0,200}$"}
    asked = {"type": "object", "properties": lengths, "required": list(lengths), "additionalProperties": False}
    value = {name: "x" * min(part.get("maxLength", 200), 300) for name, part in lengths.items()} | {"any": "ab"}
    for name, text, right in (
        ("p5", "x" * 5, True), ("p5", "x" * 6, False), ("p129", "x" * 130, False), ("any", "x" * 300, True),
        ("any", "x", False), ("any", "x" * 301, False), ("counted", "x" * 201, False), ("counted", "X", False),
    ):  # fmt: skip
        text = json.dumps(value | {name: text})
        named = {"type": "json_schema", "json_schema": {"schema": asked}}
        assert follow(grammars, named, text.encode()) is right, (name, text)


def test_a_pattern_of_a_length_is_one_beside_others_and_nowhere_else(grammars: Grammars) -> None:
    """Of two lengths the narrower holds, whichever stands first; values that look like schemas stay what they are."""

    def named(**schema: Any) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": {"schema": schema}}

    pattern = {"pattern": "^.{2,255}$"}
    both = [
        {"type": "string", "maxLength": 5} | pattern,
        {"type": "string"} | pattern | {"maxLength": 5, "minLength": 1},
    ]
    for schema in both:
        fits = [follow(grammars, named(**schema), b'"%s"' % (b"a" * n)) for n in (1, 2, 5, 6)]
        assert fits == [False, True, True, False]
    text = json.dumps(pattern, separators=(",", ":")).encode()
    for schema in ({"const": pattern}, {"enum": ["x", pattern]}):
        assert follow(grammars, named(**schema), text)
    with pytest.raises(UsageError, match="'maxLength', which is not a count"):
        fitted_format(named(**pattern, maxLength=None))
    inside = named(type="object", properties={"const": {"type": "string"} | pattern}, required=["const"])
    assert not follow(grammars, inside, b'{"const": "a"}') and follow(grammars, inside, b'{"const": "aa"}')


@pytest.mark.parametrize("nested", [False, True])
def test_a_dot_of_a_pattern_leaves_out_ends_of_lines(grammars: Grammars, nested: bool) -> None:
    def fits(pattern: str, text: str) -> bool:
        form: dict[str, Any] = {"type": "regex_schema", "regex_schema": pattern}
        if nested:  # as behind a thought
            form = {"type": "structural_tag", "structural_tag": {"format": {"type": "regex", "pattern": pattern}}}
        return follow(grammars, form, text.encode())

    assert not fits(".", "\r")
    for pattern in (".*", r"a.?b[.]\.[^.]", r"\\.", r"[\s\S].", "(.|x){2}"):
        for text in ("", "ab", "a\nb", "aéb..x", "a\nb..x", "a.b..\n", "\\a", "\\\n", "\na", "a\n", "xy"):
            assert fits(pattern, text) == bool(re.fullmatch(pattern, text)), (pattern, text)


def test_what_a_pattern_behind_a_thought_says_is_no_string_of_json(grammars: Grammars) -> None:
    """A quote may stand there and the end of a line not, as within a string: the end was taken for a quote."""
    for rule in ({"type": "regex", "pattern": r"[^\n]{2}"}, {"type": "grammar", "grammar": r"root ::= [^\n] [^\n]"}):
        call = {"type": "json_schema", "json_schema": {"type": "object"}}
        for node in (rule, {"type": "or", "elements": [call, rule]}):
            form = {"type": "structural_tag", "structural_tag": {"format": node}}
            assert not follow(grammars, form, b"x") and follow(grammars, form, b'x"')


@pytest.mark.parametrize("pattern", [r"\Aa\Z", r"[\A]", r"\\\z", r"\Qa\E"])
def test_an_escape_that_means_nothing_is_refused(grammars: Grammars, pattern: str) -> None:
    """It would be read as its letter: the answer to ``\\Aa`` would be "Aa"."""
    assert "means nothing in ECMA-262" in refusal(grammars, {"type": "regex_schema", "regex_schema": pattern})
    assert follow(grammars, {"type": "regex_schema", "regex_schema": r"\\A"}, b"\\A")


def test_formats_that_take_long_do_not_hold_up_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few at a time have all their time; so many wait for that, more are sent away; what is short passes them all."""
    grammars, go_on, begun = Grammars(Letters(), SIZE), threading.Event(), threading.Semaphore(0)  # type: ignore[arg-type]
    run = grammar.Box.run

    def ran(self: Any, value: Any, ticket: Any = None, cpu_seconds: float = 0.0, nice: int = 0) -> Any:
        if value["type"] != "regex_schema":
            return run(self, value, ticket=ticket, cpu_seconds=cpu_seconds, nice=nice)
        begun.release()
        assert cpu_seconds < 1 or go_on.wait(60)
        raise OutOfTime(f"it takes more than {cpu_seconds:g} s of processor time")

    def ask(letters: int) -> str:
        with pytest.raises((BusyError, UsageError)) as error:
            grammars.compiled({"type": "regex_schema", "regex_schema": "a" * letters})
        return str(error.value)

    monkeypatch.setattr(grammar.Box, "run", ran)
    with ThreadPoolExecutor(16) as pool:
        first = [pool.submit(ask, 1 + i) for i in range(grammar._LONG_TURNS)]
        assert all(begun.acquire(timeout=60) for _ in first)
        others = [pool.submit(ask, 20 + i) for i in range(grammar._LINE + 1)]
        sent_away = next(as_completed(others, 60)).result()
        assert f"{grammar._LINE} others that take long wait already" in sent_away
        assert follow(grammars, {"type": "json_object"}, b"{}")
        assert sum(future.done() for future in [*first, *others]) == 1
        go_on.set()
        texts = [future.result(60) for future in [*first, *others]]
    assert sum("more than 1 s of processor time" in text for text in texts) == grammar._LONG_TURNS + grammar._LINE


def test_nobody_waits_long_while_hostile_formats_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Honest ones wait for each other, whatever that takes."""
    grammars, go_on = Grammars(Letters(), SIZE), threading.Event()  # type: ignore[arg-type]
    begun = threading.Semaphore(0)

    def ran(self: Any, value: Any, ticket: Any = None, cpu_seconds: float = 0.0, nice: int = 0) -> Any:
        if cpu_seconds < 1:  # a short turn
            raise OutOfTime("it takes more")
        begun.release()
        assert go_on.wait(60)
        raise ValueError("is not valid")

    def ask(letters: int) -> Exception:
        began = time.monotonic()
        ticket = Ticket(lambda: grammars.why_not(2.0 * (time.monotonic() > began), False))
        with pytest.raises((BusyError, UsageError)) as error:
            grammars.compiled({"type": "regex_schema", "regex_schema": "a" * letters}, ticket)
        return error.value

    monkeypatch.setattr(grammar.Box, "run", ran)
    with ThreadPoolExecutor(16) as pool:
        first = [pool.submit(ask, 1 + i) for i in range(grammar._LONG_TURNS)]
        assert all(begun.acquire(timeout=60) for _ in first)
        waits = pool.submit(ask, 20)
        with pytest.raises(TimeoutError):
            waits.result(0.5)
        for _ in range(HOSTILE):
            grammars._hostility.met()
        sent_away = waits.result(60)
        assert isinstance(sent_away, BusyError) and "beside others that cannot be compiled; try again" in str(sent_away)
        go_on.set()
        assert all(isinstance(future.result(60), UsageError) for future in first)
    assert grammars.why_not(1.0, True) is None and grammars.why_not(2.0, True)


def test_a_mistake_or_two_are_no_hostility(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    hostility = Hostility()
    for _ in range(HOSTILE):
        assert not hostility.there
        hostility.met()
    assert hostility.there
    now[0] += HOSTILE_S
    assert not hostility.there
    hostility.met()
    assert not hostility.there


def test_honest_formats_are_taken(grammars: Grammars, corpus: Any) -> None:
    for response_format in corpus("grammars").harmless():
        grammars.state(grammars.compiled(response_format), [])
    object_ = {
        "type": "object",
        "properties": {"b": {"type": "integer"}, "a": {"enum": ["x", 1]}},
        "required": ["b", "a"],
    }
    named = {"type": "json_schema", "json_schema": {"name": "n", "schema": object_}}
    assert follow(grammars, named, json.dumps({"b": 12, "a": "x"}).encode())
    assert follow(grammars, {"type": "regex_schema", "regex_schema": "a[bc]{2}"}, b"abc")
    assert not follow(grammars, {"type": "choice", "choice": ["yes", "no"]}, b"maybe")


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_json_has_one_blank_after_commas_and_colons_and_no_more(grammars: Grammars, kind: str) -> None:
    anything = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "additionalProperties": True}}}
    chosen = anything if kind == "json_schema" else {"type": "json_object"}
    value = {"a": [1, {"b": None}], "c": "d  e"}
    assert follow(grammars, chosen, json.dumps(value).encode())
    for loose in ('{"a":  1}', '{ "a": 1}', '{"a": 1 }', ' {"a": 1}', '{"a" : 1}', '{"a": 1,\n "b": 2}', '{"a": 1}\n'):
        assert not follow(grammars, chosen, loose.encode()), loose


def schema(**properties: Any) -> dict[str, Any]:
    asked = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "json_schema", "json_schema": {"schema": asked}}


PERSON = {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}
FORMATS = {
    "strings": schema(city={"type": "string"}, country={"type": "string"}),
    "numbers": schema(age={"type": "integer"}, size={"type": "number"}, good={"type": "boolean"}),
    "lists": schema(of={"type": "array", "items": {"type": "string"}, "minItems": 1}, kind={"enum": ["aaa", "bbb"]}),
    "objects": schema(people={"type": "array", "items": PERSON}),
    "anything": {"type": "json_object"},
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("most", [60, 150])
def test_json_comes_to_its_end_before_it_is_cut(grammars: Grammars, name: str, most: int) -> None:
    """Whatever is drawn: here by something that hardly ever ends a string, a number or a list."""
    for seed in range(12):
        draw, text = random.Random(seed), b""
        state = grammars.state(grammars.compiled(FORMATS[name]), [])
        for left in range(most, 0, -1):
            mask = np.zeros((1, -(-SIZE // 32)), np.int32)
            state.fill(mask, 0, left=left)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:SIZE])
            on = [i for i in allowed if i != EOS and Letters.token_bytes[i] not in (b'"', b"}", b"]")]
            token = state.meant(int(draw.choice(on if on and draw.random() < 0.98 else list(allowed))))
            if state.accept(token):
                break
            text += Letters.token_bytes[token]
        else:
            raise AssertionError(f"cut: {text!r}")
        assert isinstance(json.loads(text), dict)


def test_a_wish_to_end_within_a_string_ends_the_string(grammars: Grammars) -> None:
    quote_and_more = Letters.token_bytes.index(b'":')

    def after(text: bytes, wanted: dict[str, Any] = FORMATS["strings"]) -> tuple[NDArray[np.uint8], GrammarState]:
        state = grammars.state(grammars.compiled(wanted), [])
        mask = np.zeros((1, -(-SIZE // 32)), np.int32)
        for byte in text:
            state.fill(mask, 0)
            assert not state.accept(byte)
        state.fill(mask, 0)
        return np.unpackbits(mask.view(np.uint8), bitorder="little"), state

    allowed, state = after(b'{"city": "Paris')
    for token in (EOS, quote_and_more):
        assert allowed[token] and state.meant(token) == ord('"')
    assert state.meant(ord("x")) == ord("x") and state.meant(ord('"')) == ord('"')
    for text in (b"{", b'{"city": ', b'{"city": "Paris"', b'{"city": "Paris", "cou', b'{"city": "Par\\'):
        allowed, state = after(text)
        assert not allowed[EOS] and state.meant(EOS) == EOS, text
    allowed, state = after(b'"a', {"type": "grammar", "grammar": 'root ::= "\\"" [a-z\\"]* "!"'})
    assert not allowed[EOS] and state.meant(EOS) == EOS  # no JSON


def test_the_order_of_properties_is_the_schema_s(grammars: Grammars) -> None:
    for names in ("ab", "ba"):
        properties = {name: {"type": "integer"} for name in names}
        asked = {"type": "object", "properties": properties, "required": list(names)}
        text = json.dumps(dict.fromkeys(names, 1)).encode()
        assert follow(grammars, {"type": "json_schema", "json_schema": {"schema": asked}}, text)


def test_long_and_deep_texts_are_followed_without_harm(grammars: Grammars) -> None:
    any_json = {"type": "json_schema", "json_schema": {"schema": {}}}
    for response_format, byte in (
        (any_json, b"["),
        ({"type": "grammar", "grammar": 'root ::= "a" root "b" | ""'}, b"a"),
        ({"type": "grammar", "grammar": 'root ::= root "a" | "a"'}, b"a"),
    ):
        state = grammars.state(grammars.compiled(response_format), [])
        mask = np.zeros((1, -(-SIZE // 32)), np.int32)
        for _ in range(20_000):
            state.fill(mask, 0)
            assert state.failure is None and mask.any()
            assert not state.accept(byte[0])
        del state


def test_a_request_that_leaves_frees_the_compiler(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    long = {"type": "regex_schema", "regex_schema": "a?" * 4000}
    monkeypatch.setattr(grammar, "check_cost", lambda _: None)
    ticket, ends = Ticket(), []

    def ask(ticket: Ticket) -> None:
        try:
            grammars.compiled(long, ticket)
        except (Cancelled, UsageError) as error:
            ends.append(type(error))

    also = Ticket()
    threads = [threading.Thread(target=ask, args=(t,)) for t in (ticket, also)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 60
    while ticket._child is None and also._child is None:  # the one compiles, and the other waits for it
        assert time.monotonic() < end and not ends
        time.sleep(0.001)
    ticket.cancel()
    also.cancel()
    for thread in threads:
        thread.join(60)
    assert ends == [Cancelled, Cancelled]
    assert grammars.find(long) is None and not grammars._refused.get(grammar._key(long))


def test_grammars_need_no_torch_and_leave_xgrammar_whole() -> None:
    code = (
        "import sys\n"
        "import toolkit.engine.constraints.grammar_job, toolkit.engine.constraints.grammar\n"
        "assert not {'torch', 'transformers', 'xgrammar'} & set(sys.modules), sys.modules.keys()\n"
        "import xgrammar, torch\n"
        "from xgrammar.base import _core\n"
        "assert xgrammar.GrammarCompiler and _core is toolkit.engine.constraints.grammar.CORE\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr


def test_grammars_of_one_step_share_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.thread_time", lambda: clock[0])

    def lasts(among: int, seconds: float) -> int:
        """Tokens of ``seconds`` each until the pace is lost."""
        pace = Pace()
        pace.among = among
        for token in range(1000):
            pace.next_token()
            with pace:
                clock[0] += seconds
            if pace.lost:
                return token
        return 1000

    assert lasts(1, 0.0039) == lasts(8, 0.0039) == 1000 > 100 > lasts(1, 0.0061)
    assert lasts(64, 0.0039) < 10 and lasts(64, 0.0007) < 150 and lasts(64, 0.0004) == 1000


@pytest.mark.parametrize("gone", [False, True])
def test_what_the_machine_is_to_blame_for_is_not_remembered(
    gone: bool, support: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel kills a box: later the same grammar is compiled."""
    support("dying_children").kill_children(monkeypatch, gone)
    grammars = Grammars(Letters(), SIZE)  # type: ignore[arg-type]
    with pytest.raises(BusyError, match=r"^response_format: the choice cannot be compiled now: .*; try again$"):
        grammars.state(grammars.compiled({"type": "choice", "choice": ["yes"]}), [])
    monkeypatch.undo()
    assert follow(grammars, {"type": "choice", "choice": ["yes"]}, b"yes")
