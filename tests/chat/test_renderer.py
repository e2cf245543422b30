"""Templates of models, rendered in a process of their own: the same text, and nothing they do hurts this process."""

from __future__ import annotations

import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.box.box import Limits
from toolkit.chat.refusal import TemplateRefusal
from toolkit.chat.renderer import LIMITS, Renderer
from toolkit.chat.sandbox import MAX_TEXT, Sandbox
from toolkit.chat.template import ChatTemplate
from toolkit.errors import ToolkitError, UsageError

MESSAGES = [{"role": "user", "content": "hi <b> é \ud800"}]


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(Limits(LIMITS.memory, cpu_seconds=0.3))


def test_a_greedy_template_ends_quickly_in_one_line(renderer: Renderer, corpus: Any) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    harmless = 0  # a fast machine renders some within the limits
    for source in corpus("templates").HOSTILE:
        try:
            assert len(renderer.render(source, {"messages": MESSAGES})) <= MAX_TEXT
            harmless += 1
        except ValueError as error:
            assert "\n" not in str(error) and 0 < len(str(error)) < 320, source
    assert harmless < 9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
    assert renderer.render("{{ messages[0].content }}", {"messages": MESSAGES}) == MESSAGES[0]["content"]


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.role ~ m.content | trim }}{% endfor %}",
        "{{ messages | tojson }}{{ n }}{{ none_ }}{{ t | tojson(indent=2) }}{{ absent is defined }}",
    ],
)
def test_the_text_is_what_rendering_here_gives(renderer: Renderer, source: str) -> None:
    variables: dict[str, Any] = {"messages": MESSAGES, "n": 1.5, "none_": None, "t": [{"ü": [1, True]}]}
    assert renderer.render(source, variables) == Sandbox().render(source, variables)


def test_refusals_and_faults_are_told_apart(renderer: Renderer) -> None:
    with pytest.raises(TemplateRefusal, match="roles must alternate"):
        renderer.render("{{ raise_exception('roles\nmust alternate') }}", {})
    with pytest.raises(ValueError, match="line 2"):
        renderer.check("\n{% if %}")
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for value in (object(), deep):
        with pytest.raises(UsageError, match="plain JSON"):
            renderer.render("{{ x }}", {"x": value})


def test_a_slow_template_does_not_hold_the_others_up() -> None:
    renderer = Renderer(Limits(LIMITS.memory, cpu_seconds=2.0))
    with ThreadPoolExecutor(9) as pool:
        loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
        slow = pool.submit(renderer.render, loops, {})
        quick = [pool.submit(renderer.render, "{{ x }}", {"x": i}) for i in range(40)]
        assert [q.result() for q in quick] == [str(i) for i in range(40)]
        assert not slow.done()
        with pytest.raises(ValueError, match="processor time"):
            slow.result()


def test_a_model_s_template_that_is_greedy_costs_one_line(tokenizer_dirs: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "greedy.jinja"
    file.write_text("{% if messages | length > 1 %}{{ ('{0:99999}' * 60000).format(1) }}{% endif %}ok")
    template = ChatTemplate.open(Tokenizer.open(tokenizer_dirs["byte_level"]), "m", str(file))
    assert template.render("hi") == "ok"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    # which of its two limits it meets first is the machine's matter
    with pytest.raises(
        ToolkitError, match=r"greedy.jinja.* fails: it takes more than .*(MiB of memory|s of processor time)"
    ):
        template.render(turns)
    assert template.render("hi") == "ok"


def test_built_in_templates_need_no_process(tokenizer_dirs: dict[str, Path]) -> None:
    before = threading.active_count()
    template = ChatTemplate.open(Tokenizer.open(tokenizer_dirs["byte_level"]), "m", "chatml")
    assert isinstance(template._renderer, Sandbox) and threading.active_count() == before
