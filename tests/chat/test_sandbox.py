"""Templates that nobody vetted: hostile ones end quickly in one line, honest ones are not disturbed."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from toolkit.chat.refusal import TemplateRefusal
from toolkit.chat.sandbox import Sandbox

MESSAGES = [{"role": "user", "content": "hi <b> é"}]


def render(source: str, **variables: Any) -> str:
    return Sandbox().render(source, {"messages": MESSAGES, **variables})


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
