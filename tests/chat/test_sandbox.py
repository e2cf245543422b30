"""Templates that nobody vetted: hostile ones end quickly in one line, honest ones are not disturbed."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import pytest

from toolkit.chat.sandbox import Sandbox, TemplateRefusal

MESSAGES = [{"role": "user", "content": "hi <b> é"}]


def render(source: str, **variables: Any) -> str:
    sandbox = Sandbox()
    return sandbox.render(sandbox.compile_source(source), {"messages": MESSAGES, **variables})


GROW = "{% set ns = namespace(s=START) %}{% for i in range(100) %}{% set ns.s = STEP %}{% endfor %}{{ ns.s }}"
TOO_MUCH = [
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ [0] * 10**10 }}",
    "{{ 10 ** 10 ** 10 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=1000000000) }}",
    GROW.replace("START", "'a'").replace("STEP", "ns.s ~ ns.s"),
    GROW.replace("START", "'a'").replace("STEP", "ns.s + ns.s"),
    GROW.replace("START", "[1]").replace("STEP", "ns.s + ns.s"),
    GROW.replace("START", "[1]").replace("STEP", "[ns.s, ns.s]"),
    GROW.replace("START", "1").replace("STEP", "{'a': ns.s, 'b': ns.s}"),
    GROW.replace("START", "7").replace("STEP", "ns.s * ns.s"),
    GROW.replace("START", "1").replace("STEP", "namespace(a=ns.s, b=ns.s)"),
    "{% set ns = namespace(s='a') %}{% for i in range(100) %}"
    "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
    "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns = namespace(s='abc') %}"
    "{% for i in range(60) %}{% set ns.s = f(ns.s) %}{% endfor %}",
    "{{ ('a' * 100000).replace('a', 'b' * 1000000) }}",
    "{{ ('a' * 100000) | replace('a', 'b' * 1000000) }}",
    "{{ ('a' * 100000) | join('b' * 1000000) }}",
    "{{ ('b' * 1000000).join('a' * 100000) }}",
    "{{ ('\n' * 1000000) | indent(1000000) }}",
    "{{ range(99999) | list | tojson(indent=1000000) }}",
    "{% set s = 'a' * 10000000 %}{{ [s, s, s, s, s] | tojson }}",
    "{% set s = 'a' * 100000 %}{% for i in range(90000) %}{% if s in (s ~ s) %}{% endif %}{% endfor %}",
    "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "x" * 2_000_000,
]


@pytest.mark.parametrize("source", TOO_MUCH, ids=range(len(TOO_MUCH)))
def test_a_greedy_template_ends_quickly_in_one_line(source: str) -> None:
    start = time.thread_time()
    with pytest.raises(ValueError) as error:
        render(source)
    assert "\n" not in str(error.value) and 0 < len(str(error.value)) < 320
    assert time.thread_time() - start < 10  # bounded at 1 s of work; the rest is a slow machine


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__ }}",
        "{{ range.__self__ }}{{ joiner.__init__.__globals__ }}",
        "{{ self._TemplateReference__context.environment }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ (messages | map(attribute='__class__') | list)[0] }}",
    ],
)
def test_python_s_internals_are_out_of_reach(source: str) -> None:
    try:
        text = render(source)
    except ValueError:
        return
    assert not any(word in text for word in ("class", "module", "object at", "Environment", "builtin"))


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ open('/etc/passwd') }}",
        "{{ lipsum(1000) }}",
        "{{ 'x'.expandtabs(1) }}",
        "{% for x in messages %}",
        "{% if %}",
        "{{ 1 / 0 }}",
        "{{ absent.attribute }}",
        "{{ 'a' | nosuchfilter }}",
    ],
)
def test_broken_or_forbidden_things_are_one_line(source: str) -> None:
    with pytest.raises(ValueError) as error:
        render(source)
    assert "\n" not in str(error.value)


def test_messages_are_never_changed() -> None:
    before = [dict(m) for m in MESSAGES]
    with pytest.raises(ValueError):
        render("{% set _ = messages[0].update({'content': 'x'}) %}")
    assert before == MESSAGES


def test_a_refusal_is_told_apart_from_a_failure() -> None:
    with pytest.raises(TemplateRefusal, match="roles must alternate"):
        render("{{ raise_exception('roles\nmust alternate') }}")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hi <b> é"}]'),
        ("{{ {'a': [1, 2]} | tojson(indent=2) }}", '{\n  "a": [\n    1,\n    2\n  ]\n}'),
        ("{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}", "user\n"),
        ("{% generation %}{{ messages[0].content[:2] }}{% endgeneration %}", "hi"),
        ("{% for i in range(5) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        (
            "{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{{ loop.last }}{% endfor %}",
            "0False2True",
        ),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{{ 'a' ~ 1 ~ none ~ [1, 'x'] }}", "a1None[1, 'x']"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ 'x'.split('</think>')[-1].lstrip('\\n').strip() }}|{{ ' a ' | trim }}", "x|a"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}={{ v }}{% endfor %}", "a=1"),
        ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m('a') + m('b') }}", "<a><b>"),
        ("{{ '%s-%03d' % ('a', 7) }} {{ '{}!'.format('x') }}", "a-007 x!"),
        ("{% filter upper %}a{{ 'b' }}{% endfilter %}{% set x %}c{{ 1 }}{% endset %}{{ x }}", "ABc1"),
        ("{{ (1, 2)[1] }}{{ 2 ** 3 }}{{ 7 % 4 }}{{ 3 * 'ab' }}", "283ababab"),
        ("{{ undefined_thing }}{{ undefined_thing is defined }}", "False"),
    ],
)
def test_what_honest_templates_use(source: str, expected: str) -> None:
    assert render(source) == expected


def test_the_date_is_today_s() -> None:
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)


def test_long_conversations_are_no_abuse() -> None:
    messages = [{"role": "user", "content": "word " * 200}] * 2000
    text = render("{% for m in messages %}{{ '<' ~ m.role ~ '>' + m.content | trim }}{% endfor %}", messages=messages)
    assert len(text) > 1_900_000
